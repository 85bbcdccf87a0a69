//! Device memory that stays on the GPU while the job is suspended, on the fake GPU (`tests/fake-cuda`) with the real
//! program and the real CRIU. Whatever happens, the job ends as one that nobody touched.

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
