//! A run as one self-contained page of HTML: no network, no script, charts drawn as SVG.
//!
//! ```text
//! event log ──▶ Story (what happened, bounded) ──▶ page: headline, timeline, bars, table
//! images    ──▶ Machine ─────────────────────────┘
//! ```
//! Every string comes from the job or the machine and may be hostile: the templates escape it, `text` removes
//! characters that could mislead a reader, and the page forbids scripts by its content security policy. This module
//! does not know how snapshots are taken.

mod bars;
mod page;
mod story;
mod text;
mod timeline;
mod told;

pub use page::page;
pub use story::{Machine, Mark, MarkKind, Row, Snapshot, Span, SpanKind, Story};
