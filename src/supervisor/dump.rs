//! The part of a snapshot that CRIU does, and what is recorded while the tasks stand still.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::bystanders::Bystanders;
use super::dump_end::outcome;
use super::gpu_facts::CudaFacts;
use super::image::{ImageFacts, Stopwatch};
use super::progress::Step;
use super::record::Recorded;
use super::snapshot::{Snapshotted, Subject};
use super::snapshot_error::SnapshotError;
use super::streams::Streams;
use super::workshop::Workshop;
use crate::clock;
use crate::criu::{
    Capture, Captured, DumpOptions, HOLD_SOCKET_VARIABLE, Inherited, dump_arguments, plugin_takes,
};
use crate::job::{self, Process};
use crate::sandbox::{Ended, SandboxError, ToolCommand, ToolRun};
use crate::store::{ImageId, ImageWriter, StreamWriter};

/// Time for CRIU to release the tasks and end, once a dump was called off.
const CALL_OFF_LIMIT: Duration = Duration::from_secs(10);
/// Time between two looks at the processes while CRIU works.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Time for CRIU to die of SIGKILL.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// Most threads that copy one image file.
const LANES_MAX: usize = 4;
/// CRIU's words before it opens its log.
const STDERR: RawFd = 2;

/// A dump, before, during and after CRIU.
pub(super) struct Dump<'a> {
    subject: Subject<'a>,
    /// The tree's first process, as the host sees it.
    root: i32,
    bystanders: Bystanders,
    id: ImageId,
    writer: Mutex<Option<ImageWriter>>,
    recorded: Mutex<Option<Recorded>>,
    /// Until CRIU has ended.
    turn: Mutex<Option<job::Turn>>,
    /// CRIU has handed over everything and is held by us.
    held: AtomicBool,
}

impl<'a> Dump<'a> {
    pub fn new(
        subject: Subject<'a>,
        root: i32,
        bystanders: Bystanders,
        writer: ImageWriter,
        turn: job::Turn,
    ) -> Self {
        Self {
            subject,
            root,
            bystanders,
            id: writer.id(),
            writer: Mutex::new(Some(writer)),
            recorded: Mutex::default(),
            turn: Mutex::new(Some(turn)),
            held: AtomicBool::new(false),
        }
    }

    /// Runs CRIU. `while_frozen` is called when everything is read and recorded and the tasks still stand.
    pub fn run(
        &self,
        while_frozen: impl FnOnce(&Self) -> Result<(), SnapshotError> + Send,
    ) -> Result<Captured, SnapshotError> {
        self.shop().ongoing.step(Step::Dump);
        let sockets = self.shop().sockets().map_err(SnapshotError::Prepare)?;
        let log = self.shop().log("dump", self.id);
        let printed = tempfile::tempfile_in(sockets.path()).map_err(SnapshotError::Prepare)?;
        let capture = Capture::bind(sockets.path()).map_err(SnapshotError::Prepare)?;
        let terminals = self.streams().terminals().map_err(SnapshotError::Prepare)?;
        let tool = self.tool(sockets.path(), &log, &capture, &terminals);
        let (call_off, called_off) = UnixStream::pair().map_err(SnapshotError::Prepare)?;
        let (ended, captured) = thread::scope(|scope| {
            let capturing = scope.spawn(|| {
                capture.run(
                    &called_off,
                    |name, pipe| self.receive(name, &pipe),
                    |_| {
                        self.held.store(true, Ordering::Relaxed);
                        self.record()?;
                        while_frozen(self)
                    },
                )
            });
            let ended = self.wait_for(tool, &printed, call_off);
            (ended, capturing.join())
        });
        drop(
            self.turn
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        let captured = captured.map_err(|_| SnapshotError::Panicked)?;
        // CRIU that ends by itself takes back what it did to the job.
        let killed = !matches!(ended, Ok(Ended::Exited(_)));
        outcome((&log, &printed), ended, captured).map_err(|error| {
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
        processes.iter().any(|process| {
            let pid = process.host_pid;
            process.pid == self.subject.job.pids.job && job::is_alive(pid) && !job::is_doomed(pid)
        })
    }

    /// As `run`, but the tasks never go on: they are killed when `commit` has succeeded.
    pub fn run_and_stop(
        &self,
        commit: impl FnOnce(&Self) -> Result<Snapshotted, SnapshotError> + Send,
    ) -> Result<Snapshotted, SnapshotError> {
        let mut done = None;
        let run = self.run(|dump| {
            done = Some(commit(dump)?);
            // Pid 1 takes a moment to die; no task is to compute when CRIU lets go of it.
            let _ = dump.stop_tasks();
            dump.subject.job.sandbox.kill();
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

    /// Sends every task of the job SIGSTOP. Frozen as they are, none stops before CRIU lets go of it, nor is it
    /// stopped in the image. Not so our own first process: it hears of the job's end.
    pub fn stop_tasks(&self) -> Result<(), SnapshotError> {
        let ours = self.subject.job.pids.root;
        for process in self
            .processes()
            .iter()
            .filter(|process| process.pid != ours)
        {
            let pid = Pid::from_raw(process.host_pid);
            match kill(pid, Signal::SIGSTOP) {
                // A zombie's pid may be free by now.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => return Err(SnapshotError::Prepare(errno.into())),
            }
        }
        Ok(())
    }

    fn shop(&self) -> &'a Workshop {
        self.subject.shop
    }

    fn streams(&self) -> MutexGuard<'_, Streams> {
        self.subject
            .streams
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn tool(
        &self,
        directory: &Path,
        log: &Path,
        capture: &Capture,
        terminals: &[Inherited],
    ) -> ToolCommand {
        let mut argv = self.shop().criu.argv();
        argv.extend(dump_arguments(&DumpOptions {
            root_pid: self.subject.job.pids.root,
            directory,
            log,
            hold: &self.shop().hold(),
            libdir: &self.shop().libdir(),
            log_level: self.shop().config.criu.log_level,
            external: terminals,
        }));
        let environment = vec![
            (HOLD_SOCKET_VARIABLE.into(), capture.hold_path().into()),
            plugin_takes(self.bystanders.majors()),
        ];
        ToolCommand {
            argv,
            environment,
            first_descriptor: STDERR,
            restores: None,
        }
    }

    /// Waits for CRIU; when it takes too long, calls the capture off, which makes it release the tasks.
    /// CRIU that does not do so is killed: the kernel releases them then. However it ends, nothing
    /// comes through the stream afterwards, and the capture ends too.
    fn wait_for(
        &self,
        tool: ToolCommand,
        printed: &File,
        call_off: UnixStream,
    ) -> Result<Ended, SandboxError> {
        let run = self
            .subject
            .job
            .sandbox
            .run_tool(tool, &[printed.as_raw_fd()])?;
        let ended = self.watch_over(&run);
        drop(call_off);
        if ended.is_err() && run.wait(CALL_OFF_LIMIT).is_err() && run.kill().is_ok() {
            // However it ends, the snapshot has failed.
            let _ = run.wait(KILL_LIMIT);
        }
        ended
    }

    /// Waits for CRIU within `snapshot.timeout`; while it is held by us, it does not count. When a process dies
    /// under its hands, CRIU may wait for it forever (4.2.1: `wait4` of a thread group whose other dead threads it
    /// traces too), and is killed.
    fn watch_over(&self, run: &ToolRun<'_>) -> Result<Ended, SandboxError> {
        let limit = self.shop().config.snapshot.timeout;
        let mut deadline = clock::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(clock::now());
            match run.wait(left.min(LOOK_INTERVAL)) {
                Err(SandboxError::Slow(_)) if self.held.load(Ordering::Relaxed) => {
                    deadline = clock::now() + limit;
                }
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

    fn receive(&self, name: &str, pipe: &File) -> Result<u64, SnapshotError> {
        let mut stream = self.stream(&format!("criu/{name}"))?;
        stream.copy_from_pipe(pipe, lanes())?;
        Ok(stream.finish()?)
    }

    /// Has the image's buffers emptied from now on: the job computes, or waits for just that.
    pub fn start_workers(&self) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(writer) = writer.as_mut() {
            writer.start_workers();
        }
    }

    fn stream(&self, name: &str) -> Result<StreamWriter, SnapshotError> {
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
            // CRIU dumps a zombie as willingly, and the signal that is about to end a process; restored, it would only
            // be the same crash again.
            return Err(SnapshotError::Ended);
        }
        self.bystanders.check(&processes)?;
        let bytes_max = self.shop().config.files.keep_content;
        let open = |name: &str| self.stream(name);
        // Nobody else waits for the streams while contents are read.
        let mark = || self.streams().mark();
        let recorded = Recorded::take(processes, bytes_max, mark, open)?;
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(recorded);
        Ok(())
    }

    /// What the image says of the job.
    pub fn facts(
        &self,
        cuda: Option<(Vec<i32>, CudaFacts)>,
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
        Ok(recorded.into_facts(self.subject, cuda, freeze))
    }

    /// Compresses, writes, publishes. The job computes meanwhile, unless it is to stop.
    pub fn commit(
        &self,
        facts: Result<ImageFacts, SnapshotError>,
        watch: &mut Stopwatch,
        begun: Instant,
    ) -> Result<Snapshotted, SnapshotError> {
        let mut facts = facts?;
        let writer = self
            .writer
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let mut writer =
            writer.ok_or_else(|| SnapshotError::Stream(io::ErrorKind::UnexpectedEof.into()))?;
        let taken = writer.taken().bytes();
        self.shop().ongoing.step(Step::Write);
        self.shop().ongoing.measure(writer.stored(), Some(taken));
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

/// Threads that copy a large image file: one core is CRIU's, and few more reach the memory's speed.
fn lanes() -> usize {
    thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).min(LANES_MAX))
}
