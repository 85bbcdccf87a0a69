//! Stops of the run: SIGTERM, notices of clouds, SIGUSR2, `ckpt-run stop`, signals for the job, stops by the terminal.

use std::time::Duration;

use super::action::Action;
use super::stage::{AfterEnd, Ending, Pause, Reply, Running, Stage};
use super::state_machine::Machine;
use crate::run::exit_code::{SAVED, TERMINATED};
use crate::run::format::chain;
use crate::run::image_facts::Trigger;
use crate::run::run_state::Progress;
use crate::snapshot::take_snapshot::Afterwards;
use crate::supervisor::error::RunError;
use crate::supervisor::notice::Notice;
use crate::supervisor::policy::restart::Stopping;
use crate::supervisor::preemption::announcement::Announcement;

/// Two SIGTERM within this time are one: `timeout` sends it to its child and then to its process group.
const SAME_SIGNAL: Duration = Duration::from_millis(300);
/// Shortest time for the last snapshot after a notice. A cloud announces the earliest time, and a machine that still
/// works after it may have a few seconds more.
const NOTICE_MIN: Duration = Duration::from_secs(10);
/// Time for a killed job's last output to be delivered, once the run is to stop at once.
const DELIVERY_LIMIT: Duration = Duration::from_secs(5);

/// Refusal of a stop that would keep nothing.
const NO_IMAGE: &str = "the job does not run and has no image to continue from; SIGTERM to the supervisor ends the run";
/// Refusal of a stop after the job's own exit, whose exit code says how.
const ENDED: &str = "the job has just ended";

impl Machine {
    /// Handles SIGTERM: a snapshot and the end within the grace period; at the second one, the end at once.
    pub(super) fn terminate(&mut self) {
        let now = self.now.monotonic();
        if let Some(first) = self.terminated {
            if now.saturating_duration_since(first) >= SAME_SIGNAL {
                self.stop_now("a second SIGTERM");
            }
            return;
        }
        self.terminated = Some(now);
        self.stop_within(self.settings.snapshot.grace);
    }

    /// Handles the notice of a cloud that takes this machine back: as SIGTERM, before the announced time. SIGTERM may
    /// follow, when the machine shuts down.
    pub(super) fn preempted(&mut self, announcement: Announcement, left: Duration) {
        self.preemption = Some(announcement);
        self.notify(Notice::Preempted(announcement));
        let grace = self.settings.snapshot.grace;
        self.stop_within(left.max(NOTICE_MIN).min(grace));
    }

    /// Notes a SIGTERM after the job's end. Returns true if it comes from the shutdown that a cloud has announced.
    pub fn is_announced_shutdown(&mut self) -> bool {
        let is_first = self.terminated.replace(self.now.monotonic()).is_none();
        is_first && self.preemption.is_some()
    }

    /// Takes one more snapshot, then ends the run; ends it in any case after this time, or at an earlier end that was
    /// requested before.
    fn stop_within(&mut self, time: Duration) {
        let now = self.now.monotonic();
        let (end, is_new) = match self.stopping {
            Stopping::Until(end) => (end.min(now + time), false),
            Stopping::No | Stopping::ByTheJob(_) | Stopping::WhenSaved => (now + time, true),
        };
        self.stopping = Stopping::Until(end);
        if let Some(limit) = self.stopping.hook_limit(now) {
            self.act(Action::Hurry(limit));
        }
        if is_new {
            self.save_and_stop();
        }
    }

    /// Ends the run at once: another machine may run the job from now on.
    pub(super) fn lease_lost(&mut self, holder: Option<String>) {
        match self.stage {
            Stage::Starting | Stage::Running(_) | Stage::Restoring(_) => self.act(Action::Kill),
            Stage::Idle | Stage::Ending(_) | Stage::Waiting { .. } | Stage::Over => {}
        }
        self.fail(RunError::LeaseLost { holder });
    }

    /// Takes one more snapshot, then ends the run.
    pub(super) fn save_and_stop(&mut self) {
        match &self.stage {
            // A job that starts may have computed before the report of its start.
            Stage::Starting | Stage::Running(_) => {
                self.want(Trigger::Stop, Afterwards::Stop, None);
            }
            // How the job ended counts, once all it wrote is delivered.
            Stage::Ending(Ending {
                then: AfterEnd::Decide { .. } | AfterEnd::Exit(..),
                ..
            })
            | Stage::Over => {}
            // Nothing has computed since the newest image.
            Stage::Idle | Stage::Restoring(_) | Stage::Ending(_) | Stage::Waiting { .. } => {
                self.stop_now("no job runs");
            }
        }
    }

    /// Handles a client's request for one more snapshot and the end. If no job runs, nothing has computed since the
    /// newest image.
    pub(super) fn stop_requested(&mut self, reply: Reply) {
        let answer = match &self.stage {
            Stage::Starting | Stage::Running(_) => {
                self.end_when_saved();
                self.want(Trigger::Stop, Afterwards::Stop, Some(reply));
                return;
            }
            Stage::Ending(Ending {
                then: AfterEnd::Decide { .. },
                ..
            }) => Err(ENDED.to_owned()),
            Stage::Idle
            | Stage::Restoring(_)
            | Stage::Ending(_)
            | Stage::Waiting { .. }
            | Stage::Over => self.newest().ok_or_else(|| NO_IMAGE.to_owned()),
        };
        let stops = answer.is_ok();
        self.act(Action::AnswerSnapshot(reply, answer));
        if stops {
            self.end_when_saved();
            self.save_and_stop();
        }
    }

    /// Makes the job's exit a requested one from now on.
    pub(super) fn end_when_saved(&mut self) {
        if self.stopping == Stopping::No {
            self.stopping = Stopping::WhenSaved;
        }
    }

    /// Ends the job without another snapshot. A second call ends the run without a wait for anything.
    pub(super) fn stop_now(&mut self, why: &'static str) {
        match self.stage {
            Stage::Ending(Ending {
                then: AfterEnd::Exit(code, progress),
                ..
            }) => return self.finish(code, progress),
            Stage::Ending(Ending {
                then: AfterEnd::Decide { status, paused },
                ..
            }) => return self.after(status, paused),
            _ => {}
        }
        if let Stopping::Until(_) = self.stopping {
            self.stopping = Stopping::Until(self.now.monotonic() + DELIVERY_LIMIT);
        }
        let newest = self.newest();
        let newest = match self.now.images.list() {
            Ok(_) => Ok(newest),
            Err(error) => Err(chain(error)),
        };
        let code = if newest == Ok(None) {
            TERMINATED
        } else {
            SAVED
        };
        self.notify(Notice::StopsUnsaved { why, newest });
        self.end_job(AfterEnd::Exit(code, Progress::Saved));
    }

    /// Notes that a signal was meant for the job: its exit by it is no crash.
    pub(super) fn job_interrupted(&mut self) {
        if let Stopping::No | Stopping::ByTheJob(_) = self.stopping {
            self.stopping = Stopping::ByTheJob(self.now.monotonic());
        }
    }

    pub(super) fn forward(&mut self, signal: i32) {
        self.job_interrupted();
        match &self.stage {
            // A paused job cannot receive it, and nothing is lost.
            Stage::Running(Running { pause: Some(_), .. }) => {
                self.end_job(AfterEnd::Exit(SAVED, Progress::Saved));
            }
            Stage::Running(_) => self.act(Action::SignalJob(signal)),
            _ => {
                let code = u8::try_from(128 + signal).unwrap_or(u8::MAX);
                self.end_job(AfterEnd::Exit(code, Progress::Saved));
            }
        }
    }

    /// Returns true if an exit of the job would be a requested one.
    pub(super) fn is_stopping(&self) -> bool {
        let grace = self.settings.snapshot.grace;
        self.stopping.is_wanted(self.now.monotonic(), grace)
    }

    /// Stops the job and the supervisor, as the terminal requested; not during a snapshot, a start or a restore.
    pub(super) fn stop_self_when_idle(&mut self) {
        if !self.requests.stop_self {
            return;
        }
        let with_job = match &self.stage {
            Stage::Starting
            | Stage::Restoring(_)
            | Stage::Running(Running { busy: Some(_), .. }) => {
                return;
            }
            Stage::Running(running) => {
                !matches!(running.pause, Some(Pause::Paused(_) | Pause::Ending(_)))
            }
            Stage::Idle | Stage::Ending(_) | Stage::Waiting { .. } | Stage::Over => false,
        };
        self.requests.stop_self = false;
        self.act(Action::StopSelf { with_job });
    }

    /// Notes that the supervisor was stopped for this time: intervals do not count it.
    pub(super) fn continued(&mut self, stopped: Duration) {
        self.timer.skip(stopped);
        self.clock.skip(stopped);
        self.notify(Notice::Stopped(stopped));
    }
}
