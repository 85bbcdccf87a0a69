//! `ckpt-run stop`: what SIGUSR2 asks for, with an answer. The way of such a snapshot is in `requests`.

use crate::run::image_facts::Trigger;
use crate::snapshot::take_snapshot::Afterwards;
use crate::supervisor::event::Reply;
use crate::supervisor::event_loop::{AfterEnd, Stage, Supervisor};
use crate::supervisor::policy::stopping::Stopping;
use crate::supervisor::run_job::RunError;

/// Nothing would be kept.
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
