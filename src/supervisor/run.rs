//! One run, from the command line to the exit code: looks at everything that
//! can be wrong before anything is touched, then hands over to the loop.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::clock;
use crate::config::Config;
use crate::criu::{Criu, FindError, Search};
use crate::job::{Input, Output};
use crate::store::{LockError, OpenError, ReadError, Store, WriteError};

use super::gpu_plan::GpuPairs;
use super::key::{KeyError, read_key};
use super::machine;
use super::program::{self, ProgramError};
use super::run_state::{Progress, RunState, RunStateError};
use super::supervise::Supervisor;
use super::workshop::{Streams, Workshop};
use crate::telemetry;

/// Exit code for failures of ours, before or around the job.
pub const OURS: u8 = 125;

/// What to run and how.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// All settings.
    pub config: Config,
    /// The job's command line.
    pub command: Vec<OsString>,
    /// Forget the run that the store holds and begin anew.
    pub fresh: bool,
    /// The GPUs that take the place of others in a restore, by UUID; empty leaves the choice to us.
    pub gpu_map: GpuPairs,
}

/// Why a run did not begin, or could not go on. The job does not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program cannot be run.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// No usable CRIU.
    #[error(transparent)]
    Criu(#[from] FindError),
    /// The store's key cannot be had.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store is in use.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The store cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The store cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The run's state cannot be read or written.
    #[error(transparent)]
    State(#[from] RunStateError),
    /// The store belongs to another command.
    #[error(
        "cannot go on: the store {} holds an unfinished run of another command\n  there: {there}\n  here:  {here}\n\
         run the same line again, choose another --store, or begin anew with --fresh",
        store.display()
    )]
    OtherCommand {
        /// The store.
        store: PathBuf,
        /// The command of the run that is there.
        there: String,
        /// The command that was given.
        here: String,
    },
    /// Something of the system's failed.
    #[error("cannot {operation}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The sandbox could not be started.
    #[error("cannot start the job")]
    Sandbox(#[from] crate::sandbox::SandboxError),
    /// Asked to give up rather than to start without an image.
    #[error(
        "cannot go on: none of the images could be restored; see the messages above, or begin anew with --fresh"
    )]
    NothingRestorable,
}

impl RunError {
    /// The process's exit code: 126 or 127 when the command is at fault, otherwise 125.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program(error) => error.exit_code(),
            _ => OURS,
        }
    }
}

/// How a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// With the job's start.
    Start,
    /// From the newest image.
    Restore,
}

/// Supervises a job until it has ended or was saved; returns the exit code.
///
/// Must be called from the process's main thread, outside of any async runtime: the sandbox dies
/// with the thread that started it.
///
/// # Errors
/// When the run cannot begin or go on; nothing of the job runs then.
pub fn run(options: RunOptions) -> Result<u8, RunError> {
    machine::use_one_heap();
    let RunOptions {
        config,
        command,
        fresh,
        gpu_map,
    } = options;
    let directory = std::env::current_dir().map_err(system("find the working directory"))?;
    let program = command.first().ok_or(ProgramError::Missing)?;
    program::check(program)?;
    let criu = Criu::find(&Search::new(config.criu.path.clone()))?;
    let key = read_key(&config.encryption)?;
    let path = plain(&directory.join(&config.store));
    let store = Store::create_or_open_with(&path, key.as_ref())?;
    drop(key); // the store has what it needs
    let lock = store.lock()?;
    let swept = store.sweep(&lock)?;
    tracing::debug!(?swept, "swept the store");
    let words: Vec<String> = command
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let Some((state, beginning)) = begin(&store, &words, &directory, fresh)? else {
        tracing::info!(store = %store.path().display(), "this run has finished already; --fresh begins anew");
        return Ok(0);
    };
    state.save(store.path())?;
    let shop = Workshop::new(config, store, lock, criu, command, directory, gpu_map)
        .map_err(system("prepare the work folder"))?;
    // Our own messages go to stderr: cutting its file would cut them too.
    let shared = same_file(io::stdout().as_fd(), io::stderr().as_fd());
    let streams = Streams {
        stdin: Input::new(Input::callers()).map_err(system("read stdin"))?,
        stdout: Output::new(own(io::stdout().as_fd())?, !shared),
        stderr: Output::new(own(io::stderr().as_fd())?, false),
        joined: shared,
    };
    let (stdout_line, stderr_line) = (streams.stdout.line_watch(), streams.stderr.line_watch());
    // Both are to know of the line, so both are asked.
    telemetry::share_lines_with(move || stderr_line() & (!shared || stdout_line()));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(system("start the event loop"))?;
    let streams = Arc::new(Mutex::new(streams));
    let result = runtime.block_on(async {
        let mut supervisor = Supervisor::new(Arc::new(shop), streams, state)?;
        supervisor.run(beginning).await
    });
    // Nothing that still waits on a blocking thread may keep us.
    runtime.shutdown_background();
    result
}

/// Decides how the run begins; `None` when it has finished already.
fn begin(
    store: &Store,
    command: &[String],
    directory: &Path,
    fresh: bool,
) -> Result<Option<(RunState, Beginning)>, RunError> {
    let new = || RunState::new(command.to_vec(), directory.to_owned(), clock::unix_ms());
    let Some(mut state) = RunState::load(store.path())?.filter(|_| !fresh) else {
        return Ok(Some((new(), Beginning::Start)));
    };
    if state.command != command {
        return Err(RunError::OtherCommand {
            store: store.path().to_owned(),
            there: state.command.join(" "),
            here: command.join(" "),
        });
    }
    match state.progress {
        Progress::Finished => Ok(None),
        Progress::Running | Progress::Saved | Progress::Failed { .. } => {
            state.progress = Progress::Running;
            Ok(Some((state, Beginning::Restore)))
        }
    }
}

/// Without `.` in the middle.
fn plain(path: &Path) -> PathBuf {
    path.components().collect()
}

fn own(descriptor: std::os::fd::BorrowedFd<'_>) -> Result<std::os::fd::OwnedFd, RunError> {
    descriptor
        .try_clone_to_owned()
        .map_err(system("use the standard streams"))
}

fn same_file(one: std::os::fd::BorrowedFd<'_>, other: std::os::fd::BorrowedFd<'_>) -> bool {
    let identity = |descriptor| {
        nix::sys::stat::fstat(descriptor)
            .map(|about| (about.st_dev, about.st_ino))
            .ok()
    };
    identity(one) == identity(other)
}

pub(super) fn system(operation: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::System { operation, source }
}
