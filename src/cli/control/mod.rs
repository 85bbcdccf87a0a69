//! Verbs that send a request to a running supervisor: snapshot, pause, stop, status.

pub(super) mod pause;
pub(super) mod snapshot;
pub(super) mod status;
