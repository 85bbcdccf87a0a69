//! Notifications to systemd for a run that it started (`Type=notify`): the job computes, the current operation, the
//! watchdog, more time for the last snapshot or a restore, the end of the run. Without systemd, nothing is sent.
//!
//! The loop itself sends the watchdog messages, so systemd notices a loop that hangs.

use std::time::{Duration, Instant};

use sd_notify::NotifyState;

use crate::clock;
use crate::store::ImageId;
use crate::supervisor::notice::{Notice, Situation};

/// Interval of requests for more time. A loop that hangs for the requested time is to be killed.
const EXTEND_PERIOD: Duration = Duration::from_secs(10);
const EXTENSION: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct SystemdNotifier {
    on: bool,
    /// Time between two watchdog messages.
    watchdog: Option<Duration>,
    next_sign: Instant,
    next_extension: Option<Instant>,
    ready: bool,
    stopping: bool,
    status: String,
    image: Option<ImageId>,
}

impl SystemdNotifier {
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

    /// Notes the newest image, for the status text.
    pub fn notice(&mut self, notice: &Notice) {
        match notice {
            Notice::Snapshot(done) => self.image = Some(done.id),
            Notice::Restored { image, .. } => self.image = Some(*image),
            _ => {}
        }
    }

    /// Returns the time until the next message that no event causes.
    pub fn wait(&self) -> Option<Duration> {
        if !self.on {
            return None;
        }
        let sign = self.watchdog.map(|_| self.next_sign);
        let due = sign.into_iter().chain(self.next_extension).min()?;
        Some(due.saturating_duration_since(clock::now()))
    }

    /// Sends what has changed, and what is due.
    pub fn observe(&mut self, state: &Situation) {
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
        let status = state.words.clone().unwrap_or_else(|| {
            self.image.map_or_else(
                || "computing, no image yet".to_owned(),
                |image| format!("computing, newest image {image}"),
            )
        });
        if status != self.status {
            self.status = status;
            states.push(NotifyState::Status(&self.status));
        }
        if !states.is_empty()
            && let Err(error) = sd_notify::notify(&states)
        {
            tracing::debug!(%error, "cannot notify systemd");
        }
    }
}
