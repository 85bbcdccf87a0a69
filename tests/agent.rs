//! The agent in real processes, on the fake GPU: what a program sees of it, and what the supervisor gets from it.

#[path = "common/fake_gpu.rs"]
mod fake_gpu;

#[path = "agent/allocation.rs"]
mod allocation;
#[path = "agent/hand_over.rs"]
mod hand_over;
#[path = "agent/job.rs"]
mod job;
#[path = "agent/processes.rs"]
mod processes;
#[path = "agent/remake.rs"]
mod remake;
#[path = "agent/sharing.rs"]
mod sharing;
