//! End-to-end tests: the real program, as separate processes, on the real CRIU.
//!
//! A test declares the privilege that it needs by an attribute of the harness, `#[apply(as_root)]` for root. A test
//! without needs is a plain `#[test]`. The tests run in parallel: a test that shares something of the machine with
//! others, such as a name in `/dev/shm`, takes a lock.

mod agent;
mod command;
mod containers;
mod copier;
mod driver_snapshots;
mod escalations;
mod faults;
mod guide;
mod harness;
mod images;
mod preemption;
mod programs;
mod remote;
mod reporting;
mod resident;
mod restarting;
mod running;
mod schedulers;
mod setup_scripts;
mod tree;
mod trust;
mod tty;
mod unprivileged;
