//! The observers of a run together: each notice goes to all of them.

use std::sync::Arc;

use tokio::sync::mpsc::Sender;

use super::journal::Journal;
use super::log_lines;
use super::metrics::Metrics;
use super::progress_line::{ProgressLine, report_computing};
use super::run_phase::State;
use super::run_status::Status;
use super::systemd::SystemdNotifier;
use crate::clock;
use crate::config::Config;
use crate::run::run_context::RunContext;
use crate::run::run_state::RunState;
use crate::run::running_job::SharedStreams;
use crate::supervisor::hooks::queue::Hooks;
use crate::supervisor::inbox::Message;
use crate::supervisor::notice::{Notice, Situation};
use crate::supervisor::policy::schedule::Moment;
use crate::sync::locked;

#[derive(Debug)]
pub(crate) struct Observers {
    context: Arc<RunContext>,
    pub journal: Journal,
    pub metrics: Metrics,
    pub systemd: SystemdNotifier,
    pub hooks: Hooks,
    display: Option<ProgressLine>,
    /// The state, and the time of its begin.
    pub since: (State, Moment),
}

impl Observers {
    /// Must be called inside the runtime.
    pub fn new(
        context: &Arc<RunContext>,
        state: &RunState,
        streams: &SharedStreams,
        inbox: &Sender<Message>,
        now: Moment,
    ) -> Self {
        let Config { log, metrics, .. } = &context.config;
        Self {
            context: Arc::clone(context),
            journal: Journal::open(
                context.store.path(),
                log.events.as_ref(),
                state.started_unix_ms,
            ),
            metrics: Metrics::start(metrics, inbox),
            systemd: SystemdNotifier::new(),
            hooks: Hooks::new(Arc::clone(context), inbox.clone()),
            display: ProgressLine::start(log.progress, &locked(streams), &context.ongoing),
            since: (State::Starting, now),
        }
    }

    pub fn notice(&mut self, run: u64, notice: &Notice) {
        log_lines::log(notice);
        match notice {
            Notice::Computing { freeze, took } => {
                report_computing(self.display.as_ref(), *freeze, *took);
            }
            Notice::HookEnded(ended) => {
                log_lines::hook_ended(ended, self.context.config.hooks.timeout);
            }
            // NVML would keep the GPUs awake.
            Notice::Paused(_) => self.context.nvml.release(),
            _ => {}
        }
        self.journal.notice(run, notice);
        self.systemd.notice(notice);
        self.hooks.notice(run, notice);
        self.metrics.news.notify_one();
    }

    /// Adds the observers' part to the status of the run. Adds no disk usage: that takes its time.
    pub fn status(&self, now: Moment, run: Status) -> Status {
        let (account, clock) = (&self.journal.account, self.journal.elapsed());
        let restored = account.comeback();
        let (state, since) = self.since;
        let since_seconds = now.monotonic.saturating_duration_since(since.monotonic);
        Status {
            state,
            since: Some(clock::timestamp_of(since.unix_ms)),
            since_seconds: Some(since_seconds.as_secs_f64()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            store: self.context.store.path().to_owned(),
            pid: Some(std::process::id()),
            uptime_seconds: Some(clock),
            restored: restored.map(|back| back.time),
            restored_seconds: restored.map(|back| back.seconds(clock)),
            restored_image: restored.map(|back| back.image.clone()),
            snapshots: account.freezes().cloned().collect(),
            failed_in_a_row: account.failed_in_a_row(),
            work_at_risk_seconds: Some(account.at_risk(clock)),
            progress: self.context.ongoing.now(),
            summary: account.summary(clock),
            ..run
        }
    }

    pub fn observe(&mut self, situation: &Situation, now: Moment) {
        if situation.state != self.since.0 {
            self.since = (situation.state, now);
        }
        self.systemd.observe(situation);
    }
}
