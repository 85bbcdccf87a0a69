//! A snapshot, from the first look at the job to the durable image.
//!
//! ```text
//! admit → lock → suspend → dump, tasks frozen → drained, recorded → released → resume
//!       └──────────────────────────── freeze ────────────────────────────────────────┘→ write → commit
//! ```
//!
//! Each step undoes itself when a later one fails: the image writer deletes what
//! it wrote, the suspended GPU state resumes, CRIU releases the tasks. A failed
//! snapshot leaves the job computing and the store as it was.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::clock;
use crate::config::{Buffer, Cpus};
use crate::criu::{
    self, Capture, CaptureError, Captured, DumpOptions, HOLD_SOCKET_VARIABLE, dump_arguments,
};
use crate::cuda;
use crate::job::{self, OpenFile, Process};
use crate::sandbox::{Ended, SandboxError, ToolCommand, ToolRun};
use crate::store::{ImageId, ImageWriter, WriteError, WriteOptions};

use super::describe::size;
use super::image::{CudaFacts, ImageFacts, Stopwatch, Trigger};
use super::machine;
use super::workshop::{Job, SharedStreams, Workshop};

/// Time for CRIU to release the tasks and end, once a dump was called off.
const CALL_OFF_LIMIT: Duration = Duration::from_secs(10);
/// Time between two looks at the processes while CRIU works.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Time for CRIU to die of SIGKILL.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// Longest attempt to lock all CUDA processes at once; then all are let go and tried again.
const LOCK_ATTEMPT: Duration = Duration::from_millis(400);

/// Most threads that copy one image file.
const LANES_MAX: usize = 4;

/// Why there is no new image. The job computes, and older images are untouched, unless a variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The process tree could not be read.
    #[error("cannot read the job's process tree")]
    Tree(#[from] job::TreeError),
    /// The open files could not be listed.
    #[error("cannot list the job's open files")]
    Files(#[from] job::FilesError),
    /// The TCP sockets could not be listed.
    #[error("cannot list the job's sockets")]
    Sockets(#[from] job::SocketsError),
    /// The timers could not be listed.
    #[error("cannot list the job's timers")]
    Timers(#[from] job::TimersError),
    /// A file's content could not be kept.
    #[error("cannot keep the content of {path}")]
    Content {
        /// The job's file.
        path: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The store failed.
    #[error("cannot write the image")]
    Store(#[source] Box<WriteError>),
    /// There is no room for the image.
    #[error(
        "cannot write the image, the disk is full: free space where the store is, keep fewer images (--keep-last), or choose another --store"
    )]
    DiskFull(#[source] Box<WriteError>),
    /// The GPU's content does not fit into host memory; the kernel would kill the job.
    #[error(
        "cannot suspend the GPU state: it needs {} of host memory and {} are available; free some",
        size(*needed),
        size(*available)
    )]
    NoMemory {
        /// Bytes of GPU memory.
        needed: u64,
        /// Bytes of host memory.
        available: u64,
    },
    /// The CUDA driver's library could not be used.
    #[error("cannot load the CUDA driver")]
    Driver(#[from] cuda::LoadError),
    /// The GPU state could not be suspended.
    #[error("cannot suspend the GPU state")]
    Suspend(#[source] Box<cuda::TreeError>),
    /// The GPU state did not come back: the job does not compute.
    #[error("cannot resume the GPU state; the job does not compute any more and will be restored")]
    Resume(#[source] Box<cuda::TreeError>),
    /// A socket or a stream of our own failed.
    #[error("cannot prepare the dump")]
    Prepare(#[source] io::Error),
    /// The sandbox failed.
    #[error("cannot run CRIU in the sandbox")]
    Sandbox(#[from] SandboxError),
    /// CRIU failed.
    #[error("cannot dump the processes: {reason} (log: {log})")]
    Criu {
        /// Its reason.
        reason: String,
        /// Its log file.
        log: String,
    },
    /// The image stream broke.
    #[error("cannot receive the image from CRIU")]
    Stream(#[source] io::Error),
    /// CRIU did not finish in time.
    #[error("cannot dump the processes within {0:?} (snapshot.timeout)")]
    Slow(Duration),
    /// The job died while it was dumped.
    #[error("cannot take a snapshot of a job that has ended")]
    Ended,
    /// CRIU was killed at work in the job: that computes, but nobody knows whether as before.
    #[error("cannot trust process {pid} of the job any more: CRIU was killed at work in it")]
    Doubtful {
        /// Pid as the job sees it.
        pid: i32,
        /// What CRIU's end meant for the snapshot.
        #[source]
        source: Box<SnapshotError>,
    },
}

impl SnapshotError {
    /// Whether the job may be left in a state in which it cannot compute.
    #[must_use]
    pub fn job_is_lost(&self) -> bool {
        matches!(self, Self::Resume(_))
    }

    /// Whether the job computes, but is better restored.
    #[must_use]
    pub fn job_is_doubtful(&self) -> bool {
        matches!(self, Self::Doubtful { .. })
    }
}

impl From<WriteError> for SnapshotError {
    fn from(error: WriteError) -> Self {
        if error.is_disk_full() {
            Self::DiskFull(Box::new(error))
        } else {
            Self::Store(Box::new(error))
        }
    }
}

/// What the job does after its snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Afterwards {
    /// It goes on.
    Continue,
    /// It is killed as it stands, once the image is durable.
    Stop,
}

/// A snapshot that became an image.
#[derive(Clone, Debug)]
pub(super) struct Snapshotted {
    pub id: ImageId,
    pub freeze: Duration,
    pub raw_bytes: u64,
    pub stored_bytes: u64,
    pub total: Duration,
    pub facts: ImageFacts,
}

/// Takes a snapshot. Blocks until the image is durable; `computing` is called when the job computes again.
pub(super) fn take(
    shop: &Workshop,
    job: &Job,
    streams: &SharedStreams,
    trigger: Trigger,
    afterwards: Afterwards,
    computing: impl FnOnce(Duration),
) -> Result<Snapshotted, SnapshotError> {
    let begun = clock::now();
    let mut watch = Stopwatch::start();
    let root = job::child_with_pid(job.sandbox.pid(), job.pids.root)?;
    let processes = job::tree(root)?;
    let gpu = Gpu::of(&processes)?;
    let gpu_bytes = gpu.as_ref().map_or(0, |gpu| gpu.bytes);
    let available = machine::available_memory();
    if gpu_bytes > available {
        return Err(SnapshotError::NoMemory {
            needed: gpu_bytes,
            available,
        });
    }
    let writer = shop
        .store
        .begin(&shop.lock, write_options(shop, available - gpu_bytes))?;
    writer.reserve(
        gpu_bytes
            + processes
                .iter()
                .map(|process| process.resident)
                .sum::<u64>(),
    );
    watch.lap("admit");

    let frozen_at = clock::now();
    let suspended = gpu.map(|gpu| gpu.suspend(shop, &mut watch)).transpose()?;
    let dump = Dump {
        shop,
        job,
        streams,
        root,
        id: writer.id(),
        writer: Mutex::new(Some(writer)),
        recorded: Mutex::default(),
    };
    let cuda_pids = suspended
        .as_ref()
        .map(|suspended| suspended.pids().to_vec());

    if afterwards == Afterwards::Stop {
        let commit = |dump: &Dump<'_>, mut watch: Stopwatch| {
            watch.lap("dump");
            let facts = dump.facts(trigger, cuda_pids.as_deref(), clock::now() - frozen_at);
            dump.commit(facts, &mut watch, begun)
        };
        let result = dump.run_and_stop(|dump| commit(dump, watch));
        if result.is_ok() {
            // The suspended processes are dead; nothing is left to resume.
            std::mem::forget(suspended);
        }
        return result;
    }

    let dumped = dump.run(|_| Ok(()));
    watch.lap("dump");
    let resumed = suspended.map(cuda::Suspended::resume).transpose();
    if let Ok(Some(times)) = &resumed {
        watch.add("resume", times.restore);
        watch.add("unlock", times.unlock);
    }
    let freeze = clock::now() - frozen_at;
    computing(freeze);
    resumed.map_err(|error| SnapshotError::Resume(Box::new(error)))?;
    dumped?;
    let facts = dump.facts(trigger, cuda_pids.as_deref(), freeze);
    dump.commit(facts, &mut watch, begun)
}

/// `free` is the host memory that is left once the GPU's content is in it.
fn write_options(shop: &Workshop, free: u64) -> WriteOptions {
    let buffer = match shop.config.snapshot.buffer {
        Buffer::Auto => free / 2,
        Buffer::Bytes(bytes) => bytes,
    };
    let workers = match shop.config.snapshot.cpus {
        Cpus::Auto => thread::available_parallelism().map_or(1, usize::from),
        Cpus::Count(count) => count.get(),
    };
    WriteOptions {
        buffer,
        workers,
        level: shop.config.snapshot.level,
    }
}

/// Threads that copy a large image file: one core is CRIU's, and few more reach the memory's speed.
fn lanes() -> usize {
    thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).min(LANES_MAX))
}

/// The job's CUDA processes.
struct Gpu {
    driver: cuda::Driver,
    users: Vec<i32>,
    /// Device memory that moves into host memory, at most.
    bytes: u64,
}

impl Gpu {
    /// Looks for CUDA processes; none on a machine without a driver.
    fn of(processes: &[Process]) -> Result<Option<Self>, SnapshotError> {
        if !cuda::available() {
            return Ok(None);
        }
        let driver = cuda::Driver::load()?;
        let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
        let users = cuda::find(&driver, &pids);
        if users.is_empty() {
            return Ok(None);
        }
        let bytes = machine::gpu_memory_in_use();
        Ok(Some(Self {
            driver,
            users,
            bytes,
        }))
    }

    fn suspend(
        self,
        shop: &Workshop,
        watch: &mut Stopwatch,
    ) -> Result<cuda::Suspended, SnapshotError> {
        let options = cuda::SuspendOptions {
            attempt: LOCK_ATTEMPT,
            total: shop.config.snapshot.lock_timeout,
        };
        let failed = |error| SnapshotError::Suspend(Box::new(error));
        let locked = cuda::lock_all(&self.driver, &self.users, &options).map_err(failed)?;
        watch.lap("lock");
        let suspended = locked.suspend().map_err(failed)?;
        watch.lap("suspend");
        Ok(suspended)
    }
}

/// The part of a snapshot that CRIU does, and what is recorded while the tasks stand still.
struct Dump<'a> {
    shop: &'a Workshop,
    job: &'a Job,
    streams: &'a SharedStreams,
    /// The tree's first process, as the host sees it.
    root: i32,
    id: ImageId,
    writer: Mutex<Option<ImageWriter>>,
    recorded: Mutex<Option<Recorded>>,
}

struct Recorded {
    processes: Vec<Process>,
    files: Vec<OpenFile>,
    sockets: job::Sockets,
    timers: Vec<job::Timer>,
    stdin: job::InputMark,
    stdout: job::OutputMark,
    stderr: job::OutputMark,
}

impl Dump<'_> {
    /// Runs CRIU. `while_frozen` is called when everything is read and recorded and the tasks still stand.
    fn run(
        &self,
        while_frozen: impl FnOnce(&Self) -> Result<(), SnapshotError> + Send,
    ) -> Result<Captured, SnapshotError> {
        let sockets = self.shop.sockets().map_err(SnapshotError::Prepare)?;
        let log = self.shop.log("dump", self.id);
        let capture = Capture::bind(sockets.path()).map_err(SnapshotError::Prepare)?;
        let tool = self.tool(sockets.path(), &log, &capture);
        let (call_off, called_off) = UnixStream::pair().map_err(SnapshotError::Prepare)?;
        let mut call_off = Some(call_off);
        let (ended, captured) = thread::scope(|scope| {
            let capturing = scope.spawn(|| {
                capture.run(
                    &called_off,
                    |name, pipe| self.receive(name, &pipe),
                    |_| {
                        self.record()?;
                        while_frozen(self)
                    },
                )
            });
            let ended = self.wait_for(tool, &mut call_off);
            (ended, capturing.join())
        });
        let captured = captured.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // CRIU that ends by itself takes back what it did to the job.
        let killed = !matches!(ended, Ok(Ended::Exited(_)));
        outcome(&log, ended, captured).map_err(|error| {
            let processes = self.processes();
            if !self.job_lives(&processes) {
                return SnapshotError::Ended;
            }
            match job::with_remains_of_criu(&processes).filter(|_| killed) {
                Some(process) => SnapshotError::Doubtful {
                    pid: process.pid,
                    source: Box::new(error),
                },
                None => error,
            }
        })
    }

    /// The tree as it is; empty when it is gone.
    fn processes(&self) -> Vec<Process> {
        job::tree(self.root).unwrap_or_default()
    }

    fn job_lives(&self, processes: &[Process]) -> bool {
        processes
            .iter()
            .any(|process| process.pid == self.job.pids.job && job::is_alive(process.host_pid))
    }

    /// As `run`, but the tasks never go on: they are killed when `commit` has succeeded.
    fn run_and_stop(
        &self,
        commit: impl FnOnce(&Self) -> Result<Snapshotted, SnapshotError> + Send,
    ) -> Result<Snapshotted, SnapshotError> {
        let mut done = None;
        let run = self.run(|dump| {
            done = Some(commit(dump)?);
            dump.job.sandbox.kill();
            Ok(())
        });
        // Once the image is durable, CRIU's end by our own hand is no failure.
        done.map_or_else(
            || {
                Err(run
                    .err()
                    .unwrap_or(SnapshotError::Sandbox(SandboxError::Gone)))
            },
            Ok,
        )
    }

    fn tool(
        &self,
        directory: &std::path::Path,
        log: &std::path::Path,
        capture: &Capture,
    ) -> ToolCommand {
        let mut argv = self.shop.criu.argv();
        argv.extend(dump_arguments(&DumpOptions {
            root_pid: self.job.pids.root,
            directory,
            log,
            hold: &self.shop.hold(),
            libdir: &self.shop.libdir(),
            log_level: self.shop.config.criu.log_level,
        }));
        let environment = vec![(HOLD_SOCKET_VARIABLE.into(), capture.hold_path().into())];
        ToolCommand {
            argv,
            environment,
            first_descriptor: 0,
            restores: None,
        }
    }

    /// Waits for CRIU; when it fails or takes too long, calls the capture off, which makes it release the tasks.
    /// CRIU that does not do so is killed: the kernel releases them then.
    fn wait_for(
        &self,
        tool: ToolCommand,
        call_off: &mut Option<UnixStream>,
    ) -> Result<Ended, SandboxError> {
        let ended = self.job.sandbox.run_tool(tool, &[]).and_then(|run| {
            let ended = self.watch_over(&run);
            if ended.is_err() {
                call_off.take();
                // However it ends, the snapshot has failed.
                if run.wait(CALL_OFF_LIMIT).is_err() && run.kill().is_ok() {
                    let _ = run.wait(KILL_LIMIT);
                }
            }
            ended
        });
        if !matches!(ended, Ok(Ended::Exited(0))) {
            call_off.take();
        }
        ended
    }

    /// Waits for CRIU within `snapshot.timeout`. When a process dies under its hands, CRIU may wait for it
    /// forever (4.2.1: `wait4` of a thread group whose other dead threads it traces too), and is killed.
    fn watch_over(&self, run: &ToolRun<'_>) -> Result<Ended, SandboxError> {
        let limit = self.shop.config.snapshot.timeout;
        let deadline = clock::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(clock::now());
            match run.wait(left.min(LOOK_INTERVAL)) {
                Err(SandboxError::Slow(_)) if left > LOOK_INTERVAL => {}
                Err(SandboxError::Slow(_)) => return Err(SandboxError::Slow(limit)),
                ended => return ended,
            }
            if job::died_under_trace(&self.processes()) {
                run.kill()?;
                return run.wait(KILL_LIMIT);
            }
        }
    }

    fn receive(&self, name: &str, pipe: &std::fs::File) -> Result<u64, SnapshotError> {
        let mut stream = self.stream(&format!("criu/{name}"))?;
        stream.copy_from_pipe(pipe, lanes())?;
        Ok(stream.finish()?)
    }

    fn stream(&self, name: &str) -> Result<crate::store::StreamWriter, SnapshotError> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let writer = writer
            .as_ref()
            .ok_or_else(|| SnapshotError::Stream(io::ErrorKind::UnexpectedEof.into()))?;
        Ok(writer.stream(name)?)
    }

    /// Records what CRIU does not: sizes and contents of files, positions of the standard streams.
    fn record(&self) -> Result<(), SnapshotError> {
        let processes = job::tree(self.root)?;
        if !self.job_lives(&processes) {
            // CRIU dumps a zombie as willingly; restored, it would only be the same crash again.
            return Err(SnapshotError::Ended);
        }
        let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
        let mut files = job::collect(&pids)?;
        let sockets = job::Sockets::record(&pids)?;
        let timers = job::rung_timers(&processes)?;
        let bytes_max = self.shop.config.files.keep_content;
        for (index, file) in files
            .iter_mut()
            .filter(|file| file.wants_content(bytes_max))
            .enumerate()
        {
            let name = format!("files/{index}");
            let content = |source| SnapshotError::Content {
                path: file.path.display().to_string(),
                source,
            };
            let source = std::fs::File::open(&file.path).map_err(content)?;
            let mut stream = self.stream(&name)?;
            stream.copy_from(&mut source.take(file.size))?;
            stream.finish()?;
            file.content = Some(name);
        }
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let [stdout, stderr] = streams.mark_outputs().map_err(SnapshotError::Prepare)?;
        let recorded = Recorded {
            processes,
            files,
            sockets,
            timers,
            stdin: streams.stdin.mark().map_err(SnapshotError::Prepare)?,
            stdout,
            stderr,
        };
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(recorded);
        Ok(())
    }

    fn facts(
        &self,
        trigger: Trigger,
        cuda_pids: Option<&[i32]>,
        freeze: Duration,
    ) -> Result<ImageFacts, SnapshotError> {
        let recorded = self
            .recorded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // CRIU cannot succeed without having run the action script, and with it `record`.
        let recorded =
            recorded.ok_or_else(|| SnapshotError::Stream(io::ErrorKind::UnexpectedEof.into()))?;
        let cuda = cuda_pids.map(|host_pids| CudaFacts {
            pids: recorded
                .processes
                .iter()
                .filter(|process| host_pids.contains(&process.host_pid))
                .map(|process| process.pid)
                .collect(),
            ..machine::cuda_facts()
        });
        Ok(ImageFacts {
            trigger,
            command: self
                .shop
                .command
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            directory: self.shop.directory.clone(),
            host: machine::host_name(),
            kernel: machine::kernel_release(),
            criu: self.shop.criu.version.to_string(),
            run: self.shop.run,
            instance: self.shop.instance.clone(),
            freeze_seconds: freeze.as_secs_f64(),
            phases: Vec::new(),
            processes: recorded.processes.len(),
            pids: self.job.pids,
            isolated: self.job.sandbox.isolation() == crate::sandbox::Isolation::Namespaces,
            cuda,
            stdin: recorded.stdin,
            stdout: recorded.stdout,
            stderr: recorded.stderr,
            files: recorded.files,
            sockets: recorded.sockets,
            timers: recorded.timers,
        })
    }

    /// Compresses, writes, publishes. The job computes meanwhile, unless it is to stop.
    fn commit(
        &self,
        facts: Result<ImageFacts, SnapshotError>,
        watch: &mut Stopwatch,
        begun: std::time::Instant,
    ) -> Result<Snapshotted, SnapshotError> {
        let mut facts = facts?;
        let writer = self
            .writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let mut writer =
            writer.ok_or_else(|| SnapshotError::Stream(io::ErrorKind::UnexpectedEof.into()))?;
        writer.start_workers();
        writer.settle()?;
        watch.lap("write");
        facts.phases = watch.phases().to_vec();
        let meta =
            serde_json::to_vec(&facts).map_err(|error| SnapshotError::Prepare(error.into()))?;
        let manifest = writer.commit(&meta)?;
        Ok(Snapshotted {
            id: manifest.id,
            freeze: Duration::from_secs_f64(facts.freeze_seconds),
            raw_bytes: manifest.raw_bytes,
            stored_bytes: manifest.stored_bytes,
            total: clock::now() - begun,
            facts,
        })
    }
}

fn outcome(
    log: &std::path::Path,
    ended: Result<Ended, SandboxError>,
    captured: Result<Captured, CaptureError<SnapshotError>>,
) -> Result<Captured, SnapshotError> {
    match (ended, captured) {
        (Ok(Ended::Exited(0)), Ok(captured)) => Ok(captured),
        // Our own failure is the cause of CRIU's.
        (_, Err(CaptureError::Receiver(error))) => Err(error),
        (Ok(Ended::Exited(0)), Err(error)) => {
            Err(SnapshotError::Stream(io::Error::other(error.to_string())))
        }
        (Ok(ended), _) => Err(SnapshotError::Criu {
            reason: why(log, ended),
            log: log.display().to_string(),
        }),
        (Err(SandboxError::Slow(limit)), _) => Err(SnapshotError::Slow(limit)),
        (Err(error), _) => Err(error.into()),
    }
}

fn why(log: &std::path::Path, ended: Ended) -> String {
    criu::reason_in(log).map_or_else(
        || format!("CRIU ended without a reason ({ended:?})"),
        |reason| reason.to_string(),
    )
}
