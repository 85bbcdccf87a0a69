//! Entry of the supervisor: a run from the command line to the exit code.
//!
//! [`run`] checks everything that can be wrong before it touches anything. Then it hands over to the event loop.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::decide::stage::Beginning;
use super::error::{RunError, system};
use super::event_loop::Supervisor;
use crate::clock;
use crate::config::Config;
use crate::criu::{Criu, Search};
use crate::cuda::GpuMap;
use crate::doctor::capabilities;
use crate::path_text::CommandLine;
use crate::printable::{Keep, escaped};
use crate::remote_run::{Begun, RemoteRun, RemoteTerms, StoreLease, lock_for_run};
use crate::run::encryption_key::read_key;
use crate::run::machine;
use crate::run::program::{self, ProgramError};
use crate::run::run_context::{Moved, RunContext};
use crate::run::run_state::{ImageChoice, NoSuchImage, Progress, RunState};
use crate::run::stale_scripts;
use crate::run::streams::Streams;
use crate::sandbox::{self, JobUser};
use crate::secret;
use crate::store::{ImageEntry, Store};

/// Settings and subject of a run.
#[derive(Clone, Debug)]
pub struct RunOptions {
    /// The complete settings.
    pub config: Config,
    /// The run.
    pub what: What,
    /// The GPUs that take the place of others in a restore; empty leaves the choice to us.
    pub gpu_map: GpuMap,
    /// Take the lease of the run at once, even if another supervisor may still hold it.
    pub take_over: bool,
}

/// The run to supervise.
#[derive(Clone, Debug)]
pub enum What {
    /// The run of a command: it starts, or continues from its newest image.
    Command {
        /// The job's command line.
        line: Vec<OsString>,
        /// Forget the run that the store holds and start over.
        fresh: bool,
    },
    /// The run that the store holds, whatever its end, or that of the image: it continues from an image.
    Image(ImageChoice),
}

/// Supervises a job until it has ended or was saved; returns the exit code.
///
/// Idempotent: with a store that holds the unfinished run of the same command it continues from the newest good image,
/// with a finished one it does nothing and returns 0.
///
/// What it expects of its process:
/// - [`helper_main`](crate::helper_main) was called first: the sandbox is a copy of this program.
/// - It is called from the main thread, outside of any async runtime: the sandbox dies with the thread that started it.
/// - The process is its own meanwhile: it handles signals (SIGTERM and SIGUSR2 snapshot and stop, SIGUSR1 snapshots,
///   SIGINT, SIGQUIT and SIGHUP go to the job), and stdin, stdout and stderr are the job's. One run a process.
///
/// It blocks. Requests come through the store's socket ([`request_snapshot`](super::request_snapshot) and others). A
/// caller that is killed takes the job with it; the next call continues from the newest image. The exit code is the
/// job's own, 128+n when signal n killed it, or 75 when it was saved and stopped.
///
/// # Errors
/// The run cannot begin or continue. Nothing of the job runs then, and the images are unchanged.
pub fn run(options: RunOptions) -> Result<u8, RunError> {
    machine::use_one_heap();
    secret::close_process().map_err(system("close this process to others"))?;
    sandbox::raise_descriptor_limit()?;
    let RunOptions {
        config,
        what,
        gpu_map,
        take_over,
    } = options;
    let directory = std::env::current_dir().map_err(system("find the working directory"))?;
    if let What::Command { line, .. } = &what {
        program::check(line.first().ok_or(ProgramError::Missing)?)?;
    }
    let user = config
        .user
        .as_deref()
        .map(JobUser::find)
        .transpose()?
        .flatten();
    let criu = Criu::find(&Search::new(config.criu.path.clone()))?;
    let key = read_key(&config.encryption)?;
    // The components leave out every `.`.
    let path: PathBuf = directory.join(&config.store).components().collect();
    let store = match what {
        What::Command { .. } => Store::create_or_open_with(&path, key.as_ref())?,
        What::Image(_) => Store::open_with(&path, key.as_ref())?,
    };
    drop(key); // the store has what it needs
    let lock = lock_for_run(&store)?;
    let lease = config.remote.lease;
    let store_lease = StoreLease::acquire(&store, config.store_shared, lease, take_over)?;
    let before = RunState::load(store.path())?;
    let swept = store.sweep(&lock)?;
    tracing::debug!(?swept, "swept the store");
    let is_fresh = matches!(what, What::Command { fresh: true, .. });
    let remote = remote_terms(&config, take_over, is_fresh)
        .map(|terms| RemoteRun::begin(terms, &store, &lock))
        .transpose()?;
    let (remote, begun) = remote.map_or((None, Begun::Local), |(run, begun)| (Some(run), begun));
    let plan = begin(&store, what, &directory, begun)?;
    let Some((state, beginning)) = plan else {
        if let (Some(remote), Begun::Local) = (&remote, begun) {
            // The end of the run was not recorded there.
            remote.end(true);
        }
        tracing::info!(store = %store.path().display(), "this run has finished already; --fresh starts it again");
        return Ok(0);
    };
    capabilities::warn_of_missing(config.isolation);
    let pairs = gpu_map.pairs().iter();
    let gpu_map = pairs.map(|pair| (pair.old.to_string(), pair.new.to_string()));
    let moved = Moved {
        map: gpu_map.collect(),
        through: store.images()?.last().map(|image| image.id),
    };
    let command = state.command.words().to_vec();
    let context = RunContext::new(config, store, lock, criu, command, directory, moved)
        .and_then(|context| context.with_user(user))
        .map(|context| context.with_remote(remote).with_store_lease(store_lease))
        .map_err(system("prepare the work folder"))?;
    let streams = Streams::ours(context.config.tty).map_err(system("use the standard streams"))?;
    streams.share_lines();
    // Not before: a run that cannot begin leaves the store as it was.
    state.save(context.store.path())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(system("start the event loop"))?;
    let streams = Arc::new(Mutex::new(streams));
    let result = runtime.block_on(async {
        let mut supervisor = Supervisor::new(Arc::new(context), streams, state)?;
        let result = supervisor.run(beginning).await;
        if result.is_err() {
            supervisor.leave_as_it_was(before.as_ref());
        }
        result
    });
    // Nothing that still waits on a blocking thread may keep us.
    runtime.shutdown_background();
    result
}

/// A run, and the first step of its supervisor.
type Plan = (RunState, Beginning);

fn remote_terms(config: &Config, take_over: bool, fresh: bool) -> Option<RemoteTerms> {
    let remote = &config.remote;
    Some(RemoteTerms {
        url: remote.url.clone()?,
        lease: remote.lease,
        keep: remote.keep,
        bytes_per_second: remote.bandwidth,
        take_over,
        fresh,
    })
}

/// Decides how the run begins; `None` if it has finished already.
fn begin(
    store: &Store,
    what: What,
    directory: &Path,
    begun: Begun,
) -> Result<Option<Plan>, RunError> {
    let mut known = RunState::load(store.path())?;
    let images = store.images()?;
    if let Some(known) = &mut known {
        known.abandon_passed_over(&images);
    }
    let (what, known) = match (begun, what) {
        (Begun::Local, what) => (what, known),
        (Begun::Finished, _) => return Ok(None),
        // The images here are of a course of the run that another machine has left.
        (Begun::Start, What::Command { line, .. }) => (What::Command { line, fresh: true }, known),
        (Begun::Start, What::Image(_)) => return Err(RunError::NoRun(store.path().to_owned())),
        (Begun::From(newest) | Begun::Elsewhere { newest, .. }, what) => {
            let state = RunState::chosen(known.as_ref(), ImageChoice::This(newest), &images)?;
            let mut state = state.ok_or(NoSuchImage(newest))?;
            if let Begun::Elsewhere { oldest, .. } = begun {
                state.begin_after_older(oldest, &images);
            }
            (what, Some(state))
        }
    };
    match (what, known) {
        (What::Image(choice), known) => begin_from_image(store, choice, known, &images).map(Some),
        (What::Command { line, fresh: false }, Some(known)) => {
            begin_again(store, &line, known, directory, &images)
        }
        (What::Command { line, fresh }, known) => {
            let now = clock::unix_ms();
            let mut state = RunState::new(CommandLine::from(line), directory.to_owned(), now);
            state.begin_attempt(now, &images);
            match &known {
                Some(earlier) => state = state.after(earlier),
                None if !fresh => warn_of_strangers(&images),
                None => {}
            }
            Ok(Some((state, Beginning::Start)))
        }
    }
}

/// Continues the run of an image, whatever became of it.
fn begin_from_image(
    store: &Store,
    choice: ImageChoice,
    known: Option<RunState>,
    images: &[ImageEntry],
) -> Result<Plan, RunError> {
    let beginning = match choice {
        ImageChoice::Newest => Beginning::Restore,
        ImageChoice::This(id) => Beginning::RestoreThis(id),
    };
    let state = RunState::chosen(known.as_ref(), choice, images)?;
    let mut state = state.ok_or_else(|| RunError::NoRun(store.path().to_owned()))?;
    if let Some(left) = known.filter(|known| known.started_unix_ms != state.started_unix_ms) {
        report_left(&left, images);
    }
    if state.progress == Progress::Finished {
        tracing::info!("the run had finished: the job repeats its work after the image");
    }
    state.progress = Progress::Running;
    Ok((state, beginning))
}

/// Continues the known run of this command line; `None` if it has finished.
fn begin_again(
    store: &Store,
    line: &[OsString],
    mut known: RunState,
    directory: &Path,
    images: &[ImageEntry],
) -> Result<Option<Plan>, RunError> {
    let words = CommandLine::from(line.to_vec());
    if known.command != words {
        return Err(RunError::OtherCommand {
            store: store.path().to_owned(),
            there: escaped(&known.command.to_string(), Keep::Nothing).into_owned(),
            here: escaped(&words.to_string(), Keep::Nothing).into_owned(),
        });
    }
    match known.progress {
        Progress::Finished => return Ok(None),
        // The last supervisor wrote nothing else: it was killed, or the machine failed.
        Progress::Running => known.failures = known.failures.saturating_add(1),
        Progress::Saved | Progress::Failed { .. } => {}
    }
    known.progress = Progress::Running;
    if let Some(newest) = images.iter().rfind(|image| known.goes_on_from(image)) {
        stale_scripts::tell(line, directory, newest);
    }
    Ok(Some((known, Beginning::Restore)))
}

/// Reports that the store is at another run from now on, and how to return.
fn report_left(left: &RunState, images: &[ImageEntry]) {
    let newest = images.iter().rfind(|image| left.goes_on_from(image));
    let back = newest.map_or_else(String::new, |image| {
        format!("; `ckpt-run restore {}` returns to that run", image.id)
    });
    tracing::info!(left = %left.command, "the image belongs to another run than the store's last one{back}");
}

/// Warns of images that were copied or imported: this line has no run to continue.
fn warn_of_strangers(images: &[ImageEntry]) {
    if let Some(newest) = images.last() {
        tracing::warn!(
            newest = %newest.id,
            "the store has images of an unknown run: the job starts from the beginning; to continue from the newest image, \
             stop the job and use `ckpt-run restore`"
        );
    }
}
