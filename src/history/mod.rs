//! The event log: what happened to a run, one JSON object a line (NDJSON), in the store.
//!
//! The supervisor writes it; `status`, `report`, the exit summary and the metrics read it. It knows of no images, jobs
//! or GPUs beyond their names.

mod entry;

pub use entry::{Entry, Event, Phase};
