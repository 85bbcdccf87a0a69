//! The part of a snapshot in which the job is frozen, and the ways in which it ends.
//!
//! ```text
//! begin: lock → suspend ─┬─ continue_job: dump → copy → resume ← the job computes → drain → commit
//!                        ├─ pause: dump, tasks stopped → copy → drain → commit → paused
//!                        └─ stop:  dump → copy → drain → commit, tasks frozen → killed
//! ```
//! copy and drain transfer the device memory that stayed on the GPUs. On any failure the job is resumed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::criu_dump::CriuDump;
use super::dump::Dump;
use super::durable_files::{LIMIT, LIMIT_AT_STOP};
use super::error::SnapshotError;
use super::kept_files::Beforehand;
use super::long_freeze::LongFreeze;
use super::paused::Paused;
use super::take_snapshot::{Snapshotted, Subject};
use crate::clock;
use crate::gpu::error::GpuError;
use crate::gpu::inherited_devices::{self, InheritedDevices};
use crate::gpu::processes::Gpu;
use crate::gpu::resident::{KeptMemory, ResidentError, ResidentPlan, ResidentTransfer};
use crate::gpu::suspended::SuspendedJob;
use crate::job;
use crate::run::gpu_facts::CudaFacts;
use crate::run::image_facts::Stopwatch;
use crate::run::progress::Step;
use crate::store::ImageWriter;

/// A job that is frozen for a snapshot.
pub(crate) struct Frozen<'a> {
    subject: Subject<'a>,
    /// The suspended GPU state. It is declared before the image: if this value is dropped, the job continues first.
    suspended: Option<SuspendedJob>,
    dump: Dump<'a>,
    /// Device memory that is being copied into the image.
    transfer: Option<ResidentTransfer>,
    /// The CUDA processes, as the host sees them, and the facts that the image will record about them.
    cuda: Option<(Vec<i32>, CudaFacts)>,
    watch: Stopwatch,
    begun: Instant,
    since: Instant,
    /// While the job is to continue soon.
    long_freeze: Option<LongFreeze>,
}

/// The reason why a job is not frozen.
pub(crate) enum NotFrozen {
    /// The job computes, and the failed step may be left to the driver alone.
    Avoidable(ResidentError),
    Failed(SnapshotError),
}

impl<'a> Frozen<'a> {
    /// Suspends the GPU state. The tasks themselves are frozen by CRIU, which waits for its part. `begun` is the start
    /// time of the snapshot.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn begin(
        subject: Subject<'a>,
        root: i32,
        (gpu, resident_plan): (Option<&Gpu<'_>>, Option<ResidentPlan>),
        (writer, beforehand): (ImageWriter, Beforehand),
        mut watch: Stopwatch,
        begun: Instant,
    ) -> Result<(Self, CriuDump<'a>), NotFrozen> {
        // Taken before the job is frozen.
        let turn = turn(root);
        let criu_dump = CriuDump::start(subject, root, writer.id(), &inherited_devices::majors())
            .map_err(NotFrozen::Failed)?;
        writer.await_index();
        let users = gpu.map_or(&[][..], Gpu::users);
        let find_inherited = || InheritedDevices::of(subject.context, root, users);
        // Where nothing is suspended, the job need not wait for this list.
        let ahead = match gpu {
            Some(_) => None,
            None => Some(find_inherited().map_err(|error| NotFrozen::Failed(error.into()))?),
        };
        watch.lap("admit");
        subject.context.ongoing.step(Step::Suspend);
        let since = clock::now();
        let limit = subject.context.config.snapshot.timeout;
        let long_freeze = LongFreeze::watch(&subject.context.ongoing, limit);
        let streams = writer.streams();
        let suspend = |gpu: &Gpu<'_>| {
            let Subject { context, job, .. } = subject;
            gpu.suspend(context, job, resident_plan.as_ref(), &streams, &mut watch)
        };
        let (suspended, transfer) = match (gpu.map(suspend).transpose(), &resident_plan) {
            (Err(GpuError::Resident(error)), Some(resident_plan))
                if resident_plan.is_avoidable(&error) =>
            {
                return Err(NotFrozen::Avoidable(*error));
            }
            (suspended, _) => suspended
                .map_err(|error| NotFrozen::Failed(error.into()))?
                .unzip(),
        };
        let inherited = match ahead.map_or_else(find_inherited, Ok) {
            Ok(inherited) => inherited,
            Err(error) => {
                // Resumed explicitly, not by a drop, to get the error: the job may be lost.
                let resumed = suspended.map(|suspended| suspended.resume(&mut watch));
                let error = resumed.transpose().err().unwrap_or(error);
                return Err(NotFrozen::Failed(error.into()));
            }
        };
        let cuda = gpu.zip(suspended.as_ref()).map(|(gpu, suspended)| {
            let facts = CudaFacts {
                standing: suspended.halt_group().facts(),
                resident: suspended.kept().map(KeptMemory::facts),
                ..gpu.facts.clone()
            };
            (suspended.pids().to_vec(), facts)
        });
        let frozen = Self {
            dump: Dump::new(subject, root, inherited, (writer, beforehand), turn),
            subject,
            suspended,
            transfer: transfer.flatten(),
            cuda,
            watch,
            begun,
            since,
            long_freeze: Some(long_freeze),
        };
        Ok((frozen, criu_dump))
    }

    /// Lets the job compute again as soon as its memory is in the image; `computing` is called then.
    pub fn continue_job(
        mut self,
        criu_dump: CriuDump<'_>,
        computing: impl Fn(Duration),
    ) -> Result<Snapshotted, SnapshotError> {
        let dumped = self.dump.run(criu_dump, |_| Ok(())).map(drop);
        let copied = self.copy(dumped);
        let freeze = self.resume(computing)?;
        copied?;
        self.commit(freeze)
    }

    /// Keeps the job stopped from now on and saves it as an image. If that fails, the job continues.
    pub fn pause(
        mut self,
        criu_dump: CriuDump<'_>,
        computing: impl Fn(Duration),
    ) -> Result<(Snapshotted, Paused), SnapshotError> {
        let dumped = self.dump.run(criu_dump, Dump::stop_tasks).map(drop);
        let copied = self.copy(dumped);
        // From here on the job is frozen on purpose.
        self.long_freeze = None;
        let freeze = clock::now() - self.since;
        match copied.and_then(|()| self.commit(freeze)) {
            Ok(image) => {
                let facts = self.cuda.take().map(|(_, facts)| facts);
                let job = Arc::clone(self.subject.job);
                let paused = Paused::new(job, self.suspended.take().zip(facts));
                Ok((image, paused))
            }
            Err(error) => {
                let resumed = self.resume(computing);
                // For the processes without GPU state. A sandbox that has exited needs no signal.
                let _ = self.subject.job.sandbox.signal(nix::libc::SIGCONT, true);
                resumed.and(Err(error))
            }
        }
    }

    /// Kills the frozen job once the image is durable. If that fails, the job continues.
    pub fn stop(
        mut self,
        criu_dump: CriuDump<'_>,
        computing: impl Fn(Duration),
    ) -> Result<Snapshotted, SnapshotError> {
        let Self {
            dump,
            transfer,
            cuda,
            subject,
            begun,
            since,
            watch,
            long_freeze,
            ..
        } = &mut self;
        let mut watch = watch.clone();
        let stopped = dump.run_and_stop(criu_dump, |dump| {
            watch.lap("dump");
            *long_freeze = None;
            dump.start_workers();
            subject.context.ongoing.step(Step::Copy);
            if let Some(mut transfer) = transfer.take() {
                transfer.while_frozen()?;
                transfer.afterwards()?;
                watch.lap("copy");
            }
            let facts = dump.facts(cuda.clone(), clock::now() - *since);
            dump.commit(facts, &mut watch, *begun, LIMIT_AT_STOP)
        });
        match stopped {
            Ok(image) => {
                // The suspended processes are dead; nothing is left to resume.
                if let Some(suspended) = self.suspended.take() {
                    suspended.leave();
                }
                Ok(image)
            }
            Err(error) => self.resume(computing).and(Err(error)),
        }
    }

    /// Waits until the image contains the device memory that the job would change after it continues.
    fn copy(&mut self, dumped: Result<(), SnapshotError>) -> Result<(), SnapshotError> {
        self.watch.lap("dump");
        self.step(Step::Copy);
        let Some(transfer) = &mut self.transfer else {
            return dumped;
        };
        let copied = dumped.and_then(|()| Ok(transfer.while_frozen()?));
        self.watch.lap("copy");
        copied
    }

    fn step(&self, step: Step) {
        self.subject.context.ongoing.step(step);
    }

    /// Lets the job compute again; returns the length of the freeze.
    fn resume(&mut self, computing: impl Fn(Duration)) -> Result<Duration, SnapshotError> {
        self.step(Step::Resume);
        let suspended = self.suspended.take();
        let resumed = suspended.map(|suspended| suspended.resume(&mut self.watch));
        self.long_freeze = None;
        let freeze = clock::now() - self.since;
        computing(freeze);
        resumed.transpose()?;
        Ok(freeze)
    }

    /// Drains the copies of device memory; compresses, writes and commits the image.
    fn commit(&mut self, freeze: Duration) -> Result<Snapshotted, SnapshotError> {
        self.dump.start_workers();
        let Subject {
            context, standby, ..
        } = self.subject;
        let mut changes = None;
        if let Some(transfer) = self.transfer.take() {
            self.step(Step::Drain);
            changes = Some(transfer.afterwards()?);
            self.watch.lap("drain");
            standby.warm(&context.program);
        }
        self.subject.job.own_activity.leaves_gpu(clock::now());
        let facts = self.dump.facts(self.cuda.clone(), freeze);
        let image = self
            .dump
            .commit(facts, &mut self.watch, self.begun, LIMIT)?;
        if let Some(changes) = changes {
            standby.blocks.keep(image.id, &changes);
        }
        Ok(image)
    }
}

/// Takes the lock for creating CRIU's links in folders that other jobs use too.
fn turn(root: i32) -> job::DumpLock {
    let processes = job::tree(root).unwrap_or_default();
    job::DumpLock::to_dump(&job::Descriptors::of_present(&processes))
}
