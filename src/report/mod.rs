//! A run as one page of HTML that needs nothing else: no network, no script, charts drawn as SVG.
//!
//! ```text
//! event log ──▶ Story (what happened, bounded) ──▶ page: headline, timeline, bars, table
//! images    ──▶ Machine ─────────────────────────┘
//! ```
//! Every string is the job's or the machine's and may be hostile: the templates escape it, `text` takes out what could
//! mislead a reader, and the page forbids scripts by its own policy. It knows nothing of how snapshots are taken.

mod bars;
mod page;
mod story;
mod text;
mod timeline;
mod told;

pub use page::page;
pub use story::{Machine, Mark, MarkKind, Row, Snapshot, Span, SpanKind, Story};
