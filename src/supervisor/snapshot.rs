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

use std::thread;
use std::time::Duration;

use super::bystanders::Bystanders;
use super::dump::Dump;
use super::gpu::Gpu;
use super::image::{ImageFacts, Stopwatch, Trigger};
use super::machine;
use super::room;
use super::snapshot_error::SnapshotError;
use super::workshop::{Job, SharedStreams, Workshop};
use crate::clock;
use crate::config::{Buffer, Cpus};
use crate::cuda;
use crate::job::{self, Process};
use crate::store::{ImageId, ImageWriter, WriteOptions};

/// Cores that the freeze may need: CRIU's, those that copy its largest file, the driver's.
const FREEZE_CORES: usize = 8;

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

/// What is snapshotted, and why.
#[derive(Clone, Copy)]
pub(super) struct Subject<'a> {
    pub shop: &'a Workshop,
    pub job: &'a Job,
    pub streams: &'a SharedStreams,
    /// Which run of the store the image belongs to.
    pub run: u64,
    pub trigger: Trigger,
}

/// Takes a snapshot. Blocks until the image is durable; `computing` is called when the job computes again.
pub(super) fn take(
    subject: Subject<'_>,
    afterwards: Afterwards,
    computing: impl FnOnce(Duration),
) -> Result<Snapshotted, SnapshotError> {
    let Subject {
        shop,
        job,
        streams,
        run,
        trigger,
    } = subject;
    let begun = clock::now();
    let mut watch = Stopwatch::start();
    let root = job::child_with_pid(job.sandbox.pid(), job.pids.root)?;
    let processes = job::tree(root)?;
    let gpu = Gpu::of(shop, &processes)?;
    let writer = admit(subject, &processes, gpu.as_ref())?;
    watch.lap("admit");

    let frozen_at = clock::now();
    let suspended = gpu.map(|gpu| gpu.suspend(shop, &mut watch)).transpose()?;
    let cuda_pids = suspended
        .as_ref()
        .map(|suspended| suspended.pids().to_vec());
    let bystanders = Bystanders::of(shop, root)?;
    let dump = Dump::new(shop, job, streams, run, root, bystanders, writer);
    let dumped = match afterwards {
        Afterwards::Continue => dump.run(|_| Ok(())).map(|_| None),
        Afterwards::Stop => dump
            .run_and_stop(|dump| {
                let mut watch = watch.clone();
                watch.lap("dump");
                let facts = dump.facts(trigger, cuda_pids.as_deref(), clock::now() - frozen_at);
                dump.commit(facts, &mut watch, begun)
            })
            .map(Some),
    };
    if let Ok(Some(snapshotted)) = dumped {
        // The suspended processes are dead; nothing is left to resume.
        std::mem::forget(suspended);
        return Ok(snapshotted);
    }
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

/// Checks that there is room, and gets the memory that the image will pass through, while the job computes.
fn admit(
    Subject { shop, run, .. }: Subject<'_>,
    processes: &[Process],
    gpu: Option<&Gpu>,
) -> Result<ImageWriter, SnapshotError> {
    let needed = gpu.map_or(0, |gpu| gpu.bytes);
    let available = machine::available_memory();
    if needed > available {
        return Err(SnapshotError::NoMemory { needed, available });
    }
    let resident: u64 = processes.iter().map(|process| process.resident).sum();
    room::make(shop, run, needed + resident)?;
    let writer = shop
        .store
        .begin(&shop.lock, write_options(shop, available - needed))?;
    writer.reserve(needed + resident);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    writer.spare_workers(cores.saturating_sub(FREEZE_CORES));
    Ok(writer)
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
