//! Hang watch of the loop: evaluates samples and acts on a hung job.
//!
//! ```text
//! Timer ─▶ sampler thread ─ Sampled ─▶ Signs ─ a finding ─▶ diagnosis thread ─ Diagnosed ─▶ verdict
//!    verdict, once no snapshot is taken: said, hook; images from the silence are left out, the job is killed
//! ```
//! What follows on its end is as after any crash.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;

use super::detector::{Finding, Sample, Signs};
use super::sampler::{Source, sampler};
use super::stack_report;
use crate::clock;
use crate::config::{Hang, HangAction, Occasion};
use crate::history;
use crate::run::format::chain;
use crate::run::running_job::{Job, SharedStreams};
use crate::store::ImageId;
use crate::supervisor::error::RunError;
use crate::supervisor::event::Event;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::handlers::background::News;
use crate::supervisor::policy::restart::Budget;
use crate::supervisor::stage::{Running, Stage};

/// Samples in the time of a limit.
const SAMPLES: u32 = 10;
/// Shortest and longest time between two samples, whatever the limit; GPUs report their last moments only.
const PERIOD_MIN: Duration = Duration::from_millis(100);
const PERIOD_MAX: Duration = Duration::from_secs(15);
const PERIOD_GPU: Duration = Duration::from_secs(1);
/// Newest images that are remembered, for those of a silence: more than any store keeps.
const IMAGES_MAX: usize = 4096;

/// The watch over a job.
#[derive(Debug)]
pub(crate) struct HangWatch {
    signs: Signs,
    period: Duration,
    sampler: SyncSender<Arc<Job>>,
    /// A sample is being taken.
    asked: bool,
    next: Instant,
    /// The computing time at the last sample.
    counted: Duration,
    /// Images of this life, with the computing time at which each was frozen and the budget before it.
    images: VecDeque<Taken>,
    frozen_at: Duration,
    state: Suspicion,
}

#[derive(Debug, Clone, Copy)]
struct Taken {
    image: ImageId,
    at: Duration,
    budget: Budget,
}

/// Stage of the reaction to a hung job.
#[derive(Debug)]
enum Suspicion {
    None,
    /// The job's stacks are to be recorded, as soon as no snapshot is under way.
    Found(Suspect),
    /// The job's stacks are being recorded.
    Diagnosing(Suspect),
    /// The job's stacks are in this log, if it could be written. The loop acts as soon as no snapshot is under way.
    Verdict(Suspect, Option<PathBuf>),
}

#[derive(Debug, Clone, Copy)]
struct Suspect {
    finding: Finding,
    /// The computing time after which nothing was heard of it.
    since: Duration,
}

impl HangWatch {
    /// `None` when no sign is looked for. `directory` is where a relative heartbeat is.
    pub fn new(
        settings: &Hang,
        directory: &Path,
        streams: &SharedStreams,
        events: &Sender<Event>,
    ) -> Option<Self> {
        let limits = [
            settings.output,
            settings.gpu,
            settings.cpu,
            settings.heartbeat_limit(),
        ];
        let limits = limits.into_iter().flatten();
        let shortest = limits.min()?;
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
            signs: Signs::new(settings),
            period,
            sampler: sampler(source, events.clone()),
            asked: false,
            next: clock::now(),
            counted: Duration::ZERO,
            images: VecDeque::new(),
            frozen_at: Duration::ZERO,
            state: Suspicion::None,
        })
    }
}

impl Supervisor {
    /// Another job runs, or the same one anew: signs and images of the last life mean nothing.
    pub fn watch_anew(&mut self) {
        let counted = self.background.clock.total(clock::now());
        if let Some(watch) = &mut self.background.hang {
            watch.signs = Signs::new(&self.context.config.hang);
            watch.images.clear();
            watch.counted = counted;
            watch.next = clock::now() + watch.period;
            watch.state = Suspicion::None;
        }
    }

    /// Time until the next sample is due, while there is a job that computes and none is being taken.
    pub fn next_sample(&self) -> Option<Duration> {
        let watch = self.background.hang.as_ref()?;
        let due = self.background.clock.runs() && !watch.asked;
        due.then(|| watch.next.saturating_duration_since(clock::now()))
    }

    /// A sample is due.
    pub fn ask_for_sample(&mut self) {
        let Stage::Running(Running { job, .. }) = &self.stage else {
            return;
        };
        if let Some(watch) = &mut self.background.hang {
            // A thread that does not take it does not look for signs, as it has said.
            watch.asked = watch.sampler.try_send(Arc::clone(job)).is_ok();
            watch.next = clock::now() + watch.period;
        }
    }

    /// A sample was taken.
    pub fn sampled(&mut self, of: &Arc<Job>, sample: Option<Sample>) {
        let total = self.background.clock.total(clock::now());
        let Some(watch) = &mut self.background.hang else {
            return;
        };
        watch.asked = false;
        let Stage::Running(Running { job, .. }) = &self.stage else {
            return;
        };
        let Some(sample) = sample.filter(|_| Arc::ptr_eq(job, of)) else {
            return;
        };
        let counted = total.saturating_sub(watch.counted);
        watch.counted = total;
        let found = watch.signs.take(&sample, counted);
        if let (Some(finding), Suspicion::None) = (found, &watch.state) {
            // A sample is counted when it arrives, some time after it was taken.
            let since = total.saturating_sub(finding.quiet_max + watch.period);
            watch.state = Suspicion::Found(Suspect { finding, since });
        }
    }

    /// Writes down what the job does, on a thread.
    fn diagnose(&mut self, finding: Finding, job: Arc<Job>) {
        let (context, events) = (Arc::clone(&self.context), self.events.clone());
        let work = move || {
            let write = || stack_report::write(&context, &job, &finding.to_string());
            let log = catch_unwind(AssertUnwindSafe(write))
                .unwrap_or_else(|_| {
                    Err(io::Error::other("a mistake in ckpt-run, please report it"))
                })
                .inspect_err(|error| {
                    tracing::warn!("cannot log what the job does: {}", chain(error));
                });
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::Background(Box::new(News::Diagnosed(log.ok()))));
        };
        let thread = thread::Builder::new().name("diagnosis".to_owned());
        if let Err(error) = thread.spawn(work) {
            tracing::warn!(%error, "cannot log what the job does");
            self.diagnosed(None);
        }
    }

    /// Handles the end of the recording.
    pub fn diagnosed(&mut self, log: Option<PathBuf>) {
        if let Some(watch) = &mut self.background.hang
            && let Suspicion::Diagnosing(suspect) = watch.state
        {
            watch.state = Suspicion::Verdict(suspect, log);
        }
    }

    /// Returns true if the job is suspected to hang: an image of it would be one of a hung job.
    pub fn is_suspect(&self) -> bool {
        let watch = self.background.hang.as_ref();
        watch.is_some_and(|watch| !matches!(watch.state, Suspicion::None))
    }

    /// Returns true if the job's stacks are being recorded.
    pub fn is_being_diagnosed(&self) -> bool {
        let watch = self.background.hang.as_ref();
        watch.is_some_and(|watch| matches!(watch.state, Suspicion::Diagnosing(_)))
    }

    /// The job of a snapshot computes again: that was the moment of the image.
    pub fn image_frozen(&mut self) {
        let total = self.background.clock.total(clock::now());
        if let Some(watch) = &mut self.background.hang {
            watch.frozen_at = total;
        }
    }

    /// An image is durable, and the budget is about to be refilled.
    pub fn image_taken(&mut self, image: ImageId) {
        if let Some(watch) = &mut self.background.hang {
            let at = watch.frozen_at;
            if watch.images.len() == IMAGES_MAX {
                watch.images.pop_front();
            }
            let budget = self.budget;
            watch.images.push_back(Taken { image, at, budget });
        }
    }

    /// Goes on with a suspicion, once that is possible.
    pub fn follow_suspicion(&mut self) -> Result<(), RunError> {
        let stopping = self.is_stopping();
        let Some(watch) = &mut self.background.hang else {
            return Ok(());
        };
        // A snapshot under way is not cut short, for the driver's part of it must not be; and a debugger in the job
        // would spoil it.
        if let Stage::Running(Running { busy: Some(_), .. }) = &self.stage {
            return Ok(());
        }
        let lives = if let Stage::Running(Running {
            job,
            pause: None,
            ended: None,
            gone: false,
            ..
        }) = &self.stage
            && !stopping
        {
            Some(Arc::clone(job))
        } else {
            None
        };
        match (std::mem::replace(&mut watch.state, Suspicion::None), lives) {
            (Suspicion::None, _) => return Ok(()),
            (Suspicion::Diagnosing(suspect), _) => {
                watch.state = Suspicion::Diagnosing(suspect);
                return Ok(());
            }
            (Suspicion::Found(suspect), Some(job)) => {
                watch.state = Suspicion::Diagnosing(suspect);
                self.diagnose(suspect.finding, job);
                return Ok(());
            }
            (Suspicion::Verdict(suspect, log), Some(_)) => self.hangs(suspect, log.as_deref()),
            (Suspicion::Found(_) | Suspicion::Verdict(..), None) => {
                tracing::debug!("the job has ended, or is about to, before it was taken for hung");
            }
        }
        // What was asked for meanwhile.
        self.snapshot_when_idle()
    }

    fn hangs(&mut self, suspect: Suspect, log: Option<&Path>) {
        let action = self.context.config.hang.action;
        let reason = suspect.finding.to_string();
        let shown = log.map_or_else(|| "none".to_owned(), |log| log.display().to_string());
        let follows = match action {
            HangAction::Restore => "it is killed and restored",
            HangAction::Report => "it is left alone (hang.action)",
        };
        tracing::error!(log = %shown, "the job hangs, {reason}: {follows}");
        self.tell(history::Event::Hung {
            reason: reason.clone(),
            silent_seconds: suspect.finding.quiet.as_secs_f64(),
        });
        if action == HangAction::Restore {
            self.leave_out_images_since(suspect.since);
        }
        let mut facts = vec![("CKPT_RUN_REASON", reason.into())];
        facts.extend(log.map(|log| ("CKPT_RUN_DIAGNOSIS", log.into())));
        facts.extend(self.newest_fact());
        self.call_hook(Occasion::OnHang, facts);
        if let (HangAction::Restore, Stage::Running(running)) = (action, &self.stage) {
            self.budget.killed_for_fault();
            running.job.sandbox.kill();
        }
    }

    /// Images from the silence hold the hang: the run goes back behind them, or to the oldest, and its budget is what it
    /// was before them.
    fn leave_out_images_since(&mut self, since: Duration) {
        let taken = self.background.hang.as_ref().map(|watch| &watch.images);
        let taken: Vec<Taken> = taken.into_iter().flatten().copied().collect();
        let Some(first) = taken.iter().find(|taken| taken.at > since) else {
            return;
        };
        self.budget = first.budget;
        // Where all are from the silence, the oldest may be from its very beginning, before the hang.
        let all = self.available_or_none();
        let before = all.iter().copied().filter(|image| *image < first.image);
        let Some(newest) = before.max().or_else(|| all.first().copied()) else {
            return;
        };
        let images = self.context.store.images().unwrap_or_default();
        match self.state.go_back(newest, &images) {
            Ok(()) => {
                tracing::info!(back_to = %newest, "images from the silence are left out");
                self.remember();
            }
            Err(error) => tracing::debug!(%error, "images from the silence stay"),
        }
    }
}
