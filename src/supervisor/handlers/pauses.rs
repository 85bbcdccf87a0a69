//! Handling of pauses: a job that is stopped at an image, and its continuation.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::cuda;
use crate::history;
use crate::run::exit_code::SAVED;
use crate::run::format::seconds;
use crate::run::image_facts::ImageFacts;
use crate::run::run_state::Progress;
use crate::snapshot::paused::{Refused, StillPaused, lacking};
use crate::snapshot::take_snapshot::Afterwards;
use crate::store::ImageId;
use crate::supervisor::error::{RunError, system};
use crate::supervisor::event::Event;
use crate::supervisor::event_loop::{Supervisor, now};
use crate::supervisor::policy::schedule::Snapshotted as LastSnapshot;
use crate::supervisor::stage::{AfterEnd, Pause, Running, Stage, UnpauseReply};

impl Supervisor {
    /// The image that the job stands still at, if somebody paused it.
    pub fn paused_image(&self) -> Option<ImageId> {
        match &self.stage {
            Stage::Running(running) => running.pause.as_ref().map(Pause::image),
            Stage::Waiting { until: None, .. } => self.newest(),
            Stage::Idle
            | Stage::Starting(_)
            | Stage::Restoring(_)
            | Stage::Ending(_)
            | Stage::Waiting { until: Some(_), .. } => None,
        }
    }

    /// Answers requests to a paused job at once: the newest image is the job in its present state.
    pub fn answer_paused(&mut self, image: ImageId) -> Result<(), RunError> {
        let Some(wanted) = self.wanted.take() else {
            return Ok(());
        };
        for reply in wanted.replies {
            let _ = reply.send(Ok(image)); // a client that went away
        }
        match wanted.afterwards {
            Afterwards::Continue | Afterwards::Pause => Ok(()),
            Afterwards::Stop => self.end_job(AfterEnd::Exit(SAVED, Progress::Saved)),
        }
    }

    /// Lets a paused job go on, on a thread: the driver takes its time.
    pub fn unpause(&mut self, reply: UnpauseReply) -> Result<(), RunError> {
        if let Stage::Waiting { until: None, .. } = self.stage {
            return self.restore_paused(reply);
        }
        let Stage::Running(Running { pause, .. }) = &mut self.stage else {
            not_paused(reply);
            return Ok(());
        };
        let (image, paused) = match pause.take() {
            Some(Pause::Paused(image, paused)) => {
                *pause = Some(Pause::Ending(image));
                (image, paused)
            }
            other => {
                *pause = other;
                not_paused(reply);
                return Ok(());
            }
        };
        let (context, events) = (Arc::clone(&self.context), self.events.clone());
        let standby = Arc::clone(&self.standby);
        let work = move || {
            let result = Box::new(paused.unpause(&context, &standby, image));
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::Unpaused(result, reply));
        };
        // Where there is no thread, the job goes on as it is dropped, and dies of that if it cannot.
        thread::Builder::new()
            .name("unpause".to_owned())
            .spawn(work)
            .map(drop)
            .map_err(system("start a thread"))
    }

    /// Restores a job that was killed while it was paused, if its GPUs have room for it.
    fn restore_paused(&mut self, reply: UnpauseReply) -> Result<(), RunError> {
        // What cannot be looked at now, the restore looks at.
        let images = self.context.store.images().unwrap_or_default();
        let newest = self.newest();
        let newest = images.iter().find(|image| Some(image.id) == newest);
        let facts = newest.and_then(|image| serde_json::from_slice::<ImageFacts>(&image.meta).ok());
        let needs = facts.and_then(|facts| facts.cuda);
        let machine = || cuda::inventory().unwrap_or_default();
        if let Some(why) = needs.and_then(|facts| lacking(&facts, &machine())) {
            let _ = reply.send(Err(StillPaused::NoRoom(why))); // a client that went away
            return Ok(());
        }
        self.unpausing = Some(reply);
        self.backoff_over()
    }

    pub fn unpaused(
        &mut self,
        result: Result<Duration, Refused>,
        reply: UnpauseReply,
    ) -> Result<(), RunError> {
        let Stage::Running(running) = &mut self.stage else {
            let why = "it was killed meanwhile".to_owned();
            let _ = reply.send(Err(StillPaused::Failed(why))); // a client that went away
            if let Err(Refused {
                paused: Some(paused),
                ..
            }) = result
            {
                paused.abandon();
            }
            return Ok(());
        };
        let image = running.pause.take().map(|pause| pause.image());
        let answer = match result {
            Ok(took) => {
                tracing::info!(took = %seconds(took), "unpaused: the job computes again");
                // The interval does not count the time that nothing computed.
                self.last = LastSnapshot::not_yet(now());
                self.tell(history::Event::Unpaused {
                    seconds: took.as_secs_f64(),
                });
                Ok(())
            }
            Err(Refused { paused, why }) => {
                let meaning = if let Some((image, paused)) = image.zip(paused) {
                    running.pause = Some(Pause::Paused(image, paused));
                    "the job stays paused"
                } else {
                    running.job.sandbox.kill();
                    "the job does not go on and will be restored"
                };
                if let StillPaused::Failed(reason) = &why {
                    tracing::error!("{meaning}: {reason}");
                }
                Err(why)
            }
        };
        let _ = reply.send(answer); // a client that went away
        self.suspend_when_idle();
        self.settle()?;
        self.snapshot_when_idle()
    }
}

fn not_paused(reply: UnpauseReply) {
    let why = StillPaused::Failed("it is not paused".to_owned());
    let _ = reply.send(Err(why)); // a client that went away
}
