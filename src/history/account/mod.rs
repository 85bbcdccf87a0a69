//! Account of a run: a pure fold over its events, the same for a log file and for the events of a run under way.
//!
//! ```text
//! progress   computing time contained in the job's present state
//!            0 when it starts, grows while it computes, returns to that of the image when it is restored
//! lost       progress at a crash, less that of the image restored after it: computed twice
//! saved      progress of the image last restored: what would have been computed again from the beginning
//! ```
//! Freezes, pauses and waits do not count as computing time. Computing time after the last event of a killed supervisor
//! is unknown and not counted.

use std::collections::{BTreeMap, VecDeque};

use jiff::Timestamp;

use super::summary::{Freeze, Summary};
use super::{Entry, Event};

/// Maximum number of images with known progress: as many as a dense schedule takes in a day, more than most stores
/// keep.
const IMAGES_MAX: usize = 10_000;
/// Maximum number of remembered freezes: as many as the status shows.
const FREEZES_MAX: usize = 10;

/// The account of the newest run among the added events.
#[derive(Clone, Debug, Default)]
pub struct Account {
    summary: Summary,
    run: Option<u64>,
    /// True if a supervisor runs, or was killed.
    open: bool,
    /// Running time of the supervisors that ended.
    before: f64,
    /// The clock of the present supervisor at its last event.
    elapsed: f64,
    /// Progress as of `since`, if the job computes since then.
    progress: f64,
    since: Option<f64>,
    /// Progress of the images.
    images: BTreeMap<String, f64>,
    /// Progress of the image that is being written.
    pending: Option<f64>,
    /// Progress of the image that would be restored after a crash.
    durable: f64,
    /// Progress at the end of the job's attempt, and the kind of that end, until the next attempt.
    ended_attempt: Option<(f64, AttemptEnd)>,
    freezes: VecDeque<Freeze>,
    failed_in_a_row: u64,
    ended: Option<(String, u8, Timestamp)>,
    comeback: Option<Comeback>,
}

/// The restore that began the present attempt.
#[derive(Clone, Debug, PartialEq)]
pub struct Comeback {
    /// The restored image.
    pub image: String,
    /// Time at which it computed again.
    pub time: Timestamp,
    elapsed: f64,
}

impl Comeback {
    /// Returns the seconds since then, `now` seconds after the present supervisor was opened.
    #[must_use]
    pub fn seconds(&self, now: f64) -> f64 {
        (now - self.elapsed).max(0.0)
    }
}

/// End of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttemptEnd {
    Crash,
    /// The supervisor was killed together with the job.
    Outage,
    Stop,
}

impl Account {
    /// Computes the account of the newest run in a log.
    #[must_use]
    pub fn of(entries: impl IntoIterator<Item = Entry>) -> Self {
        let mut account = Self::default();
        entries.into_iter().for_each(|entry| account.add(&entry));
        account
    }

    /// Returns the run; `None` before the first event.
    #[must_use]
    pub fn run(&self) -> Option<u64> {
        self.run
    }

    /// Returns the summary, `now` seconds after the present supervisor was opened.
    #[must_use]
    pub fn summary(&self, now: f64) -> Summary {
        let mut summary = self.summary.clone();
        summary.run_seconds = self.before
            + if self.open {
                self.elapsed.max(now)
            } else {
                0.0
            };
        summary
    }

    /// Returns the summary as of the last event (see [`Account::summary`]).
    #[must_use]
    pub fn summary_then(&self) -> Summary {
        self.summary(self.elapsed)
    }

    /// Returns the computing time that a crash would lose, `now` seconds after the present supervisor was opened.
    #[must_use]
    pub fn at_risk(&self, now: f64) -> f64 {
        (self.progress_at(now) - self.durable).max(0.0)
    }

    /// Returns the last snapshots, oldest first.
    #[must_use]
    pub fn freezes(&self) -> impl ExactSizeIterator<Item = &Freeze> {
        self.freezes.iter()
    }

    /// Returns the number of snapshots that have failed since the newest image.
    #[must_use]
    pub fn failed_in_a_row(&self) -> u64 {
        self.failed_in_a_row
    }

    /// Returns the end of the last supervisor, its exit code and time; `None` while it runs, or if it was killed.
    #[must_use]
    pub fn ended(&self) -> Option<(&str, u8, Timestamp)> {
        let (how, code, time) = self.ended.as_ref()?;
        Some((how, *code, *time))
    }

    /// Returns the last restore; `None` if the present attempt did not begin with one.
    #[must_use]
    pub fn comeback(&self) -> Option<&Comeback> {
        self.comeback.as_ref()
    }

    /// Returns the progress of the image that would be restored after a crash, in seconds of computing.
    #[must_use]
    pub fn durable(&self) -> f64 {
        self.durable
    }

    /// Returns the progress of the job, in seconds of computing, `now` seconds after the present supervisor was opened.
    #[must_use]
    pub fn progress_at(&self, now: f64) -> f64 {
        self.progress + self.since.map_or(0.0, |since| (now - since).max(0.0))
    }

    /// Notes that the job computes from now on, with this progress.
    fn compute(&mut self, progress: f64) {
        self.progress = progress;
        self.since = Some(self.elapsed);
    }

    /// Notes that the job has stopped computing.
    fn stop_computing(&mut self) {
        self.progress = self.progress_at(self.elapsed);
        self.since = None;
    }

    fn end_attempt(&mut self, how: AttemptEnd) {
        self.stop_computing();
        self.pending = None;
        self.comeback = None;
        self.ended_attempt.get_or_insert((self.progress, how));
    }

    /// Notes that the job runs again, with this progress if it is known.
    fn begin_attempt(&mut self, progress: Option<f64>) {
        let ended_attempt = self.ended_attempt.take();
        if let Some((then, how)) = ended_attempt {
            self.summary.lost_seconds +=
                progress.map_or(0.0, |progress| (then - progress).max(0.0));
            match how {
                AttemptEnd::Crash => self.summary.survived += 1,
                AttemptEnd::Outage => self.summary.outages += 1,
                AttemptEnd::Stop => {}
            }
        }
        let progress = progress.unwrap_or(0.0);
        self.summary.saved_seconds = progress;
        self.durable = progress;
        self.compute(progress);
    }

    /// Adds an event. The opening of another run's supervisor begins a new account.
    pub fn add(&mut self, entry: &Entry) {
        if let Event::Opened { .. } = entry.event {
            self.opened(entry);
        }
        // A run that is started from the beginning has another number and the same supervisor.
        self.run = Some(entry.run);
        if entry.elapsed.is_finite() {
            self.elapsed = self.elapsed.max(entry.elapsed);
        }
        self.count(entry);
    }

    fn opened(&mut self, entry: &Entry) {
        if self.run.is_some_and(|run| run != entry.run) {
            *self = Self::default();
        }
        if self.open {
            self.end_attempt(AttemptEnd::Outage);
            self.before += self.elapsed;
        }
        self.elapsed = 0.0;
        self.open = true;
        self.ended = None;
        self.summary.begun.get_or_insert(entry.time);
    }

    fn count(&mut self, entry: &Entry) {
        match &entry.event {
            Event::Opened { .. }
            | Event::SnapshotBegan { .. }
            | Event::RestoreBegan { .. }
            | Event::Interval { .. }
            | Event::Hook { .. }
            | Event::Preempted { .. }
            | Event::Unknown => {}
            Event::Started { .. } => {
                self.images.clear();
                self.begin_attempt(Some(0.0));
            }
            Event::Computing { freeze_seconds } => self.computing(*freeze_seconds),
            Event::Snapshot { .. } => self.snapshot(entry),
            Event::SnapshotFailed { kind, .. } => {
                self.pending = None;
                // A snapshot is not a failure if the job exited meanwhile or a hook vetoed it.
                if !["ended", "vetoed"].contains(&kind.as_str()) {
                    self.summary.failed_snapshots += 1;
                    self.failed_in_a_row += 1;
                }
            }
            Event::Crashed { .. } => {
                self.summary.crashes += 1;
                self.end_attempt(AttemptEnd::Crash);
            }
            Event::Hung { .. } => self.summary.hangs += 1,
            Event::Restored { image, seconds, .. } => {
                self.summary.restores += 1;
                self.summary.restore_seconds += seconds;
                self.begin_attempt(self.images.get(image).copied());
                self.comeback = Some(Comeback {
                    image: image.clone(),
                    time: entry.time,
                    elapsed: self.elapsed,
                });
            }
            Event::RestoreFailed { .. } => self.summary.failed_restores += 1,
            Event::Paused { .. } => self.stop_computing(),
            Event::Unpaused { .. } => self.compute(self.progress),
            Event::Ended { how, code } => self.ended_with(how, *code, entry.time),
        }
    }

    fn computing(&mut self, freeze: f64) {
        self.summary.froze(freeze);
        let progress = (self.progress_at(self.elapsed) - freeze).max(0.0);
        self.pending = Some(progress);
        self.compute(progress);
    }

    fn snapshot(&mut self, entry: &Entry) {
        let Event::Snapshot {
            image,
            trigger,
            freeze_seconds,
            durable_seconds,
            raw_bytes,
            stored_bytes,
            phases: _,
        } = &entry.event
        else {
            return;
        };
        // A job that is paused or stopped was frozen until the end of the snapshot.
        let progress = self.pending.take().unwrap_or_else(|| {
            self.progress = (self.progress_at(self.elapsed) - durable_seconds).max(self.progress);
            self.since = None;
            self.progress
        });
        self.durable = progress;
        self.images.insert(image.clone(), progress);
        if self.images.len() > IMAGES_MAX {
            self.images.pop_first();
        }
        self.summary.snapshots += 1;
        self.failed_in_a_row = 0;
        if self.freezes.len() == FREEZES_MAX {
            self.freezes.pop_front();
        }
        self.freezes.push_back(Freeze {
            time: entry.time,
            image: image.clone(),
            trigger: trigger.clone(),
            freeze_seconds: *freeze_seconds,
            durable_seconds: *durable_seconds,
            raw_bytes: *raw_bytes,
            stored_bytes: *stored_bytes,
        });
    }

    fn ended_with(&mut self, how: &str, code: u8, time: Timestamp) {
        self.end_attempt(AttemptEnd::Stop);
        self.before += self.elapsed;
        self.elapsed = 0.0;
        self.open = false;
        self.ended = Some((how.to_owned(), code, time));
    }
}

#[cfg(test)]
mod tests;
