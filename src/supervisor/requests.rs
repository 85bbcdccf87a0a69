//! The loop's snapshots: who asked, when it may begin, what its end means.

use std::sync::Arc;
use std::thread;

use super::describe::{chain, seconds, size};
use super::event::{Event, Reply};
use super::image::Trigger;
use super::run::{RunError, system};
use super::run_state::Progress;
use super::schedule::Snapshotted as LastSnapshot;
use super::snapshot::{self, Afterwards, SnapshotError, Snapshotted};
use super::supervise::{AfterEnd, Running, Stage, Stopping, Supervisor, Wanted, now};

/// Exit code: saved and stopped, run the same line again.
const SAVED: u8 = 75;
/// Exit code of a job that SIGTERM ended.
const TERMINATED: u8 = 128 + 15;

impl Supervisor {
    /// Asks for a snapshot. Those asked for while one is taken become one more.
    pub fn want(
        &mut self,
        trigger: Trigger,
        afterwards: Afterwards,
        reply: Option<Reply>,
    ) -> Result<(), RunError> {
        let wanted = self.wanted.get_or_insert_with(|| Wanted {
            trigger,
            afterwards,
            begun: None,
            replies: Vec::new(),
        });
        wanted.replies.extend(reply);
        if afterwards == Afterwards::Stop {
            wanted.trigger = trigger;
            wanted.afterwards = afterwards;
        }
        self.snapshot_when_idle()
    }

    /// Begins the wanted snapshot if the job runs and no other is taken.
    pub fn snapshot_when_idle(&mut self) -> Result<(), RunError> {
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
        let Some(mut wanted) = self.wanted.take() else {
            return Ok(());
        };
        wanted.begun = Some(now());
        let (shop, streams, job) = (
            Arc::clone(&self.shop),
            Arc::clone(&self.streams),
            Arc::clone(&running.job),
        );
        let (trigger, afterwards, events) =
            (wanted.trigger, wanted.afterwards, self.events.clone());
        running.busy = Some(wanted);
        let work = move || {
            let computing = |freeze| drop(events.blocking_send(Event::Computing(freeze)));
            let result = snapshot::take(&shop, &job, &streams, trigger, afterwards, computing);
            if result.is_ok() {
                let keep_last =
                    usize::try_from(shop.config.retention.keep_last).unwrap_or(usize::MAX);
                match shop.store.rotate(&shop.lock, keep_last) {
                    Ok(removed) => tracing::debug!(?removed, "rotated"),
                    Err(error) => tracing::warn!("cannot remove old images: {}", chain(&error)),
                }
            }
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::SnapshotEnded(Box::new(result)));
        };
        thread::Builder::new()
            .name("snapshot".to_owned())
            .spawn(work)
            .map(drop)
            .map_err(system("start a thread"))
    }

    pub fn snapshot_ended(
        &mut self,
        result: Result<Snapshotted, SnapshotError>,
    ) -> Result<(), RunError> {
        let Stage::Running(running) = &mut self.stage else {
            return Ok(());
        };
        let Some(wanted) = running.busy.take() else {
            return Ok(());
        };
        let ended = now();
        self.last = LastSnapshot {
            begun: wanted.begun.unwrap_or(ended),
            ended,
        };
        match result {
            Ok(done) => {
                report(&done);
                self.budget.refill();
                self.refused.clear();
                for reply in wanted.replies {
                    let _ = reply.send(Ok(done.id)); // a client that went away
                }
                if wanted.afterwards == Afterwards::Stop {
                    return self.end_job(AfterEnd::Exit(SAVED, Progress::Saved));
                }
            }
            Err(error) => self.snapshot_failed(wanted, &error)?,
        }
        self.suspend_when_idle();
        self.settle()?;
        self.snapshot_when_idle()
    }

    fn snapshot_failed(&mut self, wanted: Wanted, error: &SnapshotError) -> Result<(), RunError> {
        let reason = chain(error);
        for reply in wanted.replies {
            let _ = reply.send(Err(reason.clone())); // a client that went away
        }
        let Stage::Running(running) = &mut self.stage else {
            return Ok(());
        };
        if running.ended.is_some() || running.gone || matches!(error, SnapshotError::Ended) {
            tracing::info!("snapshot called off: the job ended during it");
            return Ok(());
        }
        let sandbox = Arc::clone(&running.job.sandbox);
        let doubtful =
            error.job_is_doubtful() && self.stopping == Stopping::No && self.would_restore()?;
        if error.job_is_lost() || doubtful {
            tracing::error!("snapshot failed, the job is ended to be restored: {reason}");
            sandbox.kill();
            return Ok(());
        }
        tracing::warn!("snapshot failed, the job goes on, older images are untouched: {reason}");
        match (wanted.afterwards, self.stopping) {
            (Afterwards::Stop, Stopping::Until(_)) => self.forward_termination(),
            (Afterwards::Stop, _) => {
                self.stopping = Stopping::No;
                Ok(())
            }
            (Afterwards::Continue, _) => Ok(()),
        }
    }

    /// The last snapshot could not be taken: the job gets the rest of the grace period to end by itself.
    fn forward_termination(&mut self) -> Result<(), RunError> {
        if let Stage::Running(running) = &self.stage {
            tracing::info!("sending SIGTERM to the job");
            running.job.sandbox.signal(nix::libc::SIGTERM, false)?;
        }
        Ok(())
    }

    /// SIGUSR2 or SIGTERM: one more snapshot, then the end.
    pub fn save_and_stop(&mut self) -> Result<(), RunError> {
        match &self.stage {
            Stage::Running(_) => self.want(Trigger::Stop, Afterwards::Stop, None),
            // Nothing has computed since the newest image.
            Stage::Idle
            | Stage::Starting(_)
            | Stage::Restoring(_)
            | Stage::Ending(_)
            | Stage::Waiting { .. } => self.stop_now("no job runs"),
        }
    }

    /// Ends the job without another snapshot.
    pub fn stop_now(&mut self, why: &str) -> Result<(), RunError> {
        let saved = self.newest()?;
        if let Some(id) = saved {
            tracing::warn!(image = %id, "stopping without a new image ({why}); the run goes on from the newest one");
        } else {
            tracing::warn!("stopping without an image ({why}); the run begins anew");
        }
        let code = if saved.is_some() { SAVED } else { TERMINATED };
        self.end_job(AfterEnd::Exit(code, Progress::Saved))
    }

    /// Passes a signal on; the job's end by it is no crash.
    pub fn forward(&mut self, signal: i32) -> Result<(), RunError> {
        if self.stopping == Stopping::No {
            self.stopping = Stopping::ByTheJob;
        }
        match &self.stage {
            Stage::Running(running) => Ok(running.job.sandbox.signal(signal, false)?),
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
