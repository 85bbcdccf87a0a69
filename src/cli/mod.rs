//! (in progress)

pub mod doctor;
