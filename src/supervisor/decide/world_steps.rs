//! Steps of the simulated world: what clients, users, clocks, processes and threads do.

use std::time::Duration;

use jiff::Timestamp;
use nix::sys::signal::Signal;
use tokio::sync::oneshot;

use super::event::{Event, Refusal, SnapshotEnd, Suspect};
use super::world::{DELIVERY_LIMIT, Ending, FACTS, IMAGES_KEPT, Life, Work, World, image, later};
use crate::restore::error::RestoreError;
use crate::restore::restore_image::Restored;
use crate::sandbox::Ended;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::paused::StillPaused;
use crate::snapshot::take_snapshot::{Afterwards, Snapshotted};
use crate::supervisor::hang::detector::{Finding, Sign};
use crate::supervisor::policy::schedule::Moment;
use crate::supervisor::preemption::announcement::{Action, Announcement, Cloud};

impl World {
    /// Lets time pass, and timers expire in it.
    pub fn pass(&mut self, time: Duration) {
        let end = later(self.now, time);
        let mut expired = 0;
        while let Some((wait, timer)) = self.machine.next_timer(self.now) {
            let due = later(self.now, wait);
            if due.monotonic > end.monotonic || self.over {
                break;
            }
            expired += 1;
            assert!(expired < 500, "{timer:?} expires again and again");
            // A timer never expires early.
            self.now = later(due, Duration::from_millis(1));
            self.happens(Event::Timer(timer));
        }
        if self.now.monotonic < end.monotonic {
            self.now = end;
        }
        if !self.over {
            self.check();
        }
    }

    pub fn signal(&mut self, signal: Signal) {
        if signal == Signal::SIGTERM {
            self.must_end_within(self.machine.settings.snapshot.grace);
        }
        self.happens(Event::Signal(signal));
    }

    /// A cloud takes the machine back.
    pub fn preempt(&mut self, left: Duration) {
        let grace = self.machine.settings.snapshot.grace;
        self.must_end_within(left.max(Duration::from_secs(10)).min(grace));
        let announcement = Announcement {
            cloud: Cloud::Aws,
            action: Action::Terminate,
            deadline: Timestamp::UNIX_EPOCH,
        };
        self.happens(Event::Preempted(announcement, left));
    }

    /// Requires the end of the run after this time, and the delivery of the output.
    fn must_end_within(&mut self, time: Duration) {
        // Timers of the same time expire one after the other.
        let limit = time + DELIVERY_LIMIT + Duration::from_millis(50);
        let deadline = later(self.now, limit);
        let is_earlier = |before: Moment| deadline.monotonic < before.monotonic;
        if self.deadline.is_none_or(is_earlier) {
            self.deadline = Some(deadline);
        }
    }

    pub fn interrupt(&mut self) {
        self.happens(Event::Interrupted);
    }

    pub fn lose_lease(&mut self) {
        self.has_lost_lease = true;
        self.happens(Event::LeaseLost(None));
        assert!(self.over, "the run does not end");
        let is_dead = !matches!(self.life, Life::Alive | Life::Coming);
        assert!(is_dead, "the job runs without the lease: {:?}", self.life);
    }

    pub fn request_snapshot(&mut self, afterwards: Afterwards) {
        let (reply, client) = oneshot::channel();
        self.snapshot_clients.push(client);
        self.happens(Event::SnapshotRequest(afterwards, reply));
    }

    pub fn request_unpause(&mut self) {
        let (reply, client) = oneshot::channel();
        self.unpause_clients.push(client);
        self.held = false;
        self.happens(Event::UnpauseRequest(reply));
    }

    /// Returns true if a client waits for an answer.
    pub fn owes_answers(&self) -> bool {
        !self.snapshot_clients.is_empty() || !self.unpause_clients.is_empty()
    }

    /// The job's first process exits; a report follows later.
    pub fn exit_job(&mut self, code: i32) {
        // A stopped process does not exit.
        if self.life == Life::Alive && !self.frozen {
            self.life = Life::Exited(code);
        }
    }

    /// Somebody kills the sandbox, or the job in it.
    pub fn kill_sandbox(&mut self) {
        if !matches!(self.life, Life::Gone | Life::Killed) {
            self.life = Life::Lost;
            self.works.remove(&Work::Start);
        }
    }

    /// The sandbox reports.
    pub fn report(&mut self) {
        match self.life {
            Life::Exited(code) => {
                self.life = Life::Reported;
                self.happens(Event::JobEnded(Ended::Exited(code)));
            }
            Life::Killed | Life::Lost => {
                self.life = Life::Gone;
                // A debugger that still runs is none of the next job's.
                if let Some(detail) = self.works.remove(&Work::Diagnosis) {
                    self.late_diagnosis = detail.suspect;
                }
                self.happens(Event::Gone);
            }
            Life::Gone | Life::Coming | Life::Alive | Life::Reported => {}
        }
    }

    /// The watch finds a sign of a hang.
    pub fn suspect(&mut self, quiet: Duration) {
        let finding = Finding {
            sign: Sign::Output,
            quiet,
            quiet_max: quiet,
        };
        let since = self.machine.computed(self.now.monotonic);
        let suspect = Suspect { finding, since };
        if self.armed && self.machine.is_computing() {
            self.armed = false;
            self.happens(Event::Suspected(suspect));
        }
    }

    /// A user removes the oldest image.
    pub fn forget_image(&mut self) {
        if !self.images.is_empty() {
            self.images.remove(0);
        }
    }

    /// The diagnosis of a dead job ends.
    pub fn end_late_diagnosis(&mut self) {
        if let Some(suspect) = self.late_diagnosis.take() {
            self.happens(Event::Diagnosed(suspect, None));
        }
    }

    /// The job of a snapshot computes again.
    pub fn release(&mut self) {
        let detail = self.works.get(&Work::Snapshot);
        let hooked = detail.is_some_and(|detail| detail.hook_until.monotonic > self.now.monotonic);
        if detail.is_some_and(|detail| detail.afterwards == Afterwards::Continue) && !hooked {
            self.happens(Event::Computing(Duration::from_millis(500)));
        }
    }

    /// Returns the works that may end now.
    pub fn works(&self) -> Vec<Work> {
        self.works.keys().copied().collect()
    }

    /// Ends a work.
    pub fn end(&mut self, work: Work, ending: Ending) {
        let Some(detail) = self.works.remove(&work) else {
            return;
        };
        let event = match work {
            Work::Start => Event::Started(Some(1)),
            Work::Snapshot => {
                if detail.hook_until.monotonic > self.now.monotonic && ending != Ending::Success {
                    // The hook takes all of its time.
                    self.works.insert(work, detail);
                    return;
                }
                self.snapshot_end(detail.afterwards, ending)
            }
            Work::Restore => Event::RestoreEnded(Box::new(restore_result(ending, self.life))),
            Work::Unpause => self.unpause_end(ending),
            Work::Drain => Event::Drained,
            Work::Diagnosis => Event::Diagnosed(detail.suspect.unwrap(), None),
        };
        self.happens(event);
    }

    fn snapshot_end(&mut self, afterwards: Afterwards, ending: Ending) -> Event {
        let result = match ending {
            // The kill may come too late for the image.
            _ if !matches!(self.life, Life::Alive | Life::Killed) => Err(SnapshotError::Ended),
            Ending::Success => {
                self.images_made += 1;
                let run = self.machine.state().started_unix_ms;
                // No number is assigned twice, not even that of a removed image.
                let made = image(self.images_made, run);
                let id = made.id;
                self.images.push(made);
                if self.images.len() > IMAGES_KEPT {
                    self.images.remove(0);
                }
                self.frozen = afterwards == Afterwards::Pause;
                Ok(Box::new(Snapshotted {
                    id,
                    freeze: Duration::from_millis(500),
                    raw_bytes: 0,
                    stored_bytes: 0,
                    total: Duration::from_secs(1),
                    facts: FACTS.clone(),
                }))
            }
            Ending::Passing => Err(SnapshotError::Vetoed),
            Ending::Lasting => Err(SnapshotError::Panicked),
            Ending::Lost => Err(SnapshotError::Doubtful {
                pid: 1,
                source: Box::new(SnapshotError::Panicked),
            }),
        };
        Event::SnapshotEnded(Box::new(SnapshotEnd {
            paused: result.is_ok() && self.frozen,
            result,
            slowdown: Duration::ZERO,
            is_synced: true,
        }))
    }

    fn unpause_end(&mut self, ending: Ending) -> Event {
        let failed = || StillPaused::Failed(String::new());
        let result = match ending {
            Ending::Success => Ok(Duration::from_secs(1)),
            Ending::Passing => Err((StillPaused::NoRoom(String::new()), false)),
            Ending::Lasting => Err((failed(), false)),
            Ending::Lost => Err((failed(), true)),
        };
        self.frozen = matches!(result, Err((_, false)));
        Event::Unpaused(result.map_err(|(why, lost)| Refusal { why, lost }))
    }
}

fn restore_result(ending: Ending, life: Life) -> Result<Restored, RestoreError> {
    match ending {
        Ending::Success if !matches!(life, Life::Killed | Life::Lost | Life::Gone) => {
            Ok(Restored {
                phases: Vec::new(),
                total: Duration::from_secs(1),
                cut: Vec::new(),
                input_lost: false,
                moved: Vec::new(),
            })
        }
        Ending::Success | Ending::Passing => Err(RestoreError::Killed {
            signal: 9,
            log: String::new(),
        }),
        Ending::Lasting => Err(RestoreError::Facts(
            serde_json::from_str::<u8>("").unwrap_err(),
        )),
        Ending::Lost => Err(RestoreError::NotAsked.late()),
    }
}
