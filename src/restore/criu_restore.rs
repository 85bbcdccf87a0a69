//! The run of `criu restore` for an image.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use super::error::RestoreError;
use super::image_files::ImageFiles;
use super::landing::Landing;
use crate::clock;
use crate::config;
use crate::criu::{
    ImagePipe, ImageSource, Inherited, MEMORY_FILES, OPEN_FILES, OmittedState, RestoreOptions,
    Serve, Tcp, asks_when_restored, plugin_calls, plugin_ends, plugin_interposes,
    plugin_reads_directly, plugin_restores, reports_shortage, restore_arguments, without_sizes,
};
use crate::job;
use crate::run::format::{logged, why};
use crate::run::image_facts::{ImageFacts, OMITTED_STATE};
use crate::run::run_context::RunContext;
use crate::sandbox::{Clocks, Ended, Sandbox, SandboxError, ToolCommand, ToolRun};
use crate::store::{ImageReader, ReadError};
use crate::sync::{OnPanic, locked};

/// Limit on CRIU's list of open files, room for a million.
const OPEN_FILES_BYTES_MAX: u64 = 1 << 30;

/// Limit on the state that CRIU omits, room for a hundred thousand threads with tiles.
const OMITTED_BYTES_MAX: u64 = 1 << 30;

/// Number of the first descriptor that CRIU inherits. It is above the descriptors that CRIU is started with, and below
/// CRIU's service descriptors.
const FIRST_DESCRIPTOR: RawFd = 200;

/// Largest jump of the job's clocks that is no reason for a warning.
const CLOCK_ERROR: Duration = Duration::from_secs(10);

/// Runs `criu restore` in the sandbox and serves it the image. The job's processes run when this function returns.
pub(super) fn run_criu(
    context: &RunContext,
    sandbox: &Sandbox,
    image: &ImageReader,
    facts: &ImageFacts,
    left: &HashSet<PathBuf>,
    ends: &[(Inherited, OwnedFd)],
) -> Result<(), RestoreError> {
    let open_files = open_files(image, left)?;
    let open_files = open_files.as_deref();
    let sockets = context.sockets().map_err(RestoreError::Prepare)?;
    let log = context.log("restore", image.manifest().id);
    let serve = Serve::bind(sockets.path()).map_err(RestoreError::Prepare)?;
    let inherited: Vec<(Inherited, RawFd)> = ends
        .iter()
        .map(|(inherited, _)| *inherited)
        .zip(FIRST_DESCRIPTOR..)
        .collect();
    let mut descriptors: Vec<RawFd> = ends.iter().map(|(_, end)| end.as_raw_fd()).collect();
    let files = facts
        .huge_pages
        .then(|| ImageFiles::unpack(image, open_files));
    let files = files.transpose()?;
    let folder = files.as_ref().zip((FIRST_DESCRIPTOR..).nth(ends.len()));
    let folder = folder.map(|(files, number)| {
        descriptors.push(files.descriptor());
        PathBuf::from(format!("/proc/self/fd/{number}"))
    });
    let omitted = omitted(image)?;
    let omitted_number = (FIRST_DESCRIPTOR..).nth(descriptors.len());
    descriptors.extend(omitted.iter().map(OmittedState::descriptor));
    let libdir = context.libdir();
    let tcp = tcp(context, facts);
    let lock = match tcp {
        Tcp::Established => {
            let open = |kind| sandbox.socket(kind);
            facts.sockets.hold_for_restore(&open)?
        }
        Tcp::Closed => None,
    };
    let mut argv = context.criu.argv();
    argv.extend(restore_arguments(&RestoreOptions {
        source: match &folder {
            Some(folder) => ImageSource::Files(folder),
            None => ImageSource::Stream(sockets.path()),
        },
        log: &log,
        libdir: &libdir,
        log_level: context.config.criu.log_level,
        tcp,
        asks: lock.is_some(),
        unprivileged: sandbox.is_unprivileged(),
        inherited: &inherited,
    }));
    let landing = Landing::prepare(context, sandbox, facts, omitted.as_ref(), sockets.path())?;
    let mut environment = plugin_restores(context.criu.version, facts.pids.root);
    let interposes = plugin_interposes(&libdir, sockets.path());
    environment.push(interposes.map_err(RestoreError::Prepare)?);
    environment.extend(landing.environment()?);
    environment.extend(own_calls(facts));
    let omitted_number = omitted_number.filter(|_| omitted.is_some());
    environment.extend(omitted_number.map(OmittedState::variable));
    environment.push(asks_when_restored(sockets.path()));
    environment.push(plugin_reads_directly(sockets.path()));
    let begun = clock::now();
    // With privileges, CRIU continues them itself.
    let clocks = facts.clocks.filter(|_| sandbox.is_unprivileged());
    let clock_offsets = clocks.and_then(|clocks| clocks.offsets().ok());
    let tool = ToolCommand {
        argv,
        environment,
        first_descriptor: FIRST_DESCRIPTOR,
        restores: Some(facts.pids),
        hidden: facts.hidden,
        own_ipc: false,
        clock_offsets,
    };
    let (stop, stopped) = UnixStream::pair().map_err(RestoreError::Prepare)?;
    let stopped = &stopped;
    let failure = Failure::default();
    let (ended, served, looked) = thread::scope(|scope| {
        // CRIU reads files directly and requests nothing over the connection.
        let exists = |name: &str| image.contains(&format!("criu/{name}"));
        let failure = &failure;
        let send = |name: &str, pipe: Result<&ImagePipe<'_>, io::Error>| {
            send(image, (name, open_files), pipe, failure);
        };
        let serving = scope.spawn(move || {
            if let Err(error) = serve.run(stopped, exists, send, || drop(lock)) {
                failure.record(Cause::Reader, RestoreError::Prepare(error));
            }
        });
        let looking = scope.spawn(|| landing.wait(failure, stopped));
        let ended = sandbox
            .run_tool(tool, &descriptors)
            .and_then(|run| wait(&run, image, context.config.snapshot.timeout));
        if !matches!(ended, Ok(Ended::Exited(0))) {
            // All processes that CRIU has created exit with the sandbox. This closes the pipes that are still served.
            sandbox.kill();
        }
        drop(stop);
        (ended, serving.join(), looking.join())
    });
    let (Ok(()), Ok(looked)) = (served, looked) else {
        sandbox.kill();
        return Err(RestoreError::Panicked);
    };
    outcome(sandbox, &log, &failure, (ended, looked))?;
    check_clocks(sandbox, facts, begun.elapsed());
    Ok(())
}

/// Warns if the job's clocks do not continue from the snapshot. `taken` is the time of the restore.
fn check_clocks(sandbox: &Sandbox, facts: &ImageFacts, taken: Duration) {
    const LOST: &str = "so its waits may end early or late";
    let Some(before) = facts.clocks else {
        if sandbox.is_unprivileged() {
            tracing::warn!("the image lacks the values of the job's monotonic clock, {LOST}");
        }
        return;
    };
    let root = job::child_with_pid(sandbox.pid(), facts.pids.root);
    // A job that has ended has no clocks.
    let Some(now) = root.ok().and_then(|root| Clocks::of(root).ok()) else {
        return;
    };
    let jumped = now.since(before).monotonic_ns;
    let jump = Duration::from_nanos(jumped.unsigned_abs());
    // CRIU records its own value, at another moment of the freeze.
    let freeze = Duration::try_from_secs_f64(facts.freeze_seconds).unwrap_or_default();
    if jump > taken + freeze + CLOCK_ERROR {
        let direction = if jumped < 0 { "back" } else { "forward" };
        tracing::warn!(
            "the job's monotonic clock has jumped {direction} by {jump:.0?}, {LOST}: the kernel gave it no time namespace \
             (needs CAP_SYS_TIME and CONFIG_TIME_NS)"
        );
    }
}

/// Returns the result of CRIU's run and of the landing. Kills the sandbox if the job must not run on.
fn outcome(
    sandbox: &Sandbox,
    log: &Path,
    failure: &Failure,
    (ended, looked): (
        Result<Ended, SandboxError>,
        Option<Result<(), RestoreError>>,
    ),
) -> Result<(), RestoreError> {
    let has_run = matches!(looked, Some(Ok(())));
    if let Some(Err(error)) = looked {
        return Err(error);
    }
    if let Some(error) = failure.take_if(Cause::Image) {
        sandbox.kill();
        return Err(if has_run { error.late() } else { error });
    }
    match ended {
        Ok(Ended::Exited(0)) if !has_run => {
            sandbox.kill();
            Err(RestoreError::NotAsked)
        }
        Ok(Ended::Exited(0)) => match failure.take_if(Cause::Memory) {
            None => Ok(()),
            Some(error) => {
                sandbox.kill();
                Err(error.late())
            }
        },
        Ok(Ended::Signaled(signal)) => Err(RestoreError::Killed {
            signal,
            log: logged(log),
        }),
        // If CRIU has not opened its log, it has not read the image.
        Ok(ended) if !log.exists() || reports_shortage(log) => Err(RestoreError::Shortage {
            reason: why(log, log, ended, None),
        }),
        Ok(ended) => Err(failure
            .take_if(Cause::Memory)
            .unwrap_or_else(|| RestoreError::Criu {
                reason: why(log, log, ended, None),
            })),
        Err(SandboxError::Slow(limit)) => Err(RestoreError::Slow(limit)),
        Err(error) => Err(error.into()),
    }
}

/// Waits for CRIU for as long as it reads: an image that was made from memory within seconds may take minutes to
/// restore from a disk. If CRIU reads no byte within `limit`, it counts as hung.
fn wait(run: &ToolRun<'_>, image: &ImageReader, limit: Duration) -> Result<Ended, SandboxError> {
    let given = image.given();
    loop {
        let before = given.bytes();
        match run.wait(limit) {
            Err(SandboxError::Slow(_)) if given.bytes() > before => {}
            ended => return ended,
        }
    }
}

/// Returns CRIU's mode for TCP connections, which applies to all of them. If connections within the job and to other
/// programs exist, the latter are aborted later.
pub(super) fn tcp(context: &RunContext, facts: &ImageFacts) -> Tcp {
    if facts.sockets.closed {
        return Tcp::Closed;
    }
    match context.config.network.tcp {
        config::Tcp::Close if facts.sockets.are_outside_only() => Tcp::Closed,
        config::Tcp::Close | config::Tcp::Keep => Tcp::Established,
    }
}

/// Returns CRIU's list of open files without the sizes of those that may differ; `None` if all sizes are right.
fn open_files(
    image: &ImageReader,
    left: &HashSet<PathBuf>,
) -> Result<Option<Vec<u8>>, RestoreError> {
    if left.is_empty() {
        return Ok(None);
    }
    let list = image.read_to_vec(&format!("criu/{OPEN_FILES}"), OPEN_FILES_BYTES_MAX)?;
    let edited = without_sizes(&list, |path| left.contains(path));
    let edited = edited.ok_or_else(|| io::Error::from(ErrorKind::InvalidData));
    Ok(Some(edited.map_err(RestoreError::Prepare)?))
}

/// Returns the state that CRIU omits, if the image has any.
fn omitted(image: &ImageReader) -> Result<Option<OmittedState>, RestoreError> {
    if !image.contains(OMITTED_STATE) {
        return Ok(None);
    }
    let content = image.read_to_vec(OMITTED_STATE, OMITTED_BYTES_MAX)?;
    let omitted = OmittedState::holding(&content).map_err(RestoreError::Prepare)?;
    Ok(Some(omitted))
}

/// Sends an image file to CRIU: `open_files` in place of the image's list of open files, if there is one. A failure is
/// recorded before CRIU can notice it and continue.
fn send(
    image: &ImageReader,
    (name, open_files): (&str, Option<&[u8]>),
    pipe: Result<&ImagePipe<'_>, io::Error>,
    failure: &Failure,
) {
    let stream = format!("criu/{name}");
    let sent = pipe.and_then(|pipe| match open_files.filter(|_| name == OPEN_FILES) {
        Some(list) => pipe.send(list.len() as u64, |sending| {
            pass(name, failure, || {
                sending.put(list.to_vec()).map_err(ReadError::Sink)
            });
        }),
        None => pipe.send(image.len_of(&stream).unwrap_or_default(), |sending| {
            pass(name, failure, || {
                image.each_piece(&stream, |piece| sending.put(piece))
            });
        }),
    });
    if let Err(error) = sent {
        failure.record(Cause::Memory, shortage(&error));
    }
}

/// Passes the content of an image file, and records a failure while its pipe is open.
fn pass(name: &str, failure: &Failure, content: impl FnOnce() -> Result<(), ReadError>) {
    let _guard = OnPanic(|| failure.record(Cause::Image, RestoreError::Panicked));
    match content() {
        Ok(()) => {}
        Err(ReadError::Sink(error)) if error.kind() == ErrorKind::BrokenPipe => {
            // CRIU may need no more of other files.
            if name.starts_with(MEMORY_FILES) {
                failure.record(Cause::Reader, RestoreError::Prepare(error));
            }
        }
        Err(ReadError::Sink(error)) => failure.record(Cause::Memory, shortage(&error)),
        Err(error) => failure.record(Cause::Image, error.into()),
    }
}

/// CRIU's memory is its own and its pipe is open, so that only a lack of memory prevents the transfer.
fn shortage(error: &io::Error) -> RestoreError {
    RestoreError::Shortage {
        reason: format!("cannot pass the image to CRIU: {error}; memory may be short"),
    }
}

/// Cause of a failure to pass the image to CRIU, the most conclusive one first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// The image cannot be read.
    Image,
    /// CRIU's memory cannot be written, perhaps because CRIU was killed.
    Memory,
    /// CRIU has closed a pipe or its connection, after an error of its own or at its end.
    Reader,
}

/// The first failure to pass a part of the image to CRIU.
#[derive(Default)]
pub(super) struct Failure(Mutex<Option<(Cause, RestoreError)>>);

impl Failure {
    fn record(&self, cause: Cause, error: RestoreError) {
        locked(&self.0).get_or_insert((cause, error));
    }

    /// Takes the failure.
    pub fn take(&self) -> Option<RestoreError> {
        Some(locked(&self.0).take()?.1)
    }

    /// Takes a failure with this cause.
    fn take_if(&self, cause: Cause) -> Option<RestoreError> {
        Some(locked(&self.0).take_if(|(it, _)| *it == cause)?.1)
    }
}

/// Returns the variables with system calls that only the restored threads themselves can make, and with exit codes.
fn own_calls(facts: &ImageFacts) -> impl Iterator<Item = (OsString, OsString)> {
    let ended = facts.exit_codes.iter();
    let ended = ended.map(|ended| (ended.pid, ended.code, ended.by_signal));
    let own = facts
        .attributes
        .iter()
        .filter(|it| it.personality.is_some() || it.memory_policy.is_some());
    let calls = own.map(|it| {
        let policy = it.memory_policy.map(|policy| (policy.mode, policy.nodes));
        (it.thread, it.personality, policy)
    });
    plugin_calls(calls).into_iter().chain(plugin_ends(ended))
}
