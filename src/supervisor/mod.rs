//! The supervisor: starts the job, takes snapshots, restores it, ends with its exit code.
//!
//! Start reading at [`run`](run::run), then `supervise` (the loop and its states), `beginnings` and `endings`,
//! `snapshot` and `restore` (the two ways, phase by phase).

mod beginnings;
mod bystanders;
mod carried;
mod chronicle;
mod computing;
mod control;
mod describe;
mod diagnosis;
pub mod doctor;
mod dump;
mod dump_end;
mod dumper;
mod endings;
mod environment;
mod event;
mod freeze;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
mod gpu;
mod gpu_facts;
mod gpu_plan;
pub mod hang;
mod hang_sampler;
mod hang_watch;
mod hook;
mod hooks;
mod image;
pub mod interval;
mod intrusion;
mod key;
mod leftovers;
mod machine;
mod metrics;
mod notify;
mod obstacle;
mod operation;
mod pause;
mod pauses;
mod privileges;
mod program;
mod progress;
mod record;
mod requests;
mod resident;
pub mod restart;
mod restore;
mod restore_error;
mod restore_gpu;
mod room;
mod run;
mod run_state;
pub mod schedule;
mod signals;
mod snapshot;
mod snapshot_error;
mod standing;
mod status;
mod stop;
mod stopping;
mod stream_kind;
mod streams;
mod supervise;
mod suspension;
mod terminal;
mod timing;
mod workshop;

pub use carried::companions;
pub use control::{
    ControlError, request_pause, request_snapshot, request_status, request_stop, request_unpause,
};
pub use describe::{chain, size};
pub(crate) use environment::STORE_VARIABLE;
pub use gpu_facts::{CudaFacts, GpuFacts};
pub use gpu_plan::{GpuPairs, Refusal};
pub use image::{ImageFacts, Phase, Trigger};
pub use key::{KeyError, generate_key, read_key};
pub use leftovers::Copies;
pub use machine::end_with_parent;
pub use obstacle::Obstacle;
pub use program::ProgramError;
pub use progress::{Stand, Step, Work};
pub use resident::{ResidentError, ResidentFacts, ResidentProcess, ResidentSegment};
pub use restore_error::RestoreError;
pub use room::policy;
pub use run::{ImageChoice, OURS, RunError, RunOptions, What, run};
pub use run_state::{NoSuchImage, Progress, RunState, RunStateError};
pub use snapshot_error::{FailureKind, SnapshotError};
pub use standing::StandingFacts;
pub use status::{State, Status, StatusError, status_of_store};
pub use stream_kind::StreamKind;
pub use streams::{Marks, Parts, TerminalMark};
pub use timing::seen_in;
pub use workshop::remove_work_folder;
