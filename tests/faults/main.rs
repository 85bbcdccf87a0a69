//! Everything that goes wrong: killed jobs, supervisors and CRIUs, full disks, damaged images, changed files,
//! slow dumps, hostile clients. A job is computing or restorable after each.

#[path = "../common/mod.rs"]
mod common;

mod criu;
mod damage;
mod disk;
mod files;
mod hanging;
mod kills;
mod output;
mod requests;
mod support;
