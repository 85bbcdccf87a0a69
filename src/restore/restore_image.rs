//! Steps of a restore, from the examination of an image to the running job.
//!
//! ```text
//! check machine → plan files → choose GPUs ─┬─▶ rewind files and streams → (fresh sandbox) → criu restore, chunks
//!                                           │   verified as they flow → resume CUDA ─┬─▶ the job computes
//!                                           └─▶ fill device memory ──────────────────┘
//! ```
//!
//! All checks that are possible in advance run before the first file is changed. A restore that fails later kills all
//! processes that it started. The caller records the reason, and sets a damaged image aside.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::unistd::geteuid;

use crate::clock;
use crate::config;
use crate::criu::{
    ImageSource, Inherited, RestoreOptions, Serve, ServeError, Tcp, asks_when_restored,
    plugin_calls, plugin_interposes, plugin_restores, reports_shortage, restore_arguments,
};
use crate::job::{self, CutAway, OpenFile, OtherBytes, Relation, ThreadAttributes};
use crate::sandbox::{Ended, Sandbox, SandboxError, ToolCommand, ToolRun};
use crate::store::{ImageId, ImageReader, ReadError};

use super::bundled_files;
use super::error::RestoreError;
use super::files_plan::Kept;
use super::gpu_resume;
use super::image_files::ImageFiles;
use super::landing::Landing;
use crate::gpu::mapping::GpuPlan;
use crate::gpu::resident::{ResidentRestore, Standby};
use crate::run::format::{logged, why};
use crate::run::image_facts::{ImageFacts, Phase, Stopwatch};
use crate::run::progress::{Step, Work};
use crate::run::run_context::RunContext;
use crate::run::running_job::SharedStreams;
use crate::run::streams::Ends;
use crate::sync::locked;

/// Number of the first descriptor that CRIU inherits. It is above the descriptors that CRIU is started with, and below
/// CRIU's service descriptors.
const FIRST_DESCRIPTOR: RawFd = 200;

/// An examined image, which this machine can restore as far as known.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub id: ImageId,
    pub facts: ImageFacts,
    image: ImageReader,
    files: job::Plan,
    /// Files that the job writes; `None` for images without a list of them.
    kept: Option<Kept>,
    /// The chosen GPUs; `None` while GPUs are busy.
    gpus: Option<GpuPlan>,
}

/// Examines an image. Changes nothing, except that missing parts of ckpt-run are restored.
pub(crate) fn examine(
    context: &RunContext,
    standby: &Standby,
    id: ImageId,
) -> Result<Candidate, RestoreError> {
    let buffer = context.config.restore.buffer;
    let image = context.store.read(id)?.with_buffer(buffer);
    let facts: ImageFacts =
        serde_json::from_slice(&image.manifest().meta).map_err(RestoreError::Facts)?;
    if let Some(user) = facts.namespace_of
        && user != geteuid().as_raw()
    {
        return Err(RestoreError::OtherUser(user));
    }
    let look = |cuda_facts| gpu_resume::examine(context, standby, id, cuda_facts);
    let gpus = facts.cuda.as_ref().map(look).transpose()?.flatten();
    bundled_files::put_back(&image, &facts).map_err(RestoreError::Prepare)?;
    let kept = Kept::plan(context, &image)?;
    let is_kept = |file: &OpenFile| kept.as_ref().is_some_and(|kept| kept.has(file));
    let open = facts.files.iter().filter(|file| !is_kept(file));
    let present_path = |path| {
        kept.as_ref()
            .map_or(path, |kept| kept.rollback.present_path(path))
    };
    let other_bytes = other_bytes(context);
    let files = job::plan(open, &facts.nodes, other_bytes, present_path)?;
    Ok(Candidate {
        id,
        facts,
        image,
        files,
        kept,
        gpus,
    })
}

/// The result of a restore and the time it took.
#[derive(Debug)]
pub(crate) struct Restored {
    pub phases: Vec<Phase>,
    pub total: Duration,
    pub cut: Vec<CutAway>,
    /// True if the job's input up to the crash is lost. The job continues with later input.
    pub input_lost: bool,
    /// Processes of the restored job that were moved to another GPU: see [`CudaFacts::moved`].
    pub moved: Vec<i32>,
}

/// Restores the candidate in `sandbox`, which must be new. Blocks until the job is running.
pub(crate) fn bring_back(
    context: &RunContext,
    standby: &Standby,
    sandbox: &Sandbox,
    streams: &SharedStreams,
    candidate: Candidate,
) -> Result<Restored, RestoreError> {
    let begun = clock::now();
    let _busy = context.ongoing.begin(Work::Restore, Step::Rewind);
    let mut watch = Stopwatch::start();
    let Candidate {
        id,
        facts,
        image,
        files,
        kept,
        gpus,
    } = candidate;
    let expected = image.manifest().raw_bytes;
    context.ongoing.measure(image.given(), Some(expected));
    let choose = |cuda_facts| gpu_resume::choose(context, standby, id, cuda_facts, gpus);
    let gpus = facts.cuda.as_ref().map(choose).transpose()?;
    let gpu = facts.cuda.as_ref().zip(gpus.as_ref());
    let rewound = thread::scope(|scope| {
        let memory = gpu.and_then(|(cuda, gpus)| {
            let refill = |facts| ResidentRestore::begin(context, standby, &image, facts, &gpus.map);
            let resident = cuda.resident.as_ref();
            resident.map(|facts| scope.spawn(move || refill(facts)))
        });
        let rewound = rewind(
            context,
            sandbox,
            streams,
            &image,
            &facts,
            Files { open: files, kept },
        )?;
        watch.lap("rewind");
        context.ongoing.step(Step::Restore);
        let turn = job::DumpLock::to_restore(&facts.files);
        let restored = turn
            .make_links(&facts.files)
            .map_err(RestoreError::from)
            .and_then(|()| run_criu(context, sandbox, &image, id, &facts, &rewound.ends));
        job::remove_links(&facts.files);
        drop(turn);
        // No process of the job has run yet, unless CRIU was killed at its very end.
        restored.map_err(|error| {
            if job::undo(&rewound.cut) {
                error
            } else {
                error.late()
            }
        })?;
        locked(streams).keep();
        let resume = || {
            if tcp(context, &facts) == Tcp::Established
                && context.config.network.tcp == config::Tcp::Close
            {
                facts.sockets.abort_outside()?;
            }
            locked(streams).open();
            start_timers(sandbox, &facts)?;
            watch.lap("restore");
            context.ongoing.step(Step::Resume);
            if let Some((cuda_facts, gpus)) = gpu {
                gpu_resume::resume(context, sandbox, &facts, cuda_facts, gpus, memory)?;
                watch.lap("resume");
            }
            Ok(())
        };
        resume().map_err(RestoreError::late)?;
        Ok::<_, RestoreError>(rewound)
    })?;
    let moved = gpu.map(|(cuda, gpus)| cuda.moved_by(&gpus.map));
    let resident = facts.cuda.as_ref().and_then(|cuda| cuda.resident.as_ref());
    if resident.is_some() {
        standby.warm(&context.program);
    }
    // A job that was stopped at its terminal during the snapshot continues, and a full-screen job redraws the screen,
    // but only after its GPU state is resumed.
    if facts.streams.terminal.is_some() {
        sandbox.signal(nix::libc::SIGCONT, false)?;
        sandbox.signal(nix::libc::SIGWINCH, false)?;
    }
    Ok(Restored {
        phases: watch.phases().to_vec(),
        total: clock::now() - begun,
        cut: rewound.cut,
        input_lost: rewound.input_lost,
        moved: moved.unwrap_or_default(),
    })
}

/// Files and streams of the job after their rollback.
struct Rewound {
    cut: Vec<CutAway>,
    ends: Ends,
    input_lost: bool,
}

/// Rollback plans for the files of an image.
struct Files {
    open: job::Plan,
    kept: Option<Kept>,
}

/// Rolls files and streams back.
fn rewind(
    context: &RunContext,
    sandbox: &Sandbox,
    streams: &SharedStreams,
    image: &ImageReader,
    facts: &ImageFacts,
    Files { open, kept }: Files,
) -> Result<Rewound, RestoreError> {
    let id = image.manifest().id;
    let aside = context.aside(id);
    let relation_to = relation(context, facts);
    locked(streams).make_whole(&facts.streams, relation_to, &aside, other_bytes(context))?;
    facts.sockets.destroy_leftovers()?;
    for content in facts.files.iter().filter_map(|file| file.content.as_ref()) {
        // The first read only verifies the hashes: no file may be partly overwritten with damaged content.
        image.copy_to(content, &mut io::sink())?;
    }
    open.make_nodes()?;
    if let Some(kept) = &kept {
        kept.put_back(context, image, &aside)?;
    }
    let cut = open.execute(&aside, |name, mut target| {
        let copied = image.copy_to(name, &mut target);
        copied
            .map(drop)
            .map_err(|error| io::Error::other(error.to_string()))
    })?;
    let settled = kept.as_ref().map_or(Ok(()), |kept| kept.rollback.settle());
    let reconnected = settled
        .map_err(RestoreError::from)
        .and_then(|()| reconnect(context, sandbox, streams, facts, &aside));
    let (ends, input_lost) = reconnected.inspect_err(|_| {
        job::undo(&cut);
    })?;
    // From here on, changes of files are the job's.
    context.watch(sandbox);
    if let Some(kept) = kept {
        context.files.now_at(id.number(), kept.set);
    }
    Ok(Rewound {
        cut,
        ends,
        input_lost,
    })
}

/// Rolls the streams back and creates the ends that replace the old pipes or the old terminal.
fn reconnect(
    context: &RunContext,
    sandbox: &Sandbox,
    streams: &SharedStreams,
    facts: &ImageFacts,
    aside: &Path,
) -> Result<(Ends, bool), RestoreError> {
    let relation = relation(context, facts);
    let mut streams = locked(streams);
    let marks = &facts.streams;
    let input_known = match relation {
        Relation::Ours => streams.stdin.rewind(&marks.stdin),
        Relation::Earlier => {
            let taken_up = streams.stdin.take_up(&marks.stdin);
            taken_up.map_err(RestoreError::Prepare)?
        }
    };
    let (stdout, stderr) = (&streams.stdout, &streams.stderr);
    stdout.rewind(&marks.stdout, relation, aside, "stdout")?;
    stderr.rewind(&marks.stderr, relation, aside, "stderr")?;
    let ends = streams
        .connect_again(marks, sandbox)
        .map_err(RestoreError::Prepare)?;
    if let Some(user) = &context.user {
        let mut given = ends.iter().map(|(_, end)| user.own(end));
        given
            .try_for_each(|given| given)
            .map_err(RestoreError::Prepare)?;
    }
    Ok((
        ends,
        marks.stdin.pipe != 0 && marks.stdin.position > 0 && !input_known,
    ))
}

/// Returns the supervisor that made the image.
fn relation(context: &RunContext, facts: &ImageFacts) -> Relation {
    if facts.instance == context.instance {
        Relation::Ours
    } else {
        Relation::Earlier
    }
}

fn other_bytes(context: &RunContext) -> OtherBytes {
    match context.config.files.on_lost {
        config::OnLost::Refuse => OtherBytes::Refuse,
        config::OnLost::Warn => OtherBytes::Warn,
    }
}

fn run_criu(
    context: &RunContext,
    sandbox: &Sandbox,
    image: &ImageReader,
    id: ImageId,
    facts: &ImageFacts,
    ends: &[(Inherited, OwnedFd)],
) -> Result<(), RestoreError> {
    let sockets = context.sockets().map_err(RestoreError::Prepare)?;
    let log = context.log("restore", id);
    let serve = Serve::bind(sockets.path()).map_err(RestoreError::Prepare)?;
    let inherited: Vec<(Inherited, RawFd)> = ends
        .iter()
        .map(|(inherited, _)| *inherited)
        .zip(FIRST_DESCRIPTOR..)
        .collect();
    let mut descriptors: Vec<RawFd> = ends.iter().map(|(_, end)| end.as_raw_fd()).collect();
    let files = facts.huge_pages.then(|| ImageFiles::unpack(image));
    let files = files.transpose()?;
    let folder = files.as_ref().zip((FIRST_DESCRIPTOR..).nth(ends.len()));
    let folder = folder.map(|(files, number)| {
        descriptors.push(files.descriptor());
        PathBuf::from(format!("/proc/self/fd/{number}"))
    });
    let libdir = context.libdir();
    let tcp = tcp(context, facts);
    let lock = match tcp {
        Tcp::Established => facts.sockets.hold_for_restore()?,
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
    let landing = Landing::prepare(context, sandbox, facts, sockets.path())?;
    let mut environment = plugin_restores(context.criu.version, facts.pids.root);
    let interposes = plugin_interposes(&libdir, sockets.path());
    environment.push(interposes.map_err(RestoreError::Prepare)?);
    environment.extend(landing.environment()?);
    environment.extend(own_calls(&facts.attributes));
    environment.push(asks_when_restored(sockets.path()));
    let tool = ToolCommand {
        argv,
        environment,
        first_descriptor: FIRST_DESCRIPTOR,
        restores: Some(facts.pids),
    };
    let (stop, stopped) = UnixStream::pair().map_err(RestoreError::Prepare)?;
    let stopped = &stopped;
    let (ended, served, looked) = thread::scope(|scope| {
        // CRIU reads files directly and requests nothing over the connection.
        let exists = |name: &str| image.contains(&format!("criu/{name}"));
        let send = |name: &str, pipe: File| send(image, name, &pipe);
        let serving = scope.spawn(move || serve.run(stopped, exists, send, || drop(lock)));
        let looking = scope.spawn(|| landing.wait(stopped));
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
    let served = served.map_err(|_| RestoreError::Panicked)?;
    match looked.map_err(|_| RestoreError::Panicked)? {
        Some(looked) => looked?,
        None if matches!(ended, Ok(Ended::Exited(0))) => {
            sandbox.kill();
            return Err(RestoreError::NotAsked);
        }
        None => {}
    }
    match (ended, served) {
        (_, Err(ServeError::Source(error))) => {
            sandbox.kill();
            Err(error.into())
        }
        // A successful CRIU has read everything it needs.
        (Ok(Ended::Exited(0)), Ok(()) | Err(ServeError::Stream(_))) => Ok(()),
        (Ok(Ended::Signaled(signal)), _) => Err(RestoreError::Killed {
            signal,
            log: logged(&log),
        }),
        // If CRIU has not opened its log, it has not read the image.
        (Ok(ended), _) if !log.exists() || reports_shortage(&log) => Err(RestoreError::Shortage {
            reason: why(&log, &log, ended, None),
        }),
        (Ok(ended), _) => Err(RestoreError::Criu {
            reason: why(&log, &log, ended, None),
        }),
        (Err(SandboxError::Slow(limit)), _) => Err(RestoreError::Slow(limit)),
        (Err(error), _) => Err(error.into()),
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
fn tcp(context: &RunContext, facts: &ImageFacts) -> Tcp {
    if facts.sockets.closed {
        return Tcp::Closed;
    }
    match context.config.network.tcp {
        config::Tcp::Close if facts.sockets.are_outside_only() => Tcp::Closed,
        config::Tcp::Close | config::Tcp::Keep => Tcp::Established,
    }
}

/// Writes an image file into CRIU's pipe. CRIU may close a pipe before its end if it needs no more data.
fn send(image: &ImageReader, name: &str, pipe: &File) -> Result<u64, ReadError> {
    match image.splice_to(&format!("criu/{name}"), pipe) {
        Err(ReadError::Sink(_)) => Ok(0),
        other => other,
    }
}

/// Returns the variable with system calls that only the restored threads themselves can make.
fn own_calls(attributes: &[ThreadAttributes]) -> Option<(OsString, OsString)> {
    let own = attributes
        .iter()
        .filter(|it| it.personality.is_some() || it.memory_policy.is_some());
    plugin_calls(own.map(|it| {
        let policy = it.memory_policy.map(|policy| (policy.mode, policy.nodes));
        (it.thread, it.personality, policy)
    }))
}

fn start_timers(sandbox: &Sandbox, facts: &ImageFacts) -> Result<(), RestoreError> {
    if facts.timers.is_empty() {
        return Ok(());
    }
    // A job that has exited needs no timers. Its exit is reported elsewhere.
    let Ok(root) = job::child_with_pid(sandbox.pid(), facts.pids.root) else {
        return Ok(());
    };
    Ok(job::arm_timers(&facts.timers, &job::tree(root)?)?)
}
