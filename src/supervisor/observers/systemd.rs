//! Notifications to systemd for a run that it started (`Type=notify`): the job computes, the current operation, the
//! watchdog, more time for the last snapshot or a restore, the end of the run. Without systemd, nothing is sent.
//!
//! The loop itself sends the watchdog messages, so systemd notices a loop that hangs.

use std::time::{Duration, Instant};

use sd_notify::NotifyState;

use crate::clock;
use crate::store::ImageId;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::policy::restart::Stopping;
use crate::supervisor::stage::{AfterEnd, Pause, Running, Stage};

/// Interval of requests for more time. A loop that hangs for the requested time is to be killed.
const EXTEND_PERIOD: Duration = Duration::from_secs(10);
const EXTENSION: Duration = Duration::from_secs(60);

/// The conversation.
#[derive(Debug)]
pub(crate) struct SystemdNotifier {
    /// Somebody listens.
    on: bool,
    /// Time between two signs of life.
    watchdog: Option<Duration>,
    next_sign: Instant,
    next_extension: Option<Instant>,
    ready: bool,
    stopping: bool,
    status: String,
    image: Option<ImageId>,
}

impl SystemdNotifier {
    /// Reads the environment.
    pub fn new() -> Self {
        let on = std::env::var_os("NOTIFY_SOCKET").is_some_and(|socket| !socket.is_empty());
        let watchdog = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero());
        Self {
            on,
            watchdog: watchdog.map(|limit| limit / 2),
            next_sign: clock::now(),
            next_extension: None,
            ready: false,
            stopping: false,
            status: String::new(),
            image: None,
        }
    }

    /// The newest image, for people.
    pub fn image(&mut self, id: ImageId) {
        self.image = Some(id);
    }

    /// Time until there is something to say by itself.
    pub fn wait(&self) -> Option<Duration> {
        if !self.on {
            return None;
        }
        let sign = self.watchdog.map(|_| self.next_sign);
        let due = sign.into_iter().chain(self.next_extension).min()?;
        Some(due.saturating_duration_since(clock::now()))
    }

    fn say(states: &[NotifyState<'_>]) {
        if !states.is_empty()
            && let Err(error) = sd_notify::notify(states)
        {
            tracing::debug!(%error, "systemd could not be told");
        }
    }

    /// Says what has changed, and what is due.
    fn tell(&mut self, state: &State) {
        if !self.on {
            return;
        }
        let now = clock::now();
        let mut states = Vec::new();
        if state.computes && !std::mem::replace(&mut self.ready, true) {
            states.push(NotifyState::Ready);
        }
        if state.ends && !std::mem::replace(&mut self.stopping, true) {
            states.push(NotifyState::Stopping);
        }
        if self.watchdog.is_some() && now >= self.next_sign {
            states.push(NotifyState::Watchdog);
            self.next_sign = now + self.watchdog.unwrap_or_default();
        }
        if !state.is_slow {
            self.next_extension = None;
        } else if self.next_extension.is_none_or(|due| now >= due) {
            let micros = u32::try_from(EXTENSION.as_micros()).unwrap_or(u32::MAX);
            states.push(NotifyState::ExtendTimeoutUsec(micros));
            self.next_extension = Some(now + EXTEND_PERIOD);
        }
        if state.status != self.status {
            self.status.clone_from(&state.status);
            states.push(NotifyState::Status(&state.status));
        }
        Self::say(&states);
    }
}

/// The notified state of a run.
struct State {
    /// The job computes.
    computes: bool,
    /// The run will end, whatever happens.
    ends: bool,
    /// True if the work under way may take any time.
    is_slow: bool,
    status: String,
}

impl Supervisor {
    /// Tells systemd what it does not know yet.
    pub fn tell_systemd(&mut self, computes: bool) {
        if !self.background.notifier.on {
            return;
        }
        let image = self.background.notifier.image;
        let state = State {
            computes,
            ends: self.will_end(),
            is_slow: self.is_slow(),
            status: status(&self.stage, self.stopping, image),
        };
        self.background.notifier.tell(&state);
    }

    fn will_end(&self) -> bool {
        let by_us = matches!(self.stage, Stage::Ending(AfterEnd::Exit(..)));
        self.exit.is_some() || by_us || matches!(self.stopping, Stopping::Until(_))
    }

    /// A start, a restore, or the last snapshot and what follows it.
    fn is_slow(&self) -> bool {
        let stops = match self.stopping {
            Stopping::No | Stopping::ByTheJob(_) => false,
            Stopping::WhenSaved | Stopping::Until(_) => true,
        };
        stops
            || self.exit.is_some()
            || match &self.stage {
                Stage::Idle | Stage::Starting(_) | Stage::Restoring(_) | Stage::Ending(_) => true,
                Stage::Running(_) | Stage::Waiting { .. } => false,
            }
    }
}

/// The run in a few words.
fn status(stage: &Stage, stopping: Stopping, image: Option<ImageId>) -> String {
    match stage {
        Stage::Idle => "looking for images".to_owned(),
        Stage::Starting(_) => "starting the job".to_owned(),
        Stage::Restoring(restoring) => format!("restoring image {}", restoring.id),
        Stage::Ending(_) => "the job has ended".to_owned(),
        Stage::Waiting { until: None, .. } => "paused; the job is restored then".to_owned(),
        Stage::Waiting { until: Some(_), .. } => "waiting before the job is restored".to_owned(),
        Stage::Running(Running {
            pause: Some(pause), ..
        }) => match pause {
            Pause::Paused(image, _) => format!("paused at image {image}"),
            Pause::Ending(image) => format!("going on from image {image}"),
        },
        Stage::Running(Running { busy: Some(_), .. }) => match stopping {
            Stopping::WhenSaved | Stopping::Until(_) => "taking the last snapshot".to_owned(),
            Stopping::No | Stopping::ByTheJob(_) => "computing, a snapshot is taken".to_owned(),
        },
        Stage::Running(_) => image.map_or_else(
            || "computing, no image yet".to_owned(),
            |image| format!("computing, newest image {image}"),
        ),
    }
}
