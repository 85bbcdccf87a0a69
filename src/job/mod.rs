//! The job from outside: its process tree, its standard streams, its open files and sockets, and the rollback of its
//! files to their state at a snapshot.
//!
//! This module does not depend on CRIU, CUDA or the store. The supervisor passes on facts shared with them.

mod account;
mod activity;
mod attributes;
mod descriptors;
mod devices;
mod file_sample;
mod files;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_job;
mod halt;
mod input;
mod links;
mod nodes;
mod obstacles;
mod output;
mod process;
mod rewind;
mod sockets;
mod stacks;
mod terminal;
mod timers;
mod transparent_huge_pages;
mod tree;

pub use account::{MemoryUse, ProcessAccount, account};
pub use activity::cpu_time;
pub use attributes::{
    HungUp, MappedLock, ThreadAttributes, give_back_attributes, hang_up_terminals,
    hung_up_terminals, mapped_locks, record_attributes,
};
pub use descriptors::Descriptors;
pub use devices::{Holder, holders, majors};
pub use file_sample::{AppendedFile, check_unwritten, sample_appended, sample_unwritten};
pub use files::{Access, FilesError, OpenFile, collect, has_open};
#[cfg(test)]
pub(crate) use halt::tests::compiled;
pub use halt::{HaltError, Halted, code_of, halt, number_inside, thread_of};
pub use input::{Input, InputMark};
pub use links::{DumpLock, remove_links};
pub use nodes::{
    MovedSocket, Needed, Node, NodeKind, NodesError, clear_sockets, name_sockets, needed,
};
pub use obstacles::{
    ExitCode, Finding, Obstacle, ProcessName, When, exit_codes, find_obstacle, find_unmounted,
    have_huge_pages,
};
pub use output::{Output, OutputMark, Patience, Relation, Shown, StatusLine};
pub use process::{environment, groups, has_mapped, user, users, variable};
pub use rewind::error::RewindError;
pub use rewind::{CutAway, Expected, LandedError, OtherBytes, Plan, check_nodes, plan, undo};
pub(crate) use sockets::PacketLock;
pub use sockets::{
    Backlog, SocketOptions, Sockets, SocketsError, give_back_socket_options, record_socket_options,
};
pub use stacks::write_stacks;
pub use terminal::{CallersTerminal, Key, Pty, TerminalDevice, window};
pub use timers::{Timer, TimersError, arm_timers, disarm_timers, record_timers};
pub use transparent_huge_pages::make_huge_pages;
pub use tree::{
    Process, TreeError, child_with_pid, died_under_trace, first_stopped, is_alive, is_doomed,
    is_stopped, is_to_stop, stopped_by_fault, tree, with_remains_of_criu,
};
