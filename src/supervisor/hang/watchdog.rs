//! Hang watch of the loop: when samples are taken, and whether they show a suspect.
//!
//! ```text
//! a sample is due ─▶ sampler thread ─ Sampled ─▶ Signs ─ a finding ─▶ Suspected, for the machine
//! ```
//! `decide/suspicion` has the reaction.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;

use super::detector::{Sample, Signs};
use super::sampler::{Source, sampler};
use crate::clock;
use crate::config::Hang;
use crate::run::running_job::{Job, SharedStreams};
use crate::supervisor::decide::event::Suspect;
use crate::supervisor::inbox::Message;

/// Samples in the time of a limit.
const SAMPLES: u32 = 10;
/// Shortest and longest time between two samples, whatever the limit; GPUs report their last moments only.
const PERIOD_MIN: Duration = Duration::from_millis(100);
const PERIOD_MAX: Duration = Duration::from_secs(15);
const PERIOD_GPU: Duration = Duration::from_secs(1);

/// The watch over a job. It counts the job's computing time only.
#[derive(Debug)]
pub(crate) struct HangWatch {
    settings: Hang,
    signs: Signs,
    period: Duration,
    sampler: SyncSender<Arc<Job>>,
    asked: bool,
    next: Instant,
    /// Computing time at the last sample.
    counted: Duration,
}

impl HangWatch {
    /// Returns `None` if no sign is configured. `directory` is that of a relative heartbeat file.
    pub fn new(
        settings: &Hang,
        directory: &Path,
        streams: &SharedStreams,
        inbox: &Sender<Message>,
    ) -> Option<Self> {
        let limits = [
            settings.output,
            settings.gpu,
            settings.cpu,
            settings.heartbeat_limit(),
        ];
        let shortest = limits.into_iter().flatten().min()?;
        let mut period = (shortest / SAMPLES).clamp(PERIOD_MIN, PERIOD_MAX);
        if settings.gpu.is_some() {
            period = period.min(PERIOD_GPU);
        }
        let heartbeat = settings.heartbeat.as_ref();
        let source = Source {
            streams: Arc::clone(streams),
            heartbeat: heartbeat.map(|path| directory.join(path)),
            gpu: settings.gpu.is_some(),
        };
        Some(Self {
            settings: settings.clone(),
            signs: Signs::new(settings),
            period,
            sampler: sampler(source, inbox.clone()),
            asked: false,
            next: clock::now(),
            counted: Duration::ZERO,
        })
    }

    /// Searches for signs anew: another job runs, or a suspicion was dropped.
    pub fn begin_anew(&mut self, computed: Duration) {
        self.signs = Signs::new(&self.settings);
        self.counted = computed;
        self.next = clock::now() + self.period;
    }

    /// Returns the time until the next sample is due, unless one is being taken.
    pub fn next_sample(&self) -> Option<Duration> {
        (!self.asked).then(|| self.next.saturating_duration_since(clock::now()))
    }

    pub fn sample_if_due(&mut self, job: &Arc<Job>) {
        if self.next_sample().is_some_and(|left| left.is_zero()) {
            // Without its thread, which was reported, no sample is taken.
            self.asked = self.sampler.try_send(Arc::clone(job)).is_ok();
            self.next = clock::now() + self.period;
        }
    }

    /// Evaluates a sample of the running job; `None` is a sample of another job, or of one that was ending.
    pub fn sampled(&mut self, sample: Option<Sample>, computed: Duration) -> Option<Suspect> {
        self.asked = false;
        let sample = sample?;
        let counted = computed.saturating_sub(self.counted);
        self.counted = computed;
        let finding = self.signs.take(&sample, counted)?;
        // A sample is counted when it arrives, some time after it was taken.
        let since = computed.saturating_sub(finding.quiet_max + self.period);
        Some(Suspect { finding, since })
    }
}
