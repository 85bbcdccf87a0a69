//! Jobs in a terminal: its properties for the job, keys, snapshots and restores, and the state of the caller's terminal
//! afterwards.

mod keys;
mod lines;
mod modes;
mod progress;
mod screen;
mod terminal_snapshots;
mod terminal_streams;
