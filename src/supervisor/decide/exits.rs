//! Exits of the job: the remaining processes are killed, the output is delivered, and the next step is decided.

use std::time::Duration;

use super::action::Action;
use super::stage::{AfterEnd, AfterWait, Ending, Pause, Running, Stage};
use super::state_machine::Machine;
use crate::run::exit_code::SAVED;
use crate::run::run_state::Progress;
use crate::sandbox::{Ended, SandboxError};
use crate::supervisor::notice::Notice;
use crate::supervisor::policy::restart::{Decision, ExitStatus, Stopping, decide};

/// Longest wait before a restart over which a copier is kept ready: it takes up GPU memory.
const STANDBY_MAX: Duration = Duration::from_secs(5);

impl Machine {
    pub(super) fn job_ended(&mut self, report: Ended) {
        match &mut self.stage {
            Stage::Running(Running { ended, .. }) => *ended = Some(report),
            Stage::Restoring(restoring) => restoring.ended = Some(report),
            _ => return,
        }
        self.settle();
    }

    pub(super) fn gone(&mut self) {
        match &mut self.stage {
            Stage::Running(Running { gone, .. }) => *gone = true,
            Stage::Restoring(restoring) => restoring.gone = true,
            Stage::Ending(ending) => {
                ending.gone = true;
                return self.drain_when_quiet();
            }
            Stage::Starting => return self.fail(SandboxError::Gone.into()),
            Stage::Idle | Stage::Waiting { .. } | Stage::Over => return,
        }
        self.settle();
    }

    /// Ends a job whose root process has ended, once no snapshot of it is under way any more.
    pub(super) fn settle(&mut self) {
        let Stage::Running(running) = &self.stage else {
            return;
        };
        if running.busy.is_some() || running.is_whole() {
            return;
        }
        // Without a report, somebody killed pid 1 of the sandbox, and with it the job, or a lease expired that has been
        // renewed since.
        let killed = ExitStatus::Signaled(nix::libc::SIGKILL);
        let status = running.ended.map_or(killed, exit_status);
        let paused = matches!(running.pause, Some(Pause::Paused(_)));
        self.end_job(AfterEnd::Decide { status, paused });
    }

    /// Kills the rest of the job; `then` follows when it is gone.
    pub(super) fn end_job(&mut self, then: AfterEnd) {
        self.prepare_restore(then);
        let (gone, at_work) = match &self.stage {
            Stage::Running(running) => {
                let at_work = matches!(running.pause, Some(Pause::Ending(_)));
                (running.gone, at_work)
            }
            Stage::Starting => (false, false),
            Stage::Restoring(restoring) => (restoring.gone, restoring.at_work),
            // A job that has ended by itself stays what it is.
            Stage::Ending(Ending {
                then: AfterEnd::Decide { .. },
                ..
            })
            | Stage::Over => return,
            // It was killed already; the destination changes.
            Stage::Ending(ending) => {
                self.stage = Stage::Ending(Ending { then, ..*ending });
                return;
            }
            Stage::Idle | Stage::Waiting { .. } => (true, false),
        };
        let next = Stage::Ending(Ending {
            then,
            gone,
            at_work,
        });
        let last = std::mem::replace(&mut self.stage, next);
        if let Stage::Running(Running { busy, pause, .. }) = last {
            self.requeue(busy);
            if let Some(Pause::Paused(_)) = pause {
                self.act(Action::AbandonPause);
            }
        }
        if !gone {
            self.act(Action::Kill);
        }
        self.drain_when_quiet();
    }

    /// Kills the running job; what follows is decided as after any exit.
    pub(super) fn kill_job(&mut self) {
        if let Stage::Running(running) = &mut self.stage {
            running.killed = true;
            self.act(Action::Kill);
        }
    }

    /// Prepares a restore that is likely to follow.
    fn prepare_restore(&mut self, then: AfterEnd) {
        let AfterEnd::Decide {
            status,
            paused: false,
        } = then
        else {
            return;
        };
        if !status.is_success()
            && !self.is_stopping()
            && self.would_restore()
            && let Some(image) = self.newest()
        {
            self.act(Action::PrepareStandby(image));
        }
    }

    /// Delivers the output once every process is gone and no thread works on the job any more.
    pub(super) fn drain_when_quiet(&mut self) {
        if let Stage::Ending(Ending {
            gone: true,
            at_work: false,
            ..
        }) = self.stage
        {
            self.act(Action::Drain);
        }
    }

    /// Notes that the thread that worked on the dead job has ended.
    pub(super) fn work_ended(&mut self) {
        if let Stage::Ending(ending) = &mut self.stage {
            ending.at_work = false;
            self.drain_when_quiet();
        }
    }

    /// Continues when everything of the job is gone and delivered.
    pub(super) fn all_gone(&mut self) {
        let Stage::Ending(Ending { then, .. }) = self.stage else {
            return;
        };
        self.stage = Stage::Idle;
        self.revert_return();
        match then {
            AfterEnd::Exit(code, progress) => self.finish(code, progress),
            AfterEnd::NextImage { skip_newest } => self.after_failed_restore(skip_newest),
            AfterEnd::Decide { status, paused } => self.after(status, paused),
        }
    }

    /// Decides the next step after an exit of the job. A job that was paused is restored when it is unpaused: other
    /// programs may use its GPUs by now.
    pub(super) fn after(&mut self, status: ExitStatus, paused: bool) {
        if let Some(code) = self.requested_exit(status) {
            let progress = if status.is_success() {
                Progress::Finished
            } else {
                Progress::Saved
            };
            return self.finish(code, progress);
        }
        self.stopping = Stopping::No;
        self.attempts.job_ended(status);
        if !status.is_success() {
            self.notify(Notice::Crashed(status));
            self.state.failures = self.state.failures.saturating_add(1);
            self.adapt_interval();
        }
        let images = self.images_to_restore();
        let rules = &self.settings.restart;
        let decision = decide(status, rules, self.attempts.budget, images);
        let soon = matches!(decision, Decision::Restore { delay, .. } if delay <= STANDBY_MAX);
        if paused || !soon {
            self.act(Action::DismissStandby);
        }
        match decision {
            Decision::Finished { code } => self.finish(code, Progress::Finished),
            Decision::Restore { skip_newest, .. } if paused => {
                self.notify(Notice::PausedJobCrashed(status));
                self.wait(None, AfterWait::Restore { skip_newest });
                // A request may have arrived while the job ended.
                self.snapshot_when_idle();
            }
            Decision::Restore { skip_newest, delay } => {
                self.notify(Notice::RestoreDue(status, delay));
                self.wait(Some(delay), AfterWait::Restore { skip_newest });
            }
            Decision::StartAnew { delay } => {
                self.notify(Notice::RestartDue(status, delay));
                self.wait(Some(delay), AfterWait::StartAnew);
            }
            Decision::GiveUp { code, reason } => {
                let newest = self.newest();
                self.notify(Notice::GaveUp {
                    status: Some(status),
                    code,
                    reason: reason.to_string(),
                    newest,
                });
                self.finish(code, Progress::Failed { code });
            }
        }
    }

    /// Waits before the next attempt; without a delay, until a client unpauses the job.
    pub(super) fn wait(&mut self, delay: Option<Duration>, then: AfterWait) {
        let until = delay.map(|delay| self.now.monotonic() + delay);
        self.stage = Stage::Waiting { until, then };
    }

    /// Returns the exit code if the exit was requested and is no crash.
    fn requested_exit(&mut self, status: ExitStatus) -> Option<u8> {
        if !self.is_stopping() {
            return None;
        }
        let is_saved = matches!(self.stopping, Stopping::WhenSaved | Stopping::Until(_))
            && !status.is_success()
            && self.images_to_restore().all > 0;
        Some(if is_saved { SAVED } else { status.code() })
    }

    pub(super) fn would_restore(&mut self) -> bool {
        let crash = ExitStatus::Signaled(nix::libc::SIGKILL);
        let mut budget = self.attempts.budget;
        budget.ended(crash);
        let images = self.images_to_restore();
        let decision = decide(crash, &self.settings.restart, budget, images);
        matches!(decision, Decision::Restore { .. })
    }
}

fn exit_status(ended: Ended) -> ExitStatus {
    match ended {
        Ended::Exited(code) => ExitStatus::Exited(u8::try_from(code).unwrap_or(u8::MAX)),
        Ended::Signaled(signal) => ExitStatus::Signaled(signal),
    }
}
