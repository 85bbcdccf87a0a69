//! The event log: what happened to a run, one JSON object a line (NDJSON), in the store.
//!
//! ```text
//! supervisor ── Entry ──▶ Log ──▶ events.ndjson ──▶ entries ──▶ Account ──▶ Summary ──▶ words
//! ```
//! The supervisor writes it; `status`, `report`, the exit summary and the metrics read it. It knows of no images, jobs
//! or GPUs beyond their names.

mod account;
mod entry;
mod event_log;
mod summary;

pub use account::{Account, Comeback};
pub use entry::{Entry, Event, Phase};
pub use event_log::{Entries, Log, LogError, entries, latest, path};
pub use summary::{FREEZE_BOUNDS, Freeze, Summary, counted, percent, time_in_words};
