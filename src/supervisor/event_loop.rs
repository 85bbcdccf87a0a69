//! The event loop: one task owns the state of the run, and everything else sends it events.
//!
//! ```text
//!            start                  snapshot (a thread of its own)
//!  Starting ───────▶ Running ◀────────────────────┐
//!                      │  └──────────────────────▶┘
//!                      │ the job ended, or was killed
//!                      ▼
//!                   Ending ── gone, output delivered ──▶ decide
//!                      ▲                                   │ restore        │ give up,
//!                      │ failed                            ▼                ▼ finished
//!                  Restoring ◀── Waiting (backoff) ◀───────┘              exit
//!                      └─────▶ Running
//! ```
//!
//! Policies are pure functions in `restart` and `schedule`; blocking work is in
//! `snapshot` and `restore`, on threads that report back with an event.

use std::collections::BTreeSet;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::control::server;
use super::error::{RunError, system};
use super::event::{EVENTS_MAX, Event, Timer};
use super::handlers::background::Background;
use super::handlers::failed_restores::RestoreProgress;
use super::handlers::signals;
use super::observers::journal::Journal;
use super::observers::keyboard::Keyboard;
use super::observers::metrics::Metrics;
use super::observers::progress_line::ProgressLine;
use super::observers::run_phase::State;
use super::policy::restart::Budget;
use super::policy::restart::Stopping;
use super::policy::schedule::{Now, Schedule, Snapshotted as LastSnapshot};
use super::stage::{Beginning, PendingSnapshot, Running, Stage, UnpauseReply};
use crate::clock;
use crate::gpu::resident::Standby;
use crate::history;
use crate::run::image_facts::Trigger;
use crate::run::machine;
use crate::run::run_context::RunContext;
use crate::run::run_state::RunState;
use crate::run::running_job::SharedStreams;
use crate::run::streams::Streams;
use crate::sandbox::{self};
use crate::snapshot::take_snapshot::Afterwards;
use crate::store::ImageId;
use crate::sync::locked;

/// The state of a run. Lives on the main thread.
pub(super) struct Supervisor {
    pub context: Arc<RunContext>,
    /// The copiers of the next snapshot and the next restore.
    pub standby: Arc<Standby>,
    pub streams: SharedStreams,
    pub state: RunState,
    pub stage: Stage,
    pub stopping: Stopping,
    pub wanted: Option<PendingSnapshot>,
    /// The client that has unpaused a job that is being restored.
    pub unpausing: Option<UnpauseReply>,
    pub budget: Budget,
    /// Images that could not be restored here and now, though they may be good.
    pub refused: BTreeSet<ImageId>,
    /// The one to go on from, and no other, until the job is back.
    pub chosen: Option<ImageId>,
    /// Images whose restore is not tried once more: it was.
    pub retried: BTreeSet<ImageId>,
    /// The image that the job was last restored from; `None` if it was started.
    pub restored_from: Option<ImageId>,
    pub restore: RestoreProgress,
    pub last: LastSnapshot,
    pub exit: Option<u8>,
    pub events: Sender<Event>,
    pub journal: Journal,
    pub metrics: Metrics,
    /// Number of the present sandbox; news from an older one is dropped.
    pub serial: u64,
    arrivals: Receiver<Event>,
    asking: server::Asking,
    pub schedule: Schedule,
    pub background: Background,
    /// Since when the state is what it is.
    pub since: (State, Now),
    /// A stop by the terminal that waits for the end of a snapshot.
    pub suspend_wanted: bool,
    /// The caller's terminal.
    pub keyboard: Keyboard,
    /// The progress line on the terminal.
    pub display: Option<ProgressLine>,
}

pub(super) fn now() -> Now {
    Now {
        monotonic: clock::now(),
        unix_ms: clock::unix_ms(),
    }
}

impl Supervisor {
    /// Must be called inside the runtime.
    pub fn new(
        context: Arc<RunContext>,
        streams: SharedStreams,
        state: RunState,
    ) -> Result<Self, RunError> {
        let (events, arrivals) = channel(EVENTS_MAX);
        signals::watch(&events).map_err(system("watch for signals"))?;
        let asking = server::listen(context.store.path(), events.clone())
            .map_err(system("listen on the control socket"))?;
        let journal = Journal::open(
            context.store.path(),
            context.config.log.events.as_ref(),
            state.started_unix_ms,
        );
        let metrics = Metrics::start(&context.config.metrics, &events);
        let keyboard = Keyboard::attach(&streams, &events);
        let display = {
            let streams = locked(&streams);
            ProgressLine::start(context.config.log.progress, &streams, &context.ongoing)
        };
        let schedule = Schedule::new(&context.config.snapshot, jiff::tz::TimeZone::system());
        let background = Background::new(&context, &state, &streams, &events)?;
        Ok(Self {
            context,
            standby: Arc::default(),
            streams,
            state,
            stage: Stage::Idle,
            stopping: Stopping::No,
            wanted: None,
            unpausing: None,
            budget: Budget::default(),
            refused: BTreeSet::new(),
            chosen: None,
            retried: BTreeSet::new(),
            restored_from: None,
            restore: RestoreProgress::default(),
            last: LastSnapshot::not_yet(now()),
            exit: None,
            events,
            journal,
            metrics,
            serial: 0,
            arrivals,
            asking,
            schedule,
            background,
            since: (State::Starting, now()),
            suspend_wanted: false,
            keyboard,
            display,
        })
    }

    /// Runs until there is an exit code.
    pub async fn run(&mut self, beginning: Beginning) -> Result<u8, RunError> {
        self.tell_opened();
        let result = self.run_to_exit(beginning).await;
        if let Err(error) = &result {
            self.on_error(error);
        }
        self.finish_hooks().await;
        self.tell_ended(&result);
        server::remove(self.context.store.path());
        // Who asked too late hears that the run has ended.
        self.arrivals.close();
        while self.arrivals.try_recv().is_ok() {}
        self.unpausing = None;
        self.asking.end().await;
        result
    }

    async fn run_to_exit(&mut self, beginning: Beginning) -> Result<u8, RunError> {
        self.adapt_interval();
        self.tell_systemd(false);
        match beginning {
            Beginning::Start => self.start()?,
            Beginning::Restore => self.resume_run()?,
            Beginning::RestoreThis(id) => self.restore_this(id)?,
        }
        self.note_state();
        self.attend()?;
        loop {
            if let Some(code) = self.exit {
                self.tell_systemd(false);
                return Ok(code);
            }
            let event = self.next_event().await;
            self.handle(event)?;
            self.note_state();
            self.attend_keyboard();
            self.attend()?;
        }
    }

    async fn next_event(&mut self) -> Event {
        match self.next_timer() {
            None => self.arrivals.recv().await.unwrap_or(Event::Drained),
            Some((wait, timer)) => tokio::select! {
                event = self.arrivals.recv() => event.unwrap_or(Event::Drained),
                () = tokio::time::sleep(wait) => Event::Timer(timer),
            },
        }
    }

    /// Returns the next event, without timers; `None` if none arrives within this time.
    pub async fn next_event_within(&mut self, limit: Duration) -> Option<Event> {
        let next = tokio::time::timeout(limit, self.arrivals.recv());
        next.await.ok().flatten()
    }

    /// The timer that runs out first.
    fn next_timer(&self) -> Option<(Duration, Timer)> {
        let until = |deadline: Instant| deadline.saturating_duration_since(clock::now());
        let schedule = match &self.stage {
            Stage::Running(Running {
                busy: None,
                pause: None,
                ended: None,
                ..
            }) if !self.is_suspect() => self.schedule_now().1,
            _ => None,
        };
        // What is wanted then waits for no schedule.
        let leaving = match &self.stage {
            Stage::Running(running) if running.ended.is_none() => running.leaving_for(),
            _ => None,
        };
        let backoff = match &self.stage {
            Stage::Waiting {
                until: deadline, ..
            } => deadline.map(until),
            _ => None,
        };
        let grace = match self.stopping {
            Stopping::Until(deadline) => Some(until(deadline)),
            Stopping::No | Stopping::ByTheJob(_) | Stopping::WhenSaved => None,
        };
        [
            (schedule.filter(|_| leaving.is_none()), Timer::Schedule),
            (leaving, Timer::Left),
            (backoff, Timer::Backoff),
            (grace, Timer::Grace),
            (self.keyboard.next_look(), Timer::Foreground),
            (self.operation_wait(), Timer::Background),
        ]
        .into_iter()
        .filter_map(|(wait, timer)| Some((wait?, timer)))
        .min_by_key(|(wait, _)| *wait)
    }

    fn handle(&mut self, event: Event) -> Result<(), RunError> {
        match event {
            Event::Signal(signal) => self.signal(signal),
            Event::Typed(key) => {
                self.typed(key);
                Ok(())
            }
            Event::SnapshotRequest(Afterwards::Stop, reply) => self.stop_asked(reply),
            Event::SnapshotRequest(afterwards, reply) => {
                self.want(Trigger::Request, afterwards, Some(reply))
            }
            Event::UnpauseRequest(reply) => self.unpause(reply),
            Event::StatusRequest(reply) => {
                let _ = reply.send(Box::new(self.status())); // a client that went away
                Ok(())
            }
            Event::Unpaused(result, reply) => self.unpaused(*result, reply),
            Event::Sandbox(serial, news) if serial == self.serial => self.sandbox_news(news),
            // The foreground is looked for after every event.
            Event::Sandbox(..) | Event::Timer(Timer::Foreground) => Ok(()),
            Event::Timer(Timer::Left) => self.snapshot_when_idle(),
            Event::Computing(freeze) => {
                self.say_computing(freeze);
                self.tell(history::Event::Computing {
                    freeze_seconds: freeze.as_secs_f64(),
                });
                self.freeze_ended();
                Ok(())
            }
            Event::SnapshotEnded(result) => {
                let handled = self.snapshot_ended(*result);
                machine::return_memory();
                handled
            }
            Event::RestoreEnded(result) => {
                let handled = self.restore_ended(*result);
                machine::return_memory();
                handled
            }
            Event::Drained => self.all_gone(),
            Event::Background(news) => {
                self.news(*news);
                Ok(())
            }
            Event::Timer(Timer::Schedule) => {
                if self.schedule_now().0.is_some_and(|left| left.is_zero()) {
                    return self.want(Trigger::Schedule, Afterwards::Continue, None);
                }
                Ok(())
            }
            Event::Timer(Timer::Backoff) => self.backoff_over(),
            Event::Timer(Timer::Background) => {
                self.operation_timer();
                Ok(())
            }
            Event::Timer(Timer::Grace) => self.stop_now("the grace period is over"),
        }
    }

    fn sandbox_news(&mut self, news: Option<sandbox::Event>) -> Result<(), RunError> {
        match news {
            Some(sandbox::Event::Started(pids)) => self.started(pids),
            Some(sandbox::Event::NotStarted(errno)) => self.not_started(errno),
            Some(sandbox::Event::Failed { operation, errno }) => {
                self.start_failed(operation, errno)
            }
            Some(sandbox::Event::JobEnded(ended)) => self.job_ended(ended),
            Some(sandbox::Event::Ready | sandbox::Event::ToolEnded(_)) => Ok(()),
            None => self.sandbox_gone(),
        }
    }

    pub fn streams(&self) -> MutexGuard<'_, Streams> {
        locked(&self.streams)
    }
}
