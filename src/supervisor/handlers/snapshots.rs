//! Handling of snapshots: requests, their begin, and the consequences of their end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::snapshot_timer;
use crate::clock;
use crate::history;
use crate::run::exit_code::{SAVED, TERMINATED};
use crate::run::format::{chain, seconds, size};
use crate::run::image_facts::Trigger;
use crate::run::run_state::Progress;
use crate::sandbox::Sandbox;
use crate::snapshot::disk_space;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::paused::Paused;
use crate::snapshot::take_snapshot::{self, Afterwards, Snapshotted, Subject};
use crate::supervisor::error::RunError;
use crate::supervisor::event::Event;
use crate::supervisor::event_loop::{Supervisor, now};
use crate::supervisor::policy::restart::Stopping;
use crate::supervisor::policy::schedule::Snapshotted as LastSnapshot;
use crate::supervisor::stage::{AfterEnd, Pause, PendingSnapshot, Reply, Running, Stage};

/// Time for a killed job's last output to be delivered, once we are to stop at once.
const DELIVERY_LIMIT: Duration = Duration::from_secs(5);

impl Supervisor {
    /// Asks for a snapshot. Those asked for while one is taken become one more.
    pub fn want(
        &mut self,
        trigger: Trigger,
        afterwards: Afterwards,
        reply: Option<Reply>,
    ) -> Result<(), RunError> {
        let wanted = self.wanted.get_or_insert_with(|| PendingSnapshot {
            trigger,
            afterwards,
            begun: None,
            replies: Vec::new(),
        });
        wanted.replies.extend(reply);
        if afterwards > wanted.afterwards {
            wanted.trigger = trigger;
            wanted.afterwards = afterwards;
        }
        self.snapshot_when_idle()
    }

    /// Begins the wanted snapshot if the job runs and no other is taken.
    pub fn snapshot_when_idle(&mut self) -> Result<(), RunError> {
        if let Some(image) = self.paused_image() {
            return self.answer_paused(image);
        }
        if self.is_being_diagnosed() {
            // A debugger may be in it.
            return Ok(());
        }
        let Stage::Running(
            running @ Running {
                busy: None,
                ended: None,
                ..
            },
        ) = &mut self.stage
        else {
            return Ok(());
        };
        if running.is_leaving() {
            return Ok(());
        }
        if self.wanted.is_some() && running.job.has_ended() {
            // No hook is to be called.
            running.leaving = Some(clock::now());
            return Ok(());
        }
        let Some(mut wanted) = self.wanted.take() else {
            return Ok(());
        };
        wanted.begun = Some(now());
        let (context, streams, job) = (
            Arc::clone(&self.context),
            Arc::clone(&self.streams),
            Arc::clone(&running.job),
        );
        let standby = Arc::clone(&self.standby);
        let (state, trigger) = (self.state.clone(), wanted.trigger);
        let (afterwards, events) = (wanted.afterwards, self.events.clone());
        running.busy = Some(wanted);
        self.tell(history::Event::SnapshotBegan {
            trigger: trigger.as_str().to_owned(),
        });
        self.freeze_begins();
        let before = self.before_snapshot(trigger, afterwards);
        let meter = self.background.timing.meter();
        let work = move || {
            let computing = |freeze| {
                snapshot_timer::job_released(&meter, &job);
                drop(events.blocking_send(Event::Computing(freeze)));
            };
            let subject = Subject {
                context: &context,
                standby: &standby,
                job: &job,
                streams: &streams,
                state: &state,
                trigger,
            };
            let take = AssertUnwindSafe(|| {
                if !before.allows() {
                    return Err(SnapshotError::Vetoed);
                }
                snapshot_timer::snapshot_begins(&meter, &job);
                take_snapshot::take(subject, afterwards, computing)
            });
            let result = catch_unwind(take).unwrap_or(Err(SnapshotError::Panicked));
            if !matches!(&result, Ok((_, Some(_)))) {
                job.left_alone();
            }
            if result.is_ok() {
                snapshot_timer::snapshot_ends(&meter, &job);
                disk_space::rotate(&context, &state);
            }
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::SnapshotEnded(Box::new(result)));
        };
        match thread::Builder::new()
            .name("snapshot".to_owned())
            .spawn(work)
        {
            Ok(_) => Ok(()),
            Err(error) => self.snapshot_ended(Err(SnapshotError::Prepare(error))),
        }
    }

    pub fn snapshot_ended(
        &mut self,
        result: Result<(Snapshotted, Option<Paused>), SnapshotError>,
    ) -> Result<(), RunError> {
        let Stage::Running(running) = &mut self.stage else {
            return Ok(());
        };
        let Some(wanted) = running.busy.take() else {
            return Ok(());
        };
        let ended = now();
        let failures = match &result {
            Ok(_) => 0,
            Err(SnapshotError::Vetoed) => self.last.failures,
            Err(_) => self.last.failures.saturating_add(1),
        };
        self.last = LastSnapshot {
            begun: wanted.begun.unwrap_or(ended),
            ended,
            failures,
        };
        match result {
            Ok((done, paused)) => {
                report(&done);
                if let Some(paused) = paused {
                    tracing::info!(
                        "paused: the job stands still, its GPUs are free; `ckpt-run unpause` lets it go on"
                    );
                    self.context.nvml.release();
                    running.pause = Some(Pause::Paused(done.id, Box::new(paused)));
                }
                let paused = running.pause.is_some();
                self.tell_snapshot(&done);
                if paused {
                    let image = done.id.to_string();
                    self.tell(history::Event::Paused { image });
                }
                self.image_taken(done.id);
                self.budget.image_taken();
                if self.is_new_ground() {
                    self.budget.refill();
                }
                self.refused.clear();
                self.retried.clear();
                self.learn_cost(&done);
                self.after_snapshot(&done);
                for reply in wanted.replies {
                    let _ = reply.send(Ok(done.id)); // a client that went away
                }
                if wanted.afterwards == Afterwards::Stop {
                    return self.end_job(AfterEnd::Exit(SAVED, Progress::Saved));
                }
            }
            Err(error) => self.snapshot_failed(wanted, &error),
        }
        self.suspend_when_idle();
        self.settle()?;
        self.snapshot_when_idle()
    }

    fn snapshot_failed(&mut self, wanted: PendingSnapshot, error: &SnapshotError) {
        let reason = chain(error);
        for reply in wanted.replies {
            let _ = reply.send(Err(reason.clone())); // a client that went away
        }
        let Stage::Running(running) = &mut self.stage else {
            return;
        };
        if matches!(error, SnapshotError::Ended) {
            running.leaving = Some(clock::now());
        }
        if running.ended.is_some() || running.gone || running.is_leaving() {
            tracing::info!("snapshot called off: the job ended during it");
            self.tell_snapshot_failed("ended", &reason, false);
            return;
        }
        if matches!(error, SnapshotError::Vetoed) {
            tracing::info!("no snapshot this time: {reason}");
            self.tell_snapshot_failed(error.kind().as_str(), &reason, true);
            return;
        }
        let sandbox = Arc::clone(&running.job.sandbox);
        let kind = error.kind().as_str();
        self.state.failed_snapshots += 1;
        self.state.last_failure = Some(kind.to_owned());
        self.remember();
        let doubtful = error.job_is_doubtful() && !self.is_stopping() && self.would_restore();
        let goes_on = !error.job_is_lost() && !doubtful;
        self.tell_snapshot_failed(kind, &reason, goes_on);
        if !goes_on {
            tracing::error!(
                kind,
                "snapshot failed, the job does not compute as before and is ended: {reason}"
            );
            sandbox.kill();
            return;
        }
        tracing::warn!(
            kind,
            failed = self.last.failures,
            "snapshot failed, the job goes on, older images are untouched: {reason}"
        );
        match (wanted.afterwards, self.stopping) {
            (Afterwards::Stop, Stopping::Until(_)) => {
                tracing::info!("sending SIGTERM to the job");
                tell(&sandbox, nix::libc::SIGTERM);
            }
            (Afterwards::Stop, _) => self.stopping = Stopping::No,
            (Afterwards::Continue | Afterwards::Pause, _) => {}
        }
    }

    /// SIGUSR2 or SIGTERM: one more snapshot, then the end.
    pub fn save_and_stop(&mut self) -> Result<(), RunError> {
        match &self.stage {
            Stage::Running(_) => self.want(Trigger::Stop, Afterwards::Stop, None),
            // How the job ended counts, once all it wrote is delivered.
            Stage::Ending(AfterEnd::Decide { .. } | AfterEnd::Exit(..)) => Ok(()),
            // Nothing has computed since the newest image.
            Stage::Idle
            | Stage::Starting(_)
            | Stage::Restoring(_)
            | Stage::Ending(AfterEnd::NextImage { .. })
            | Stage::Waiting { .. } => self.stop_now("no job runs"),
        }
    }

    /// Ends the job without another snapshot. Asked again, waits for nothing any more.
    pub fn stop_now(&mut self, why: &str) -> Result<(), RunError> {
        match self.stage {
            Stage::Ending(AfterEnd::Exit(code, progress)) => {
                self.finish(code, progress);
                return Ok(());
            }
            Stage::Ending(AfterEnd::Decide { status, paused }) => {
                self.after(status, paused);
                return Ok(());
            }
            Stage::Idle
            | Stage::Starting(_)
            | Stage::Running(_)
            | Stage::Restoring(_)
            | Stage::Ending(AfterEnd::NextImage { .. })
            | Stage::Waiting { .. } => {}
        }
        if let Stopping::Until(_) = self.stopping {
            self.stopping = Stopping::Until(clock::now() + DELIVERY_LIMIT);
        }
        let code = match self.available().map(|mut images| images.pop()) {
            Ok(Some(id)) => {
                tracing::warn!(image = %id, "stopping without a new image ({why}); the run goes on from the newest one");
                SAVED
            }
            Ok(None) => {
                tracing::warn!("stopping without an image ({why}); the run begins anew");
                TERMINATED
            }
            Err(error) => {
                tracing::warn!(
                    "stopping without a new image ({why}), and those that there are cannot be looked for: {}",
                    chain(&error)
                );
                SAVED
            }
        };
        self.end_job(AfterEnd::Exit(code, Progress::Saved))
    }

    /// A signal was meant for the job: its end by it is no crash.
    pub fn job_interrupted(&mut self) {
        if let Stopping::No | Stopping::ByTheJob(_) = self.stopping {
            self.stopping = Stopping::ByTheJob(clock::now());
        }
    }

    /// Passes a signal on; the job's end by it is no crash.
    pub fn forward(&mut self, signal: i32) -> Result<(), RunError> {
        self.job_interrupted();
        match &self.stage {
            // It cannot hear us, and nothing is lost.
            Stage::Running(Running { pause: Some(_), .. }) => {
                self.end_job(AfterEnd::Exit(SAVED, Progress::Saved))
            }
            Stage::Running(running) => {
                tell(&running.job.sandbox, signal);
                Ok(())
            }
            Stage::Idle
            | Stage::Starting(_)
            | Stage::Restoring(_)
            | Stage::Ending(_)
            | Stage::Waiting { .. } => {
                let code = u8::try_from(128 + signal).unwrap_or(u8::MAX);
                self.end_job(AfterEnd::Exit(code, Progress::Saved))
            }
        }
    }
}

/// Sends the job a signal. One that is just ending needs none.
fn tell(sandbox: &Sandbox, signal: i32) {
    if let Err(error) = sandbox.signal(signal, false) {
        tracing::debug!("the job could not be told: {}", chain(&error));
    }
}

fn report(done: &Snapshotted) {
    let phases: Vec<String> = done
        .facts
        .phases
        .iter()
        .map(|phase| format!("{} {:.3}", phase.name, phase.seconds))
        .collect();
    tracing::info!(
        image = %done.id,
        trigger = done.facts.trigger.as_str(),
        freeze = %seconds(done.freeze),
        durable = %seconds(done.total),
        raw = %size(done.raw_bytes),
        stored = %size(done.stored_bytes),
        phases = %phases.join(", "),
        "snapshot"
    );
}

/// Refusal of a stop that would keep nothing.
const NO_IMAGE: &str = "no job runs now, and there is no image to go on from later; SIGTERM to the supervisor ends the \
                        run all the same";
/// Its exit code says how.
const ENDED: &str = "the job has just ended by itself";

impl Supervisor {
    /// A client asks for one more snapshot and the end. Where no job runs, nothing has computed since the newest image.
    pub fn stop_asked(&mut self, reply: Reply) -> Result<(), RunError> {
        let answer = match &self.stage {
            Stage::Starting(_) | Stage::Running(_) => {
                self.end_when_saved();
                return self.want(Trigger::Stop, Afterwards::Stop, Some(reply));
            }
            Stage::Ending(AfterEnd::Decide { .. }) => Err(ENDED.to_owned()),
            Stage::Idle
            | Stage::Restoring(_)
            | Stage::Ending(AfterEnd::NextImage { .. } | AfterEnd::Exit(..))
            | Stage::Waiting { .. } => self.newest().ok_or_else(|| NO_IMAGE.to_owned()),
        };
        let stops = answer.is_ok();
        let _ = reply.send(answer); // a client that went away
        if !stops {
            return Ok(());
        }
        self.end_when_saved();
        self.save_and_stop()
    }

    /// The job's end is no crash from now on.
    pub fn end_when_saved(&mut self) {
        if self.stopping == Stopping::No {
            self.stopping = Stopping::WhenSaved;
        }
    }
}
