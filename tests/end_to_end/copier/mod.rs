//! The copier's process end to end, on GPUs that are files (`tests/fake-cuda`); `tests/real_gpu` does the same on a real one.

mod contents;
mod copier_faults;
mod copier_machine;
mod segments;
