//! Snapshots: requests, their begin, and the consequences of their end.

use std::time::Duration;

use super::action::{Action, SnapshotOrder};
use super::event::SnapshotEnd;
use super::stage::{AfterEnd, Pause, Reply, Running, Snapshotting, Stage, Wanted};
use super::state_machine::Machine;
use crate::run::exit_code::SAVED;
use crate::run::format::chain;
use crate::run::image_facts::Trigger;
use crate::run::run_state::Progress;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::take_snapshot::{Afterwards, Snapshotted};
use crate::store::ImageId;
use crate::supervisor::notice::{AfterSnapshotFailure, Notice};
use crate::supervisor::policy::restart::Stopping;

impl Machine {
    /// Requests a snapshot. Those requested while one is taken become one more.
    pub(super) fn want(&mut self, trigger: Trigger, afterwards: Afterwards, reply: Option<Reply>) {
        let wanted = self.requests.snapshot.get_or_insert_with(|| Wanted {
            trigger,
            afterwards,
            replies: Vec::new(),
        });
        wanted.replies.extend(reply);
        if afterwards > wanted.afterwards {
            wanted.trigger = trigger;
            wanted.afterwards = afterwards;
        }
        self.snapshot_when_idle();
    }

    /// Begins the requested snapshot if the job runs and no other is taken. A request to a paused job is answered at
    /// once.
    pub(super) fn snapshot_when_idle(&mut self) {
        if self.is_paused() {
            return self.answer_paused();
        }
        // A debugger may be at work in the job.
        if self.is_being_diagnosed() {
            return;
        }
        let now = self.now.at;
        let Stage::Running(running) = &mut self.stage else {
            return;
        };
        let may_begin = running.may_begin_snapshot(now.monotonic);
        let Some(wanted) = self.requests.snapshot.take_if(|_| may_begin) else {
            return;
        };
        let (trigger, afterwards) = (wanted.trigger, wanted.afterwards);
        running.busy = Some(Snapshotting {
            wanted,
            begun: now,
            released: false,
        });
        self.act(Action::Snapshot(SnapshotOrder {
            trigger,
            afterwards,
            hook_limit: self.stopping.hook_limit(now.monotonic),
        }));
    }

    /// Returns the request of a snapshot that did not begin, because the job is exiting.
    pub(super) fn leaving(&mut self) {
        let now = self.now.monotonic();
        if let Stage::Running(running) = &mut self.stage {
            running.leaving = Some(now);
            let busy = running.busy.take();
            self.requeue(busy);
        }
    }

    /// Returns the request of a snapshot that will not end to the queue. The end of the run closes the connections of
    /// clients that still wait.
    pub(super) fn requeue(&mut self, busy: Option<Snapshotting>) {
        let Some(Snapshotting { mut wanted, .. }) = busy else {
            return;
        };
        let later = self.requests.snapshot.take();
        wanted
            .replies
            .extend(later.into_iter().flat_map(|later| later.replies));
        self.requests.snapshot = Some(wanted);
    }

    pub(super) fn computes_again(&mut self, freeze: Duration) {
        let mut took = freeze;
        if let Stage::Running(Running {
            busy: Some(busy), ..
        }) = &mut self.stage
        {
            busy.released = true;
            took = self
                .now
                .monotonic()
                .saturating_duration_since(busy.begun.monotonic);
        }
        self.notify(Notice::Computing { freeze, took });
        self.image_frozen();
    }

    pub(super) fn snapshot_ended(&mut self, end: SnapshotEnd) {
        let busy = match &mut self.stage {
            Stage::Running(running) => running.busy.take(),
            _ => None,
        };
        let Some(busy) = busy else {
            if end.paused {
                self.act(Action::AbandonPause);
            }
            return;
        };
        self.timer
            .ended(busy.begun, self.now.at, end.result.as_ref().err());
        match end.result {
            Ok(done) => {
                let id = done.id;
                self.image_made(done, end.paused, end.slowdown);
                for reply in busy.wanted.replies {
                    let answer = if end.is_synced {
                        Ok(id)
                    } else {
                        Err(format!(
                            "image {id} is in the store, but not in the remote store yet"
                        ))
                    };
                    self.act(Action::AnswerSnapshot(reply, answer));
                }
                if busy.wanted.afterwards == Afterwards::Stop {
                    return self.end_job(AfterEnd::Exit(SAVED, Progress::Saved));
                }
            }
            Err(error) => self.snapshot_failed(busy.wanted, &error),
        }
        self.proceed();
    }

    /// Continues with what waited for the end of a snapshot, restore or pause.
    pub(super) fn proceed(&mut self) {
        self.stop_self_when_idle();
        self.settle();
        self.snapshot_when_idle();
    }

    fn image_made(&mut self, done: Box<Snapshotted>, paused: bool, slowdown: Duration) {
        let id = done.id;
        self.timer.learn(&done, slowdown);
        self.image_taken(id);
        self.attempts.image_taken();
        // Old images were removed; the status shows the number of those that are left.
        self.available();
        self.notify(Notice::Snapshot(done));
        if paused {
            self.pause_begins(id);
        }
        self.adapt_interval();
        self.act(Action::Save);
    }

    fn pause_begins(&mut self, image: ImageId) {
        if let Stage::Running(running) = &mut self.stage {
            running.pause = Some(Pause::Paused(image));
            self.notify(Notice::Paused(image));
        }
    }

    fn snapshot_failed(&mut self, wanted: Wanted, error: &SnapshotError) {
        let (reason, now) = (chain(error), self.now.monotonic());
        for reply in wanted.replies {
            self.act(Action::AnswerSnapshot(reply, Err(reason.clone())));
        }
        let Stage::Running(running) = &mut self.stage else {
            return;
        };
        if matches!(error, SnapshotError::Ended) {
            running.leaving = Some(now);
        }
        let then = if !running.is_whole() || running.leaving_for(now).is_some() {
            AfterSnapshotFailure::Ended
        } else if matches!(error, SnapshotError::Vetoed) {
            AfterSnapshotFailure::Vetoed
        } else {
            self.count_failure(error)
        };
        let kind = match then {
            AfterSnapshotFailure::Ended => "ended",
            _ => error.kind().as_str(),
        };
        self.notify(Notice::SnapshotFailed { kind, reason, then });
        match then {
            AfterSnapshotFailure::Ended | AfterSnapshotFailure::Vetoed => {}
            AfterSnapshotFailure::Killed => self.kill_job(),
            AfterSnapshotFailure::Continues { .. } => self.stop_failed(wanted.afterwards),
        }
    }

    fn count_failure(&mut self, error: &SnapshotError) -> AfterSnapshotFailure {
        self.state.failed_snapshots += 1;
        self.state.last_failure = Some(error.kind().as_str().to_owned());
        self.act(Action::Save);
        let doubtful = error.job_is_doubtful() && !self.is_stopping() && self.would_restore();
        if error.job_is_lost() || doubtful {
            return AfterSnapshotFailure::Killed;
        }
        AfterSnapshotFailure::Continues {
            failed: self.timer.failures(),
        }
    }

    /// Handles a last snapshot that failed: after SIGTERM the job is asked to exit, otherwise the stop is withdrawn.
    fn stop_failed(&mut self, afterwards: Afterwards) {
        match (afterwards, self.stopping) {
            (Afterwards::Stop, Stopping::Until(_)) => {
                self.notify(Notice::SentTerm);
                self.act(Action::SignalJob(nix::libc::SIGTERM));
            }
            (Afterwards::Stop, _) => self.stopping = Stopping::No,
            (Afterwards::Continue | Afterwards::Pause, _) => {}
        }
    }
}
