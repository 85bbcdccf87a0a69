//! Handling of the job's exit: the remaining processes are killed, the output is delivered, and then the next step is
//! decided.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::clock;
use crate::run::exit_code::SAVED;
use crate::run::format::{chain, seconds};
use crate::run::run_state::Progress;
use crate::sandbox::{Ended, SandboxError};
use crate::supervisor::error::{RunError, system};
use crate::supervisor::event::Event;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::policy::restart::Stopping;
use crate::supervisor::policy::restart::{Decision, ExitStatus, decide};
use crate::supervisor::stage::{AfterEnd, AfterWait, Pause, Running, Stage};
use crate::sync::locked;

/// Longest pause before a restart over which a copier is kept ready: it takes up GPU memory.
const STANDBY_MAX: Duration = Duration::from_secs(5);

impl Supervisor {
    pub fn job_ended(&mut self, ended: Ended) -> Result<(), RunError> {
        match &mut self.stage {
            Stage::Running(running) => {
                tracing::debug!(?ended, "the job has ended");
                running.ended = Some(ended);
                self.settle()
            }
            Stage::Restoring(restoring) => {
                restoring.ended = Some(ended);
                Ok(())
            }
            Stage::Idle | Stage::Starting(_) | Stage::Ending(_) | Stage::Waiting { .. } => Ok(()),
        }
    }

    pub fn sandbox_gone(&mut self) -> Result<(), RunError> {
        match &mut self.stage {
            Stage::Running(running) => {
                running.gone = true;
                self.settle()
            }
            Stage::Restoring(restoring) => {
                restoring.gone = true;
                Ok(())
            }
            Stage::Ending(_) => self.drain(),
            Stage::Starting(_) => Err(SandboxError::Gone.into()),
            Stage::Idle | Stage::Waiting { .. } => Ok(()),
        }
    }

    /// Ends a job whose root process has ended, once no snapshot of it is under way any more.
    pub fn settle(&mut self) -> Result<(), RunError> {
        let Stage::Running(Running {
            busy: None,
            pause,
            ended,
            gone,
            ..
        }) = &self.stage
        else {
            return Ok(());
        };
        let status = match (ended, gone) {
            (Some(ended), _) => exit_status(*ended),
            // Somebody killed pid 1, and with it the job.
            (None, true) => ExitStatus::Signaled(nix::libc::SIGKILL),
            (None, false) => return Ok(()),
        };
        let paused = matches!(pause, Some(Pause::Paused(..)));
        self.end_job(AfterEnd::Decide { status, paused })
    }

    /// Kills what is left of the job; `then` follows when it is gone.
    pub fn end_job(&mut self, then: AfterEnd) -> Result<(), RunError> {
        if matches!(then, AfterEnd::Decide { status, paused: false } if !status.is_success())
            && !self.is_stopping()
            && self.would_restore()
            && let Some(image) = self.newest()
        {
            self.standby.prepare(&self.context, image);
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Ending(then));
        let (sandbox, gone) = match stage {
            Stage::Running(running) => {
                let sandbox = Arc::clone(&running.job.sandbox);
                if let Some(pause) = running.pause {
                    pause.abandon();
                }
                (Some(sandbox), running.gone)
            }
            Stage::Starting(sandbox) => (Some(sandbox), false),
            Stage::Restoring(restoring) => (Some(restoring.sandbox), restoring.gone),
            // A job that has ended by itself stays what it is.
            Stage::Ending(decide @ AfterEnd::Decide { .. }) => {
                self.stage = Stage::Ending(decide);
                return Ok(());
            }
            // Already killed, only the destination changes.
            Stage::Ending(_) => return Ok(()),
            Stage::Idle | Stage::Waiting { .. } => (None, true),
        };
        if let Some(sandbox) = sandbox.filter(|_| !gone) {
            sandbox.kill();
            return Ok(());
        }
        self.drain()
    }

    /// Delivers what the dead job had written, and reverts the streams after a failed restore, on a thread: our own
    /// reader may be slow.
    pub fn drain(&mut self) -> Result<(), RunError> {
        if self.restore.drain_is_deferred() {
            return Ok(());
        }
        let (streams, events) = (Arc::clone(&self.streams), self.events.clone());
        let work = move || {
            let mut streams = locked(&streams);
            streams.disconnect_terminal();
            let (stdout, stderr) = (streams.stdout.drain(), streams.stderr.drain());
            drop(streams);
            stdout();
            stderr();
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::Drained);
        };
        thread::Builder::new()
            .name("drain".to_owned())
            .spawn(work)
            .map(drop)
            .map_err(system("start a thread"))
    }

    /// Everything of the job is gone and delivered.
    pub fn all_gone(&mut self) -> Result<(), RunError> {
        let Stage::Ending(then) = self.stage else {
            return Ok(());
        };
        self.stage = Stage::Idle;
        tracing::debug!("nothing of the job is left");
        self.revert_return();
        match then {
            AfterEnd::Exit(code, progress) => {
                self.finish(code, progress);
                Ok(())
            }
            AfterEnd::NextImage { skip_newest } => self.after_failed_restore(skip_newest),
            AfterEnd::Decide { status, paused } => {
                self.after(status, paused);
                Ok(())
            }
        }
    }

    /// Decides what follows on an end of the job. What was paused comes back when it is unpaused: its GPUs may be
    /// another's by now.
    pub fn after(&mut self, status: ExitStatus, paused: bool) {
        if let Some(code) = self.asked_to_end(status) {
            let progress = if status.is_success() {
                Progress::Finished
            } else {
                Progress::Saved
            };
            self.finish(code, progress);
            return;
        }
        self.stopping = Stopping::No;
        self.refused.clear();
        self.retried.clear();
        self.budget.ended(status);
        if !status.is_success() {
            if status != ExitStatus::Signaled(nix::libc::SIGKILL) {
                self.crashed_here();
            }
            self.tell_crashed(status);
            self.learn_failure();
        }
        let images = self.images_to_restore();
        let decision = decide(status, &self.context.config.restart, self.budget, images);
        let soon = matches!(decision, Decision::Restore { delay, .. } if delay <= STANDBY_MAX);
        if paused || !soon {
            self.standby.dismiss();
        }
        match decision {
            Decision::Finished { code } => {
                self.finish(code, Progress::Finished);
            }
            Decision::Restore { skip_newest, .. } if paused => {
                tracing::warn!(end = %status, "the paused job crashed; `ckpt-run unpause` restores it");
                self.stage = Stage::Waiting {
                    until: None,
                    then: AfterWait::Restore { skip_newest },
                };
            }
            Decision::Restore { skip_newest, delay } => {
                tracing::warn!(end = %status, wait = %seconds(delay), "the job crashed");
                self.stage = Stage::Waiting {
                    until: Some(clock::now() + delay),
                    then: AfterWait::Restore { skip_newest },
                };
            }
            Decision::StartAnew { delay } => {
                tracing::warn!(end = %status, wait = %seconds(delay), "the job ended; there is no image, it begins anew");
                self.stage = Stage::Waiting {
                    until: Some(clock::now() + delay),
                    then: AfterWait::StartAnew,
                };
            }
            Decision::GiveUp { code, reason } => {
                tracing::error!(end = %status, "giving up: {reason}");
                self.on_give_up(code, reason.to_string());
                self.finish(code, Progress::Failed { code });
            }
        }
    }

    /// The exit code, when the end was asked for and is no crash.
    fn asked_to_end(&self, status: ExitStatus) -> Option<u8> {
        match self.stopping {
            _ if !self.is_stopping() => None,
            Stopping::No | Stopping::ByTheJob(_) => Some(status.code()),
            Stopping::WhenSaved | Stopping::Until(_)
                if status.is_success() || self.images_at_least() == 0 =>
            {
                Some(status.code())
            }
            Stopping::WhenSaved | Stopping::Until(_) => Some(SAVED),
        }
    }

    /// Returns true if an exit of the job would be a requested one.
    pub fn is_stopping(&self) -> bool {
        self.stopping
            .is_wanted(clock::now(), self.context.config.snapshot.grace)
    }

    /// Returns true if a crash now would be followed by a restore.
    pub fn would_restore(&self) -> bool {
        let crash = ExitStatus::Signaled(nix::libc::SIGKILL);
        let mut budget = self.budget;
        budget.ended(crash);
        let images = self.images_to_restore();
        let decision = decide(crash, &self.context.config.restart, budget, images);
        matches!(decision, Decision::Restore { .. })
    }

    pub fn finish(&mut self, code: u8, progress: Progress) {
        self.state.progress = progress;
        self.remember();
        self.exit = Some(code);
    }

    /// Writes the run's state down. On a full disk the job matters more: the state that is there stays.
    pub fn remember(&self) {
        if let Err(error) = self.state.save(self.context.store.path()) {
            tracing::warn!("cannot remember how far the run is: {}", chain(&error));
        }
    }
}

fn exit_status(ended: Ended) -> ExitStatus {
    match ended {
        Ended::Exited(code) => ExitStatus::Exited(u8::try_from(code).unwrap_or(u8::MAX)),
        Ended::Signaled(signal) => ExitStatus::Signaled(signal),
    }
}
