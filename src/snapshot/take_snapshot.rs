//! A snapshot, from the first check of the job to the durable image.
//!
//! ```text
//! admit, CRIU started → lock → suspend → dump, tasks frozen → drained, recorded → released → resume
//!                     └──────────────────── freeze (`freeze`) ──────────────────────────────────────┘→ write → commit
//! ```
//!
//! This module contains the steps before the freeze, while the job computes. Each step undoes itself if a later one
//! fails: the image writer deletes the data it wrote, the suspended GPU state resumes, CRIU releases the tasks. A
//! failed snapshot leaves the job computing and the store unchanged.

use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::disk_space;
use super::dump;
use super::error::SnapshotError;
use super::freeze::{Frozen, NotFrozen};
use super::kept_files::{Beforehand, Busy};
use super::paused::Paused;
use super::postponement;
use crate::clock;
use crate::config::{Buffer, Cpus};
use crate::gpu::error::GpuError;
use crate::gpu::inherited_devices;
use crate::gpu::processes::Gpu;
use crate::gpu::resident::{PlanOptions, Purpose, ResidentError, ResidentPlan, Standby};
use crate::job::{self, Descriptors, Process, When};
use crate::run::image_facts::{ImageFacts, Stopwatch, Trigger};
use crate::run::machine;
use crate::run::progress::{Step, Work};
use crate::run::run_context::RunContext;
use crate::run::run_state::RunState;
use crate::run::running_job::{Job, SharedStreams};
use crate::store::{ImageId, ImageWriter, WriteOptions};
use crate::sync::try_threads;

/// Number of cores that the freeze may need: for CRIU, for the threads that copy its largest file, and for the driver.
const FREEZE_CORES: usize = 8;

/// Host memory beyond the GPU's content that must be free for a suspend: page tables for the copy (1/512 of it), the
/// smallest buffer of the store, CRIU, and the memory that the job itself allocates until it is frozen. With less, the
/// kernel kills the job.
const SUSPEND_HEADROOM: u64 = 512 << 20;
/// Host memory for GPU memory that is copied while the job computes: nothing waits for that copy, and the job may need
/// host memory itself.
const DRAIN_BUFFER: u64 = 1 << 30;
/// Divisor of `snapshot.timeout`: the result is the longest time in which the store may accept no data while the job is
/// frozen.
const STALL_SHARE: u32 = 5;
/// Waits between the attempts at a snapshot of a job that changes meanwhile. A connection is accepted and a file of a
/// thread closed within milliseconds; starting CUDA takes up to some seconds, and the driver does not report when it is
/// done. If the job still changes at the last attempt, the next scheduled snapshot is a better moment.
const PAUSES_MS: [u64; 8] = [50, 100, 200, 400, 800, 1000, 1000, 1000];

/// The job's state after its snapshot; of several requested states, the last of these is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Afterwards {
    /// The job continues.
    Continue,
    /// The job stays stopped, and its GPUs are free for other programs.
    Pause,
    /// The job is killed while it is frozen, once the image is durable.
    Stop,
}

/// A snapshot that became an image.
#[derive(Clone, Debug)]
pub(crate) struct Snapshotted {
    pub id: ImageId,
    pub freeze: Duration,
    pub raw_bytes: u64,
    pub stored_bytes: u64,
    pub total: Duration,
    pub facts: ImageFacts,
}

/// The subject of a snapshot, and its trigger.
#[derive(Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub context: &'a RunContext,
    pub standby: &'a Standby,
    pub job: &'a Arc<Job>,
    pub streams: &'a SharedStreams,
    /// The run that the image belongs to.
    pub state: &'a RunState,
    pub trigger: Trigger,
}

/// Takes a snapshot. Blocks until the image is durable; `computing` is called when the job computes again. If the job
/// changes meanwhile, the snapshot is tried again. If the job was to be paused, the paused job is returned with the
/// image.
pub(crate) fn take(
    subject: Subject<'_>,
    afterwards: Afterwards,
    computing: impl Fn(Duration),
) -> Result<(Snapshotted, Option<Paused>), SnapshotError> {
    let begun = clock::now();
    let _busy = subject.context.ongoing.begin(Work::Snapshot, Step::Admit);
    let computing = |freeze| {
        subject.job.continues();
        subject.context.ongoing.computing();
        computing(freeze);
    };
    let attempt = || attempt(subject, afterwards, begun, None, &computing);
    let taken = again_while_it_changes(attempt, thread::sleep);
    // A failed one has repeated the job's waits, too.
    subject.job.runs_again();
    taken
}

/// Repeats the attempt as long as the job changes meanwhile, a limited number of times.
fn again_while_it_changes<T>(
    mut attempt: impl FnMut() -> Result<T, SnapshotError>,
    mut pause: impl FnMut(Duration),
) -> Result<T, SnapshotError> {
    for (number, length) in (1..).zip(PAUSES_MS) {
        match attempt() {
            Err(error) if error.is_passing() => {
                tracing::info!(attempt = number, "the snapshot is taken again: {error}");
                pause(Duration::from_millis(length));
            }
            result => return result,
        }
    }
    attempt()
}

/// Attempts the snapshot, and once again after an avoidable failure of resident memory. That failure is then in
/// `despite`.
fn attempt(
    subject: Subject<'_>,
    afterwards: Afterwards,
    begun: Instant,
    despite: Option<&ResidentError>,
    computing: &impl Fn(Duration),
) -> Result<(Snapshotted, Option<Paused>), SnapshotError> {
    let Subject { context, job, .. } = subject;
    context.ongoing.step(Step::Admit);
    let watch = Stopwatch::start();
    let root = job::child_with_pid(job.sandbox.pid(), job.pids.root)?;
    let processes = job::tree(root)?;
    if !job.lives(&processes) {
        return Err(SnapshotError::Ended);
    }
    let open = Descriptors::of_present(&processes);
    dump::refuse_obstacles(job, &processes, &open, When::Ahead)?;
    look_at_sockets(subject, &open)?;
    job.own_activity.begins(job::cpu_time(&processes));
    let mut gpu = Gpu::of(context, &processes)?;
    inherited_devices::check_newcomers(&open, gpu.as_ref().map_or(&[], Gpu::users))?;
    let resident_plan = resident_plan(subject, gpu.as_mut(), afterwards, despite)?;
    // A job that watches files would receive events of what is opened here, and could not be frozen before it has read them.
    let watches = open.iter().any(Descriptors::watch_files);
    let busy = Busy::of(&open, &context.config.files, watches);
    let resident = resident_plan.as_ref();
    let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
    context.users.add(&job::users(&pids), &job::groups(&pids));
    let users = context.users.job_users();
    let writer = admit(subject, &processes, gpu.as_ref(), resident, busy.bytes)?;
    if afterwards != Afterwards::Stop {
        // A job that is about to be stopped only waits for its image.
        writer.limit_stalls(context.config.snapshot.timeout / STALL_SHARE);
        // While the job computes, all threads compress.
        writer.spare_workers(cores());
    }
    if context.files.has_lost_watcher() && !job.sandbox.is_gone() {
        // The image has what a scan finds, and the record will have all changes after it.
        context.watch(&job.sandbox);
    }
    let beforehand = if afterwards == Afterwards::Stop || watches {
        Beforehand::nothing(&writer, users)?
    } else {
        Beforehand::copy(context, &writer, &busy, users)?
    };
    drop(open);
    writer.spare_workers(cores().saturating_sub(FREEZE_CORES));
    let limit = postponement::limit(afterwards);
    let entry = Cell::new(postponement::hold_off(context.store.path(), limit));
    let computes_again = |freeze| {
        entry.take();
        computing(freeze);
    };
    let gpu = (gpu.as_ref(), resident_plan);
    let (frozen, criu_dump) =
        match Frozen::begin(subject, root, gpu, (writer, beforehand), watch, begun) {
            Ok(frozen) => frozen,
            Err(NotFrozen::Avoidable(error)) => {
                entry.take();
                return attempt(subject, afterwards, begun, Some(&error), computing);
            }
            Err(NotFrozen::Failed(error)) => return Err(error),
        };
    match afterwards {
        Afterwards::Continue => frozen
            .continue_job(criu_dump, computes_again)
            .map(|image| (image, None)),
        Afterwards::Stop => frozen
            .stop(criu_dump, computes_again)
            .map(|image| (image, None)),
        Afterwards::Pause => {
            let (image, paused) = frozen.pause(criu_dump, computes_again)?;
            Ok((image, Some(paused)))
        }
    }
}

/// Refuses a job with sockets in a state that no image can hold, before it is frozen. Their state is checked again when
/// the job is frozen.
fn look_at_sockets(subject: Subject<'_>, open: &[Descriptors]) -> Result<(), SnapshotError> {
    match dump::sockets(subject, open) {
        Err(job::SocketsError::Obstacle(obstacle)) => Err(obstacle.into()),
        Err(error @ job::SocketsError::NotKept { .. }) => Err(error.into()),
        // A process may exit at any moment.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Returns the plan for memory that stays on the GPUs. All work on it that takes time is done here, before the job is
/// frozen.
fn resident_plan(
    Subject {
        context,
        standby,
        job,
        ..
    }: Subject<'_>,
    gpu: Option<&mut Gpu<'_>>,
    afterwards: Afterwards,
    despite: Option<&ResidentError>,
) -> Result<Option<ResidentPlan>, SnapshotError> {
    let Some((gpu, agents)) = gpu.zip(job.agents()) else {
        return Ok(None);
    };
    let purpose = match afterwards {
        Afterwards::Pause => Purpose::Pause,
        Afterwards::Continue | Afterwards::Stop => Purpose::Snapshot,
    };
    let options = PlanOptions {
        context,
        standby,
        agents: &agents,
        moved: &job.moved,
        purpose,
        despite,
    };
    let resident_plan = ResidentPlan::prepare(gpu, options);
    Ok(resident_plan.map_err(GpuError::from)?)
}

/// Checks that there is room, and allocates the memory that the image will pass through, while the job computes. `files` is
/// the number of bytes of files that may be copied during the freeze.
fn admit(
    Subject { context, state, .. }: Subject<'_>,
    processes: &[Process],
    gpu: Option<&Gpu<'_>>,
    resident_plan: Option<&ResidentPlan>,
    files: u64,
) -> Result<ImageWriter, SnapshotError> {
    try_threads()?;
    let all = gpu.map_or(0, |gpu| gpu.bytes);
    let needed = all.saturating_sub(resident_plan.map_or(0, ResidentPlan::bytes));
    let available = machine::available_memory();
    if needed > 0 && needed.saturating_add(SUSPEND_HEADROOM) > available {
        return Err(SnapshotError::NoMemory {
            needed,
            headroom: SUSPEND_HEADROOM,
            available,
        });
    }
    let resident: u64 = processes.iter().map(|process| process.resident).sum();
    disk_space::make(context, state, all + resident)?;
    let dumped = needed + resident;
    let frozen = resident_plan.map(|plan| dumped + files + plan.bytes_without_shadow());
    let options = write_options(context, available - needed, frozen);
    let newest = state.newest_of_others();
    let writer = context.store.begin_after(&context.lock, options, newest)?;
    context
        .ongoing
        .measure(writer.taken(), Some(all + resident));
    // More is populated as it is used.
    let expected = resident_plan.map_or(0, ResidentPlan::bytes_expected_without_shadow);
    writer.reserve(dumped + expected + files);
    Ok(writer)
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the options of the image writer. `free` is the host memory that remains once the GPU's content is in host
/// memory. `frozen` is the number of bytes that are written while the job is frozen, if more are written later.
fn write_options(context: &RunContext, free: u64, frozen: Option<u64>) -> WriteOptions {
    let later = frozen.map_or(u64::MAX, |bytes| bytes.saturating_add(DRAIN_BUFFER));
    let buffer = match context.config.snapshot.buffer {
        Buffer::Auto => later.min(free / 2),
        Buffer::Bytes(bytes) => bytes,
    };
    let workers = match context.config.snapshot.cpus {
        Cpus::Auto => cores(),
        Cpus::Count(count) => count.get(),
    };
    WriteOptions {
        buffer,
        workers,
        level: context.config.snapshot.level,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_changes_is_tried_again_a_few_times() {
        for (changes, tries, taken) in [(0, 1, true), (4, 5, true), (8, 9, true), (9, 9, false)] {
            let (mut tried, mut paused) = (0, 0);
            let attempt = || {
                tried += 1;
                if tried <= changes {
                    return Err(GpuError::Device { pid: 7 }.into());
                }
                Ok(())
            };
            let result = again_while_it_changes(attempt, |_| paused += 1);
            assert_eq!((tried, result.is_ok()), (tries, taken), "{changes} changes");
            assert_eq!(paused, tries - 1);
        }
    }

    #[test]
    fn any_other_failure_ends_the_attempts() {
        let mut tried = 0;
        let attempt = || {
            tried += 1;
            Err(SnapshotError::Ended)
        };
        let result: Result<(), _> =
            again_while_it_changes(attempt, |_| panic!("the wait timed out"));
        assert!(matches!(result, Err(SnapshotError::Ended)));
        assert_eq!(tried, 1);
    }
}
