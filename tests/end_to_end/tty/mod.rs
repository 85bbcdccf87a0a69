//! Jobs in a terminal: what they see of it, keys, snapshots and restores, and what is left of the caller's terminal.

mod keys;
mod lines;
mod modes;
mod progress;
mod screen;
mod terminal_snapshots;
mod terminal_streams;
