//! The dump: the part of a snapshot that CRIU does, and the facts that are recorded while the tasks are frozen.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::criu_dump::CriuDump;
use super::criu_log::CriuLog;
use super::error::SnapshotError;
use super::job_facts::Recorded;
use super::take_snapshot::{Snapshotted, Subject};
use crate::clock;
use crate::criu::Captured;
use crate::gpu::inherited_devices::InheritedDevices;
use crate::job::{self, Process, TreeError};
use crate::run::gpu_facts::CudaFacts;
use crate::run::image_facts::{ImageFacts, Stopwatch};
use crate::run::progress::Step;
use crate::run::run_context::RunContext;
use crate::sandbox::SandboxError;
use crate::store::{ImageWriter, StreamWriter};
use crate::sync::locked;

/// Most threads that copy one image file.
const LANES_MAX: usize = 4;
/// A dump, before, during and after CRIU.
pub(crate) struct Dump<'a> {
    subject: Subject<'a>,
    /// The tree's first process, as the host sees it.
    root: i32,
    inherited: InheritedDevices,
    writer: Mutex<Option<ImageWriter>>,
    recorded: Mutex<Option<Recorded>>,
    /// Until CRIU has ended.
    turn: Mutex<Option<job::DumpLock>>,
    /// CRIU's, once it has ended.
    log: OnceLock<Arc<CriuLog>>,
}

impl<'a> Dump<'a> {
    pub fn new(
        subject: Subject<'a>,
        root: i32,
        inherited: InheritedDevices,
        writer: ImageWriter,
        turn: job::DumpLock,
    ) -> Self {
        Self {
            subject,
            root,
            inherited,
            writer: Mutex::new(Some(writer)),
            recorded: Mutex::default(),
            turn: Mutex::new(Some(turn)),
            log: OnceLock::new(),
        }
    }

    /// Lets CRIU begin. `while_frozen` is called when everything is read and recorded and the tasks still stand.
    pub fn run(
        &self,
        criu_dump: CriuDump<'_>,
        while_frozen: impl FnOnce(&Self) -> Result<(), SnapshotError> + Send,
    ) -> Result<Captured, SnapshotError> {
        self.context().ongoing.step(Step::Dump);
        let mut before = job::tree(self.root).unwrap_or_default();
        before.retain(|process| job::is_alive(process.host_pid));
        let dumped = criu_dump.run(
            |name, pipe| self.receive(name, pipe),
            || {
                self.record()?;
                while_frozen(self)
            },
        );
        drop(locked(&self.turn).take());
        self.log.get_or_init(|| dumped.log);
        dumped.result.map_err(|error| {
            let processes = match job::tree(self.root) {
                Ok(processes) => processes,
                Err(TreeError::NoRoot) => return SnapshotError::Ended,
                Err(_) => return error,
            };
            if !self.subject.job.lives(&processes) {
                return SnapshotError::Ended;
            }
            // A process that is in code of CRIU's, or was and has died of it, as others may not notice.
            let is_dead = |process: &Process| !job::is_alive(process.host_pid);
            let hurt =
                job::with_remains_of_criu(&processes).or_else(|| before.into_iter().find(is_dead));
            match hurt.filter(|_| dumped.killed) {
                Some(process) => SnapshotError::Doubtful {
                    pid: process.pid,
                    source: Box::new(error),
                },
                None => error,
            }
        })
    }

    /// Dumps as `run` does, but never releases the tasks: they are killed when `commit` has succeeded.
    pub fn run_and_stop(
        &self,
        criu_dump: CriuDump<'_>,
        commit: impl FnOnce(&Self) -> Result<Snapshotted, SnapshotError> + Send,
    ) -> Result<Snapshotted, SnapshotError> {
        let mut done = None;
        let run = self.run(criu_dump, |dump| {
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
        let processes = job::tree(self.root)?;
        for process in processes.iter().filter(|process| process.pid != ours) {
            let pid = Pid::from_raw(process.host_pid);
            match kill(pid, Signal::SIGSTOP) {
                // A zombie's pid may be free by now.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => return Err(SnapshotError::Prepare(errno.into())),
            }
        }
        Ok(())
    }

    fn context(&self) -> &'a RunContext {
        self.subject.context
    }

    fn receive(&self, name: &str, pipe: &File) -> Result<u64, SnapshotError> {
        let mut stream = self.stream(&format!("criu/{name}"))?;
        stream.copy_from_pipe(pipe, lanes())?;
        Ok(stream.finish()?)
    }

    /// Has the image's buffers emptied from now on: the job computes, or waits for just that.
    pub fn start_workers(&self) {
        if let Some(writer) = locked(&self.writer).as_mut() {
            writer.start_workers();
        }
    }

    fn stream(&self, name: &str) -> Result<StreamWriter, SnapshotError> {
        let writer = locked(&self.writer);
        let writer = writer
            .as_ref()
            .ok_or_else(|| SnapshotError::Stream(io::ErrorKind::UnexpectedEof.into()))?;
        Ok(writer.stream(name)?)
    }

    /// Records what CRIU does not: sizes and contents of files, positions of the standard streams.
    fn record(&self) -> Result<(), SnapshotError> {
        let processes = job::tree(self.root)?;
        if !self.subject.job.lives(&processes) {
            // CRIU dumps a zombie as willingly, and the signal that is about to end a process; restored, it would only
            // be the same crash again.
            return Err(SnapshotError::Ended);
        }
        self.inherited.check(&processes)?;
        let bytes_max = self.context().config.files.keep_content;
        let open = |name: &str| self.stream(name);
        // Nobody else waits for the streams while contents are read.
        let mark = || locked(self.subject.streams).mark();
        let recorded = Recorded::take(processes, bytes_max, mark, open)?;
        *locked(&self.recorded) = Some(recorded);
        Ok(())
    }

    /// Returns the facts about the job for the image.
    pub fn facts(
        &self,
        cuda: Option<(Vec<i32>, CudaFacts)>,
        freeze: Duration,
    ) -> Result<ImageFacts, SnapshotError> {
        // CRIU cannot succeed without having run the action script, and with it `record`.
        let recorded = taken(&self.recorded)?;
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
        let mut writer = taken(&self.writer)?;
        let taken = writer.taken().bytes();
        self.context().ongoing.step(Step::Write);
        self.context().ongoing.measure(writer.stored(), Some(taken));
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

/// Takes a value that can be used once.
fn taken<T>(once: &Mutex<Option<T>>) -> Result<T, SnapshotError> {
    let taken = locked(once).take();
    taken.ok_or_else(|| SnapshotError::Stream(io::ErrorKind::UnexpectedEof.into()))
}

/// Threads that copy a large image file. CRIU itself waits for them most of the time, and few reach the memory's speed.
fn lanes() -> usize {
    thread::available_parallelism().map_or(1, |cores| cores.get().min(LANES_MAX))
}
