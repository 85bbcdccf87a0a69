//! End-to-end tests of the copier's process, on GPUs simulated by files (`tests/fake-cuda`); `tests/real_gpu` does the
//! same on a real one.

mod contents;
mod copier_faults;
mod copier_machine;
mod segments;
