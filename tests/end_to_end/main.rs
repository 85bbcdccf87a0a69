//! End-to-end tests: the real program, in processes of its own, on the real CRIU.

mod agent;
mod command;
mod containers;
mod copier;
mod driver_snapshots;
mod faults;
mod guide;
mod harness;
mod images;
mod reporting;
mod resident;
mod restarting;
mod running;
mod schedulers;
mod tree;
mod tty;
