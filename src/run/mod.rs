//! A run: the facts, files and streams that snapshots, restores and the supervisor share.
//!
//! `run_context` holds the values that stay the same for the whole run, `run_state` the state that the store keeps
//! between two supervisors, `image_facts` the facts that an image records about its job. Nothing here takes a snapshot
//! or decides anything.

pub(crate) mod cpu_facts;
pub(crate) mod encryption_key;
pub(crate) mod environment;
pub(crate) mod exit_code;
pub(crate) mod failure_kind;
pub(crate) mod format;
pub(crate) mod gpu_facts;
pub(crate) mod housekeeping;
pub(crate) mod image_facts;
pub(crate) mod machine;
pub(crate) mod own_activity;
pub(crate) mod program;
pub(crate) mod progress;
pub(crate) mod resident_facts;
pub(crate) mod run_context;
pub(crate) mod run_state;
pub(crate) mod running_job;
pub(crate) mod stale_scripts;
pub(crate) mod stream_kind;
pub(crate) mod streams;
pub(crate) mod work_folder;

pub use crate::path_text::CommandLine;
pub use cpu_facts::CpuFacts;
pub use encryption_key::{KeyError, generate_key, read_key};
pub(crate) use environment::STORE_VARIABLE;
pub use exit_code::OURS;
pub use failure_kind::FailureKind;
pub use format::{chain, size};
pub use gpu_facts::{CudaFacts, GpuFacts, GpuPairs, SparedThreads};
pub use housekeeping::{Copies, remove_held};
pub use image_facts::{ImageFacts, Phase, Trigger};
pub use machine::end_with_parent;
pub use program::ProgramError;
pub use progress::{Step, Work, WorkProgress};
pub use resident_facts::{ResidentFacts, ResidentProcess, ResidentSegment};
pub use run_state::{ImageChoice, NoSuchImage, Progress, RunState, RunStateError};
pub use stream_kind::StreamKind;
pub use streams::{Marks, Parts, TerminalMark};
pub use work_folder::remove_work_folder;
