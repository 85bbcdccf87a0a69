//! Hooks: the user's commands that run beside the job before and after events.

pub(super) mod hook_command;
pub(super) mod process_group;
pub(super) mod queue;
