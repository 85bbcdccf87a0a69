//! The state of a run, and what each event leads to.
//!
//! ```text
//!            start                  snapshot
//!  Starting ───────▶ Running ◀────────────────────┐
//!                      │  └──────────────────────▶┘
//!                      │ the job ended, or was killed
//!                      ▼
//!                   Ending ── gone, output delivered ──▶ decide
//!                      ▲                                   │ restore        │ give up,
//!                      │ failed                            ▼                ▼ finished
//!                  Restoring ◀── Waiting (backoff) ◀───────┘              Over
//!                      └─────▶ Running
//! ```

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::action::Action;
use super::event::{Event, Now, Timer};
use super::restores::Attempts;
use super::snapshot_timer::SnapshotTimer;
use super::stage::{
    AfterEnd, Beginning, Pause, Running, Snapshotting, Stage, UnpauseReply, Wanted,
};
use super::suspicion::HangCase;
use crate::config::Config;
use crate::run::format::chain;
use crate::run::image_facts::Trigger;
use crate::run::run_state::{Progress, RunState};
use crate::snapshot::take_snapshot::Afterwards;
use crate::store::ImageId;
use crate::supervisor::error::RunError;
use crate::supervisor::notice::{Notice, Situation};
use crate::supervisor::observers::run_phase::State;
use crate::supervisor::observers::run_status::{Status, after, beginning};
use crate::supervisor::policy::compute_clock::ComputeClock;
use crate::supervisor::policy::restart::{Stopping, restarts_left};
use crate::supervisor::policy::schedule::Moment;
use crate::supervisor::preemption::announcement::Announcement;

/// The decisions of a run, and the state that they depend on.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(super) settings: Config,
    /// The run, as the store has it.
    pub(super) state: RunState,
    pub(super) stage: Stage,
    pub(super) stopping: Stopping,
    /// Time of the first SIGTERM.
    pub(super) terminated: Option<Instant>,
    /// The notice of the cloud that takes this machine back.
    pub(super) preemption: Option<Announcement>,
    pub(super) requests: Requests,
    pub(super) attempts: Attempts,
    pub(super) timer: SnapshotTimer,
    /// Computing time of the job under this supervisor.
    pub(super) clock: ComputeClock,
    pub(super) hang: HangCase,
    /// The images from which the run could continue when the store was last read: the status reads nothing.
    pub(super) last_available: Vec<ImageId>,
    pub(super) now: Now,
    /// Actions of the present event.
    actions: Vec<Action>,
}

/// Requests that wait for the job.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// The next snapshot; those requested while one is taken become one more.
    pub snapshot: Option<Wanted>,
    /// The client that is unpausing the job.
    pub unpause: Option<UnpauseReply>,
    /// True if the terminal requested a stop that waits for the end of a snapshot.
    pub stop_self: bool,
}

impl Machine {
    /// Makes the machine of a run. `seed` is a random number.
    pub fn new(settings: Config, state: RunState, seed: u64, now: Now) -> Self {
        let images = now.images.list_or_none();
        Self {
            timer: SnapshotTimer::new(&settings.snapshot, &state, images, seed, now.at),
            settings,
            state,
            stage: Stage::Idle,
            stopping: Stopping::No,
            terminated: None,
            preemption: None,
            requests: Requests::default(),
            attempts: Attempts::default(),
            clock: ComputeClock::default(),
            hang: HangCase::default(),
            last_available: Vec::new(),
            now,
            actions: Vec::new(),
        }
    }

    /// Decides about an event. The actions have to be carried out in order, before the next event.
    pub fn on(&mut self, event: Event, now: Now) -> Vec<Action> {
        self.now = now;
        if !matches!(self.stage, Stage::Over) {
            self.decide(event);
            self.clock.set(self.is_computing(), self.now.monotonic());
            self.follow_suspicion();
        }
        std::mem::take(&mut self.actions)
    }

    fn decide(&mut self, event: Event) {
        match event {
            Event::Begin(beginning) => self.begin(beginning),
            Event::Signal(signal) => self.signal(signal),
            Event::Preempted(announcement, left) => self.preempted(announcement, left),
            Event::Interrupted => self.job_interrupted(),
            Event::LeaseLost(holder) => self.lease_lost(holder),
            Event::SnapshotRequest(Afterwards::Stop, reply) => self.stop_requested(reply),
            Event::SnapshotRequest(afterwards, reply) => {
                self.want(Trigger::Request, afterwards, Some(reply));
            }
            Event::UnpauseRequest(reply) => self.unpause(reply),
            Event::Started(pid) => self.started(pid),
            Event::Leaving => self.leaving(),
            Event::JobEnded(ended) => self.job_ended(ended),
            Event::Gone => self.gone(),
            Event::Computing(freeze) => self.computes_again(freeze),
            Event::SnapshotEnded(end) => self.snapshot_ended(*end),
            Event::NewGround => self.attempts.budget.refill(),
            Event::Fit => self.fit(),
            Event::Unfit(error) => self.unfit(*error),
            Event::SetAside { done } => self.image_set_aside(done),
            Event::RestoreEnded(result) => self.restore_ended(*result),
            Event::Room(lacking) => self.room(lacking),
            Event::Unpaused(result) => self.unpaused(result),
            Event::Drained => self.all_gone(),
            Event::Suspected(suspect) => self.suspected(suspect),
            Event::Diagnosed(suspect, log) => self.diagnosed(suspect, log),
            Event::Continued(stopped) => self.continued(stopped),
            Event::Timer(timer) => self.timer_expired(timer),
        }
    }

    fn begin(&mut self, beginning: Beginning) {
        self.adapt_interval();
        match beginning {
            Beginning::Start => self.start(),
            Beginning::Restore => self.resume_run(),
            Beginning::RestoreThis(id) => self.restore_this(id),
        }
    }

    fn signal(&mut self, signal: Signal) {
        match signal {
            Signal::SIGUSR1 => self.want(Trigger::Signal, Afterwards::Continue, None),
            Signal::SIGUSR2 => {
                self.end_when_saved();
                self.save_and_stop();
            }
            Signal::SIGTERM => self.terminate(),
            Signal::SIGTSTP => {
                self.requests.stop_self = true;
                self.stop_self_when_idle();
            }
            Signal::SIGCONT => {
                self.requests.stop_self = false;
                self.act(Action::AttachTerminal);
            }
            Signal::SIGWINCH => self.act(Action::ResizeTerminal),
            for_the_job => self.forward(for_the_job as i32),
        }
    }

    fn timer_expired(&mut self, timer: Timer) {
        match timer {
            Timer::Schedule => {
                if self
                    .timer
                    .next(self.now.at)
                    .is_some_and(|left| left.is_zero())
                {
                    self.want(Trigger::Schedule, Afterwards::Continue, None);
                }
            }
            Timer::Backoff => self.backoff_over(),
            Timer::Grace => self.stop_now("the grace period is over"),
            Timer::Left => self.snapshot_when_idle(),
        }
    }

    pub fn next_timer(&self, now: Moment) -> Option<(Duration, Timer)> {
        let left = |deadline: Instant| deadline.saturating_duration_since(now.monotonic);
        let (mut schedule, mut leaving, mut backoff) = (None, None, None);
        match &self.stage {
            Stage::Running(running) if running.ended.is_none() => {
                leaving = running.leaving_for(now.monotonic);
                let idle = running.may_begin_snapshot(now.monotonic) && running.pause.is_none();
                if idle && self.requests.snapshot.is_none() && !self.is_suspect() {
                    schedule = self.timer.wait(now);
                }
            }
            Stage::Waiting { until, .. } => backoff = until.map(left),
            _ => {}
        }
        let grace = match self.stopping {
            Stopping::Until(deadline) if !self.is_over() => Some(left(deadline)),
            _ => None,
        };
        [
            (schedule, Timer::Schedule),
            (leaving, Timer::Left),
            (backoff, Timer::Backoff),
            (grace, Timer::Grace),
        ]
        .into_iter()
        .filter_map(|(wait, timer)| Some((wait?, timer)))
        .min_by_key(|(wait, _)| *wait)
    }

    pub(super) fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    pub(super) fn notify(&mut self, notice: Notice) {
        self.act(Action::Notify(notice));
    }

    pub(super) fn finish(&mut self, code: u8, progress: Progress) {
        self.state.progress = progress;
        self.stage = Stage::Over;
        self.act(Action::Save);
        self.act(Action::Exit(code));
    }

    pub(super) fn fail(&mut self, error: RunError) {
        if let RunError::NothingRestorable | RunError::NoRoom(_) = error {
            let newest = self.newest();
            self.notify(Notice::GaveUp {
                status: None,
                code: error.exit_code(),
                reason: chain(&error),
                newest,
            });
        }
        self.stage = Stage::Over;
        self.act(Action::Fail(error));
    }

    /// Returns the time by which a stop must be complete, if there is one.
    pub fn stop_deadline(&self) -> Option<Instant> {
        match self.stopping {
            Stopping::Until(deadline) => Some(deadline),
            Stopping::No | Stopping::ByTheJob(_) | Stopping::WhenSaved => None,
        }
    }

    pub fn state(&self) -> &RunState {
        &self.state
    }

    /// Returns true if the user chose an image and it has not run.
    pub fn has_chosen_image(&self) -> bool {
        self.attempts.chosen.is_some()
    }

    /// Returns the job's computing time under this supervisor.
    pub fn computed(&self, now: Instant) -> Duration {
        self.clock.total(now)
    }

    /// Drops the requests that the run's end left unanswered.
    pub fn close(&mut self) {
        self.stage = Stage::Over;
        self.requests = Requests::default();
    }

    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// Returns true if the job runs, is paused or has just exited.
    pub fn is_running(&self) -> bool {
        matches!(self.stage, Stage::Running(_))
    }

    /// Returns true if the job computes, as far as the supervisor knows.
    pub fn is_computing(&self) -> bool {
        match &self.stage {
            Stage::Running(running)
                if running.is_whole() && running.pause.is_none() && !running.killed =>
            {
                running.busy.as_ref().is_none_or(|busy| busy.released)
            }
            _ => false,
        }
    }

    /// Returns the machine's part of the run's status. It reads nothing: a status must not delay the loop.
    pub fn status(&self, now: Moment) -> Status {
        let next_snapshot = self.timer.next(now);
        let next_snapshot = next_snapshot.filter(|_| self.phase() == State::Running);
        let next_restart = match self.stage {
            Stage::Waiting { until, .. } => until,
            _ => None,
        };
        let (rules, budget) = (&self.settings.restart, self.attempts.budget);
        Status {
            command: beginning(&self.state.command.shown()),
            run: Some(self.state.started_unix_ms),
            next_snapshot: next_snapshot.and_then(|wait| after(now, wait)),
            next_snapshot_seconds: next_snapshot.map(|wait| wait.as_secs_f64()),
            interval_seconds: self.timer.interval(now).map(|time| time.as_secs_f64()),
            next_restart_seconds: next_restart
                .map(|until| until.saturating_duration_since(now.monotonic).as_secs_f64()),
            restarts_used: Some(budget.restarts),
            restarts_left: restarts_left(rules, budget, self.last_images_to_restore()),
            preemption: self.preemption,
            ..Status::default()
        }
    }

    pub fn may_read_keys(&self) -> bool {
        matches!(&self.stage, Stage::Running(running) if running.pause.is_none() && running.ended.is_none())
    }

    pub fn situation(&self) -> Situation {
        let stops = matches!(self.stopping, Stopping::WhenSaved | Stopping::Until(_));
        let ending = matches!(&self.stage, Stage::Ending(ending) if matches!(ending.then, AfterEnd::Exit(..)));
        let is_slow = match &self.stage {
            Stage::Running(_) | Stage::Waiting { .. } => stops,
            _ => true,
        };
        Situation {
            state: self.phase(),
            computes: self.is_computing(),
            ends: self.is_over() || ending || matches!(self.stopping, Stopping::Until(_)),
            is_slow,
            words: self.words(stops),
        }
    }

    fn phase(&self) -> State {
        match &self.stage {
            Stage::Starting => State::Starting,
            Stage::Running(running) if !running.is_whole() => State::Ending,
            Stage::Running(Running { busy: Some(_), .. }) => State::Snapshotting,
            Stage::Running(Running { pause: Some(_), .. }) | Stage::Waiting { until: None, .. } => {
                State::Paused
            }
            Stage::Running(_) => State::Running,
            Stage::Restoring(_) => State::Restoring,
            Stage::Waiting { until: Some(_), .. } => State::Waiting,
            Stage::Ending(_) | Stage::Idle | Stage::Over => State::Ending,
        }
    }

    fn words(&self, stops: bool) -> Option<String> {
        Some(match &self.stage {
            Stage::Idle => "looking for images".to_owned(),
            Stage::Starting => "starting the job".to_owned(),
            Stage::Restoring(restoring) => format!("restoring image {}", restoring.id),
            Stage::Ending(_) | Stage::Over => "the job has ended".to_owned(),
            Stage::Waiting { until: None, .. } => "paused; an unpause restores the job".to_owned(),
            Stage::Waiting { .. } => "waiting before the job is restored".to_owned(),
            Stage::Running(Running {
                pause: Some(pause), ..
            }) => match pause {
                Pause::Paused(image) => format!("paused at image {image}"),
                Pause::Ending(image) => format!("continuing from image {image}"),
            },
            Stage::Running(Running {
                busy: Some(Snapshotting { .. }),
                ..
            }) if stops => "taking the last snapshot".to_owned(),
            Stage::Running(Running { busy: Some(_), .. }) => {
                "computing, a snapshot is taken".to_owned()
            }
            Stage::Running(_) => return None,
        })
    }
}
