//! Device memory that stays on the GPU while the job is suspended, on the fake GPU (`tests/fake-cuda`) with the real
//! program and the real CRIU. In every test the job's result equals that of an undisturbed run.

mod busy;
mod by_hand;
mod copying;
mod driver_faults;
mod pairs;
mod pausing;
mod resident_memory;
mod resident_options;
mod scene;
mod sequence;
