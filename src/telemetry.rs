//! Logs: `tracing` to stderr, one line an event.
