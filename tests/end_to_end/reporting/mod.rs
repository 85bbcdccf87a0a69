//! Reports about a run: the journal, `status`, the live view, metrics and the HTML report.

mod journal;
mod live;
mod metrics;
mod report;
mod status;
