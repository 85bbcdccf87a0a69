//! Pauses: a job that is stopped at an image, and its continuation.

use std::time::Duration;

use super::action::Action;
use super::event::Refusal;
use super::stage::{AfterEnd, Pause, Running, Stage, UnpauseReply};
use super::state_machine::Machine;
use crate::run::exit_code::SAVED;
use crate::run::run_state::Progress;
use crate::snapshot::paused::StillPaused;
use crate::snapshot::take_snapshot::Afterwards;
use crate::supervisor::notice::Notice;

/// Answer to a request for a snapshot of a killed job.
const NO_IMAGE: &str = "the paused job was killed and has no image";

impl Machine {
    /// Returns true if the job is paused, or was killed while it was paused.
    pub(super) fn is_paused(&self) -> bool {
        matches!(
            self.stage,
            Stage::Running(Running { pause: Some(_), .. }) | Stage::Waiting { until: None, .. }
        )
    }

    /// Answers requests to a paused job: the newest image is the job in its present state.
    pub(super) fn answer_paused(&mut self) {
        let Some(wanted) = self.requests.snapshot.take() else {
            return;
        };
        let image = match &self.stage {
            Stage::Running(running) => running.pause.map(Pause::image),
            _ => self.newest(),
        };
        for reply in wanted.replies {
            let answer = image.ok_or_else(|| NO_IMAGE.to_owned());
            self.act(Action::AnswerSnapshot(reply, answer));
        }
        if wanted.afterwards == Afterwards::Stop {
            self.end_job(AfterEnd::Exit(SAVED, Progress::Saved));
        }
    }

    pub(super) fn unpause(&mut self, reply: UnpauseReply) {
        if self.requests.unpause.is_some() {
            return self.not_paused(reply);
        }
        match &mut self.stage {
            Stage::Running(Running {
                pause: Some(pause @ Pause::Paused(_)),
                ..
            }) => {
                let image = pause.image();
                *pause = Pause::Ending(image);
                self.requests.unpause = Some(reply);
                self.act(Action::Unpause(image));
            }
            // The job was killed while it was paused. Other programs may use its GPUs by now.
            Stage::Waiting { until: None, .. } => {
                self.requests.unpause = Some(reply);
                match self.newest() {
                    Some(image) => self.act(Action::FindRoom(image)),
                    None => self.room(None),
                }
            }
            _ => self.not_paused(reply),
        }
    }

    fn not_paused(&mut self, reply: UnpauseReply) {
        let why = StillPaused::Failed("it is not paused".to_owned());
        self.act(Action::AnswerUnpause(reply, Err(why)));
    }

    /// Restores a job that was killed while it was paused, unless its GPUs lack memory.
    pub(super) fn room(&mut self, lacking: Option<String>) {
        match lacking {
            None => self.backoff_over(),
            Some(why) => self.answer_unpause(Err(StillPaused::NoRoom(why))),
        }
    }

    pub(super) fn answer_unpause(&mut self, answer: Result<(), StillPaused>) {
        if let Some(reply) = self.requests.unpause.take() {
            self.act(Action::AnswerUnpause(reply, answer));
        }
    }

    pub(super) fn unpaused(&mut self, result: Result<Duration, Refusal>) {
        let Stage::Running(Running { pause, .. }) = &mut self.stage else {
            self.act(Action::AbandonPause);
            let why = "it was killed".to_owned();
            self.answer_unpause(Err(StillPaused::Failed(why)));
            return self.work_ended();
        };
        let image = pause.take().map(Pause::image);
        match result {
            Ok(took) => {
                // The interval does not count the time of the pause.
                self.timer.begin_anew(self.now.at);
                self.notify(Notice::Unpaused(took));
                self.answer_unpause(Ok(()));
            }
            Err(Refusal { why, lost }) => {
                if lost {
                    self.kill_job();
                } else {
                    *pause = image.map(Pause::Paused);
                }
                let failure = match &why {
                    StillPaused::Failed(reason) => Some(reason.clone()),
                    StillPaused::NoRoom(_) => None,
                };
                self.notify(Notice::StaysPaused { failure, lost });
                self.answer_unpause(Err(why));
            }
        }
        self.proceed();
    }
}
