//! Tests of the agent in real processes, on the fake GPU: its effect on programs, and its service to the supervisor.

mod agent_job;
mod allocation;
mod hand_over;
mod program_memory;
mod remake;
mod sharing;
mod strangers;
