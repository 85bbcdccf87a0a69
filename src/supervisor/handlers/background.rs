//! Background duties of the loop: the snapshot timer, hang detection, hooks and messages to systemd.
//!
//! The loop calls [`Supervisor::attend`] after each event, and passes on the timers and events of these parts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::Sender;

use super::snapshot_timer::Timing;
use crate::clock;
use crate::run::run_context::RunContext;
use crate::run::run_state::RunState;
use crate::run::running_job::{Job, SharedStreams};
use crate::supervisor::error::{RunError, system};
use crate::supervisor::event::Event;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::hang::detector::Sample;
use crate::supervisor::hang::watchdog::HangWatch;
use crate::supervisor::hooks::hook_command;
use crate::supervisor::hooks::queue::Hooks;
use crate::supervisor::observers::systemd::SystemdNotifier;
use crate::supervisor::policy::compute_clock::ComputeClock;
use crate::supervisor::policy::crash_progress::CrashProgress;
use crate::supervisor::stage::{Running, Stage};

/// Reports of the threads of these parts.
#[derive(Debug)]
pub(crate) enum News {
    /// A hook that was called has ended.
    HookEnded(hook_command::Ended),
    /// The hook of a snapshot that begins has ended; its thread goes on.
    BeforeSnapshotEnded(hook_command::Ended),
    /// A sample of this job was taken; `None` when it was just ending.
    Sampled(Arc<Job>, Option<Sample>),
    /// The stacks of a hung job are in this log.
    Diagnosed(Option<PathBuf>),
}

/// The state of these parts.
#[derive(Debug)]
pub(crate) struct Background {
    /// Computing time of the job under this supervisor.
    pub clock: ComputeClock,
    pub crash_progress: CrashProgress,
    pub timing: Timing,
    pub hooks: Hooks,
    /// The signs of a hang that are looked for, if any.
    pub hang: Option<HangWatch>,
    pub notifier: SystemdNotifier,
    /// The job of the snapshot under way computes again.
    released: bool,
}

impl Background {
    pub fn new(
        context: &RunContext,
        state: &RunState,
        streams: &SharedStreams,
        events: &Sender<Event>,
    ) -> Result<Self, RunError> {
        let chance = clock::random().map_err(system("get random bytes"))?;
        let (seed, _) = chance.split_first_chunk().unwrap_or((&[0; 8], &[]));
        Ok(Self {
            clock: ComputeClock::default(),
            crash_progress: CrashProgress::default(),
            timing: Timing::new(context, state, u64::from_le_bytes(*seed)),
            hooks: Hooks::default(),
            hang: HangWatch::new(&context.config.hang, &context.directory, streams, events),
            notifier: SystemdNotifier::new(),
            released: false,
        })
    }
}

impl Supervisor {
    /// An event was handled.
    pub fn attend(&mut self) -> Result<(), RunError> {
        let computes = self.is_computing();
        self.background.clock.set(computes, clock::now());
        self.follow_suspicion()?;
        self.tell_systemd(computes);
        Ok(())
    }

    /// The timer of these parts that runs out first.
    pub fn operation_wait(&self) -> Option<Duration> {
        let waits = [self.next_sample(), self.background.notifier.wait()];
        waits.into_iter().flatten().min()
    }

    /// Handles the end of that timer; [`Supervisor::attend`] follows.
    pub fn operation_timer(&mut self) {
        if self.next_sample().is_some_and(|left| left.is_zero()) {
            self.ask_for_sample();
        }
    }

    pub fn news(&mut self, news: News) {
        match news {
            News::HookEnded(ended) => self.called_hook_ended(&ended),
            News::BeforeSnapshotEnded(ended) => self.hook_ended(&ended),
            News::Sampled(job, sample) => self.sampled(&job, sample),
            News::Diagnosed(log) => self.diagnosed(log),
        }
    }

    /// A snapshot begins: from now on the job may stand still.
    pub fn freeze_begins(&mut self) {
        self.background.released = false;
    }

    /// The job of the snapshot under way computes again.
    pub fn freeze_ended(&mut self) {
        self.background.released = true;
        self.image_frozen();
    }

    /// Returns true if the job computes, as far as the supervisor knows: it is not dead, being restored, paused or
    /// frozen.
    fn is_computing(&self) -> bool {
        match &self.stage {
            Stage::Running(Running {
                busy,
                pause: None,
                ended: None,
                gone: false,
                ..
            }) => busy.is_none() || self.background.released,
            Stage::Running(_)
            | Stage::Idle
            | Stage::Starting(_)
            | Stage::Restoring(_)
            | Stage::Ending(_)
            | Stage::Waiting { .. } => false,
        }
    }
}
