//! The agent in real processes, on the fake GPU: what a program sees of it, and what the supervisor gets from it.

mod agent_job;
mod allocation;
mod hand_over;
mod remake;
mod sharing;
mod strangers;
