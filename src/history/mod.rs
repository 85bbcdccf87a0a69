//! The event log: the events of a run, one JSON object per line (NDJSON), in the store.
//!
//! ```text
//! supervisor ── Entry ──▶ Log ──▶ events.ndjson ──▶ entries ──▶ Account ──▶ Summary ──▶ words
//! ```
//! The supervisor writes the log; `status`, `report`, the exit summary and the metrics read it. This module knows
//! images, jobs and GPUs by their names only.

mod account;
mod entry;
mod event_log;
mod summary;

pub use account::{Account, Comeback};
pub use entry::{Entry, Event, Phase};
pub use event_log::{Entries, Log, LogError, entries, latest, path};
pub use summary::{FREEZE_BOUNDS, Freeze, Summary, counted, percent, time_in_words};
