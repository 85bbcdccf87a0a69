//! Reaction to a job that may hang.
//!
//! ```text
//! Suspected ─▶ its stacks are recorded ─ Diagnosed ─▶ verdict: reported, hook; images from the silence are left out,
//!                                                     the job is killed
//! ```
//! Each step waits for the end of a snapshot. A suspicion that cannot be followed, as the job is paused or is to exit, is
//! dropped, and the search for signs starts again. What follows the kill is as after any crash.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use super::action::Action;
use super::event::Suspect;
use super::stage::{Running, Stage};
use super::state_machine::Machine;
use crate::config::HangAction;
use crate::store::ImageId;
use crate::supervisor::notice::Notice;
use crate::supervisor::policy::restart::Budget;

/// Newest images that are remembered, for those of a silence: more than any store keeps.
const IMAGES_MAX: usize = 4096;

/// The suspicion about the present job, and what its verdict needs.
#[derive(Debug, Default)]
pub(crate) struct HangCase {
    suspicion: Suspicion,
    /// Images of the present attempt.
    images: VecDeque<Taken>,
    /// Computing time at the end of the last freeze.
    frozen_at: Duration,
}

/// An image with the computing time at which it was frozen, and the budget before it.
#[derive(Debug, Clone, Copy)]
struct Taken {
    image: ImageId,
    at: Duration,
    budget: Budget,
}

#[derive(Debug, Default)]
enum Suspicion {
    #[default]
    None,
    /// The job's stacks are to be recorded.
    Found(Suspect),
    /// The job's stacks are being recorded.
    Diagnosing(Suspect),
    /// The job's stacks are in this log, if it could be written.
    Verdict(Suspect, Option<PathBuf>),
}

impl Machine {
    pub(super) fn watch_anew(&mut self) {
        self.hang = HangCase::default();
        self.act(Action::WatchAnew);
    }

    pub(super) fn suspected(&mut self, suspect: Suspect) {
        if let Suspicion::None = self.hang.suspicion {
            self.hang.suspicion = Suspicion::Found(suspect);
        }
    }

    /// Handles the end of a diagnosis. That of a job that has been restored since means nothing.
    pub(super) fn diagnosed(&mut self, of: Suspect, log: Option<PathBuf>) {
        if matches!(self.hang.suspicion, Suspicion::Diagnosing(suspect) if suspect == of) {
            self.hang.suspicion = Suspicion::Verdict(of, log);
        }
    }

    /// Returns true if the job is suspected to hang: an image of it would be one of a hung job.
    pub(super) fn is_suspect(&self) -> bool {
        !matches!(self.hang.suspicion, Suspicion::None)
    }

    pub(super) fn is_being_diagnosed(&self) -> bool {
        matches!(self.hang.suspicion, Suspicion::Diagnosing(_))
    }

    /// Notes the moment of the image of the snapshot under way.
    pub(super) fn image_frozen(&mut self) {
        self.hang.frozen_at = self.clock.total(self.now.monotonic());
    }

    /// Notes an image that is durable, before it changes the budget.
    pub(super) fn image_taken(&mut self, image: ImageId) {
        let (at, budget) = (self.hang.frozen_at, self.attempts.budget);
        if self.hang.images.len() == IMAGES_MAX {
            self.hang.images.pop_front();
        }
        self.hang.images.push_back(Taken { image, at, budget });
    }

    /// Takes the next step of a suspicion, if that is possible now.
    pub(super) fn follow_suspicion(&mut self) {
        let may_follow = match &self.stage {
            // The driver's part of a snapshot must not be cut short, and a debugger would spoil the image.
            Stage::Running(Running { busy: Some(_), .. }) => return,
            Stage::Running(running) => {
                running.is_whole()
                    && !running.killed
                    && running.pause.is_none()
                    && !self.is_stopping()
            }
            _ => false,
        };
        match std::mem::take(&mut self.hang.suspicion) {
            Suspicion::None => return,
            Suspicion::Diagnosing(suspect) => {
                self.hang.suspicion = Suspicion::Diagnosing(suspect);
                return;
            }
            Suspicion::Found(suspect) if may_follow => {
                self.hang.suspicion = Suspicion::Diagnosing(suspect);
                return self.act(Action::Diagnose(suspect));
            }
            Suspicion::Verdict(suspect, log) if may_follow => self.hangs(suspect, log),
            Suspicion::Found(_) | Suspicion::Verdict(..) => {
                self.notify(Notice::SuspectEnded);
                self.act(Action::WatchAnew);
            }
        }
        // A request may have waited for the diagnosis.
        self.snapshot_when_idle();
    }

    fn hangs(&mut self, suspect: Suspect, log: Option<PathBuf>) {
        let action = self.settings.hang.action;
        if action == HangAction::Restore {
            self.leave_out_images_since(suspect.since);
        }
        let newest = self.newest();
        self.notify(Notice::Hung {
            reason: suspect.finding.to_string(),
            silent: suspect.finding.quiet,
            log,
            action,
            newest,
        });
        if action == HangAction::Restore {
            self.attempts.budget.killed_for_fault();
            self.kill_job();
        }
    }

    /// Leaves out images from the silence, which contain the hang: the run returns to the newest image before them, or to
    /// the oldest, and its budget is that before them.
    fn leave_out_images_since(&mut self, since: Duration) {
        let Some(first) = self
            .hang
            .images
            .iter()
            .find(|taken| taken.at > since)
            .copied()
        else {
            return;
        };
        self.attempts.budget = first.budget;
        // If all are from the silence, the oldest may be from its very beginning, before the hang.
        let all = self.available();
        let before = all.iter().copied().filter(|image| *image < first.image);
        let Some(newest) = before.max().or_else(|| all.first().copied()) else {
            return;
        };
        let images = self.now.images.list_or_none();
        if self.state.go_back(newest, images).is_ok() {
            self.notify(Notice::SilenceLeftOut(newest));
            self.act(Action::Save);
        }
    }
}
