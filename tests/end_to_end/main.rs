//! End-to-end tests: the real program, in processes of its own, on the real CRIU.
//!
//! A test states the privilege that it needs by an attribute of the harness, `#[apply(as_root)]` for root. A test that
//! needs none is a plain `#[test]`. The tests run beside each other: one that shares something of the machine with others,
//! a name in `/dev/shm` for example, takes a lock.

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
mod programs;
mod reporting;
mod resident;
mod restarting;
mod running;
mod schedulers;
mod setup_scripts;
mod tree;
mod trust;
mod tty;
