//! Samples of a job's output, CPU and GPU use and heartbeat file, taken on a thread of their own.
//!
//! The sampler knows neither the limits nor the meaning of a sample.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use tokio::sync::mpsc::Sender;

use super::detector::{GpuWork, Sample, Touched};
use crate::clock;
use crate::cuda::Activity;
use crate::job;
use crate::run::running_job::{Job, SharedStreams};
use crate::supervisor::inbox::Message;
use crate::sync::locked;

pub(crate) struct Source {
    pub streams: SharedStreams,
    pub heartbeat: Option<PathBuf>,
    pub gpu: bool,
}

/// A thread that takes samples: `/proc` and the driver may be slow.
pub(crate) fn sampler(source: Source, inbox: Sender<Message>) -> SyncSender<Arc<Job>> {
    let (asks, asked) = sync_channel(1);
    let work = move || sample_all(&source, &asked, &inbox);
    if let Err(error) = thread::Builder::new()
        .name("samples".to_owned())
        .spawn(work)
    {
        tracing::warn!(%error, "cannot watch for hangs");
    }
    asks
}

fn sample_all(source: &Source, asked: &Receiver<Arc<Job>>, inbox: &Sender<Message>) {
    let activity = source.gpu.then(Activity::load);
    if let Some(None) = activity {
        tracing::warn!("hang.gpu has no effect: there is no GPU, or NVML is missing");
    }
    let activity = activity.flatten();
    for job in asked {
        let sample = source.sample(&job, activity.as_ref());
        if inbox.blocking_send(Message::Sampled(job, sample)).is_err() {
            return;
        }
    }
}

impl Source {
    /// `None` for a job that is just ending.
    fn sample(&self, job: &Job, activity: Option<&Activity>) -> Option<Sample> {
        let root = job::child_with_pid(job.sandbox.pid(), job.pids.root).ok()?;
        let processes = job::tree(root).ok()?;
        let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
        let heartbeat = self.heartbeat.as_ref();
        let looked = clock::now();
        let works = activity.and_then(|activity| activity.works(&pids));
        let seen = |works| GpuWork::seen(works, job.own_activity.shows_on_gpu(looked));
        Some(Sample {
            stopped: job::first_stopped(&processes).is_some(),
            output: self.output(),
            gpu: works.map(seen),
            cpu: job.own_activity.own_cpu_time(|| job::cpu_time(&processes)),
            heartbeat: heartbeat.and_then(|path| touched(path)),
        })
    }

    /// `None` while our own reader keeps the job waiting.
    fn output(&self) -> Option<u64> {
        let streams = locked(&self.streams);
        Some(
            streams
                .stdout
                .progress()?
                .wrapping_add(streams.stderr.progress()?),
        )
    }
}

/// Returns `None` if that is unknown, as on a network file system that is not reachable.
fn touched(path: &Path) -> Option<Touched> {
    match std::fs::metadata(path) {
        Ok(about) => Some(Touched::At(about.mtime(), about.mtime_nsec())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some(Touched::Never),
        Err(_) => None,
    }
}
