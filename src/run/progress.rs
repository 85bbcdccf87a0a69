//! The progress of a snapshot or restore: recorded by its threads, read by the display and the status.
//!
//! ```text
//! snapshot, restore ── begin, step, computing ──▶ Ongoing ◀── line ── display (the terminal)
//! the store ── bytes ──▶ its counters ────────────┘      ◀── now ─── status
//! ```
//! The working threads never wait here for a thread that reads or draws.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::format::{seconds, size};
use crate::clock;
use crate::store::ByteCounter;
use crate::sync::locked;

/// Minimum time for which a rate is shown: over a shorter time it would fluctuate.
const RATE_TIME_MIN: Duration = Duration::from_millis(200);

/// The kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// The job becomes an image.
    Snapshot,
    /// An image becomes the job.
    Restore,
}

/// A step of the work, named as in the line that is logged at the work's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// A snapshot gets memory and disk space; the job computes.
    Admit,
    /// GPU state is moved to host memory.
    Suspend,
    /// The processes are read.
    Dump,
    /// Device memory is read.
    Copy,
    /// GPU state is moved back.
    Resume,
    /// Device memory that was copied is collected; the job computes.
    Drain,
    /// The image becomes durable.
    Write,
    /// Files and streams are rolled back.
    Rewind,
    /// The processes are created.
    Restore,
}

/// The progress of a snapshot or restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkProgress {
    /// The kind of work.
    pub work: Work,
    /// The current step.
    pub step: Step,
    /// Bytes transferred in this step and in the steps that are measured together with it.
    pub bytes: u64,
    /// Approximate total number of bytes; null if it is unknown.
    pub bytes_expected: Option<u64>,
}

/// The snapshot or restore in progress, if any. Clones share their state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ongoing(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Notified when work begins or ends, and at the close.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    present: Option<Present>,
    /// True once nothing is reported any more.
    closed: bool,
}

#[derive(Clone, Debug)]
struct Present {
    work: Work,
    step: Step,
    since: Instant,
    bytes: Option<Bytes>,
    computes_again: bool,
    /// The freeze that is still to be reported, and the time at which the job began to compute.
    untold: Option<(Duration, Instant)>,
}

/// Bytes that are being transferred.
#[derive(Clone, Debug)]
struct Bytes {
    counter: ByteCounter,
    expected: Option<u64>,
    /// The number of bytes at the first measurement, and its time.
    begun: (u64, Instant),
}

/// A guard: the snapshot or restore lasts until it is dropped.
#[must_use]
pub(crate) struct Busy(Ongoing);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.lock().present = None;
        self.0.0.changed.notify_all();
    }
}

impl Ongoing {
    /// Begins work, with this step.
    pub fn begin(&self, work: Work, step: Step) -> Busy {
        self.lock().present = Some(Present {
            work,
            step,
            since: clock::now(),
            bytes: None,
            computes_again: false,
            untold: None,
        });
        self.0.changed.notify_all();
        Busy(self.clone())
    }

    /// Begins the next step.
    pub fn step(&self, step: Step) {
        if let Some(present) = &mut self.lock().present {
            present.step = step;
            present.since = clock::now();
        }
    }

    /// Measures these bytes from now on; about `expected` are to be transferred.
    pub fn measure(&self, counter: ByteCounter, expected: Option<u64>) {
        let begun = (counter.bytes(), clock::now());
        if let Some(present) = &mut self.lock().present {
            present.bytes = Some(Bytes {
                counter,
                expected,
                begun,
            });
        }
    }

    /// Records that the job of the snapshot computes again.
    pub fn computing(&self) {
        if let Some(present) = &mut self.lock().present {
            present.computes_again = true;
        }
    }

    /// Leaves the report that the job computes again to the display.
    pub(crate) fn tell_later(&self, freeze: Duration) {
        if let Some(present) = &mut self.lock().present {
            present.untold = Some((freeze, clock::now()));
        }
    }

    /// Returns the freeze that is still to be reported, if it ended at least `settled` ago.
    pub(crate) fn untold(&self, settled: Duration) -> Option<Duration> {
        let mut state = self.lock();
        let untold = &mut state.present.as_mut()?.untold;
        let due = |(_, since): &mut (Duration, Instant)| clock::now() - *since >= settled;
        untold.take_if(due).map(|(freeze, _)| freeze)
    }

    /// Returns the current progress.
    pub fn now(&self) -> Option<WorkProgress> {
        self.lock().present.as_ref().map(Present::stand)
    }

    /// Returns the current progress as a line for the user.
    pub(crate) fn line(&self, now: Instant) -> Option<String> {
        let state = self.lock();
        let present = state.present.as_ref().filter(|_| !state.closed)?;
        Some(present.line(now))
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.0.changed.notify_all();
    }

    /// Waits until there is work, and then for `pause` or until the work ends. Returns false once the progress is
    /// closed.
    pub(crate) fn wait_for_work(&self, pause: Duration) -> bool {
        let idle = |state: &mut State| state.present.is_none() && !state.closed;
        let busy = |state: &mut State| state.present.is_some() && !state.closed;
        let state = self.0.changed.wait_while(self.lock(), idle);
        let state = state.unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.changed.wait_timeout_while(state, pause, busy);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        !state.closed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.0.state)
    }
}

impl Present {
    fn stand(&self) -> WorkProgress {
        WorkProgress {
            work: self.work,
            step: self.step,
            bytes: self.bytes.as_ref().map_or(0, |bytes| bytes.counter.bytes()),
            bytes_expected: self.bytes.as_ref().and_then(|bytes| bytes.expected),
        }
    }

    fn line(&self, now: Instant) -> String {
        let work = match self.work {
            Work::Snapshot => "snapshot",
            Work::Restore => "restore",
        };
        let again = if self.computes_again {
            "the job computes again, "
        } else {
            ""
        };
        let spent = seconds(now.saturating_duration_since(self.since));
        let bytes = self
            .bytes
            .as_ref()
            .map_or_else(String::new, |bytes| bytes.text(now));
        format!(
            "ckpt-run: {work}: {again}{} {spent}{bytes}",
            self.step.as_str()
        )
    }
}

impl Bytes {
    /// Returns `, 1.5 GiB of 3.0 GiB, 1.1 GiB/s`; an empty string if nothing has been transferred yet.
    fn text(&self, now: Instant) -> String {
        let done = self.counter.bytes();
        if done == 0 {
            return String::new();
        }
        let mut text = format!(", {}", size(done));
        if let Some(expected) = self.expected.filter(|expected| *expected >= done) {
            text = format!("{text} of {}", size(expected));
        }
        let (before, since) = self.begun;
        let spent = now.saturating_duration_since(since);
        let passed = done.saturating_sub(before);
        let rate = u128::from(passed) * 1000 / spent.as_millis().max(1);
        match u64::try_from(rate) {
            Ok(rate) if spent >= RATE_TIME_MIN && rate > 0 => format!("{text}, {}/s", size(rate)),
            Ok(_) | Err(_) => text,
        }
    }
}

impl Step {
    /// Returns the word, as in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Admit => "admit",
            Self::Suspend => "suspend",
            Self::Dump => "dump",
            Self::Copy => "copy",
            Self::Resume => "resume",
            Self::Drain => "drain",
            Self::Write => "write",
            Self::Rewind => "rewind",
            Self::Restore => "restore",
        }
    }
}

#[cfg(test)]
mod tests {
    //! Tests of the reported progress.

    use super::*;

    #[test]
    fn line_has_step_bytes_rate_and_end_of_freeze() {
        let start = clock::now();
        let ongoing = Ongoing::default();
        assert_eq!((ongoing.line(start), ongoing.now()), (None, None));
        let busy = ongoing.begin(Work::Snapshot, Step::Admit);
        assert_eq!(
            ongoing.line(start).unwrap(),
            "ckpt-run: snapshot: admit 0.00s"
        );
        let store = crate::store::ByteCounter::default();
        ongoing.measure(store, Some(1 << 20));
        ongoing.step(Step::Dump);
        assert_eq!(
            ongoing.line(start).unwrap(),
            "ckpt-run: snapshot: dump 0.00s"
        );
        ongoing.computing();
        ongoing.step(Step::Write);
        assert_eq!(
            ongoing.line(start).unwrap(),
            "ckpt-run: snapshot: the job computes again, write 0.00s"
        );
        let stand = ongoing.now().unwrap();
        let told = serde_json::to_string(&stand).unwrap();
        assert_eq!(
            told,
            r#"{"work":"snapshot","step":"write","bytes":0,"bytes_expected":1048576}"#
        );
        drop(busy);
        assert_eq!((ongoing.line(start), ongoing.now()), (None, None));
    }

    #[test]
    fn bytes_are_shown_with_their_rate_if_known() {
        let start = clock::now();
        let counter = ByteCounter::default();
        let bytes = |expected| Bytes {
            counter: counter.clone(),
            expected,
            begun: (1 << 20, start),
        };
        assert_eq!(bytes(None).text(start), "");
        counter.add(3 << 20);
        let later = start + Duration::from_secs(2);
        assert_eq!(bytes(None).text(start), ", 3.0 MiB");
        assert_eq!(
            bytes(Some(4 << 20)).text(later),
            ", 3.0 MiB of 4.0 MiB, 1.0 MiB/s"
        );
        // More bytes than expected.
        assert_eq!(bytes(Some(2 << 20)).text(later), ", 3.0 MiB, 1.0 MiB/s");
    }

    #[test]
    fn freeze_is_reported_once_after_the_output_settles() {
        let ongoing = Ongoing::default();
        let freeze = Duration::from_secs(1);
        ongoing.tell_later(freeze);
        assert_eq!(ongoing.untold(Duration::ZERO), None);
        let busy = ongoing.begin(Work::Snapshot, Step::Dump);
        ongoing.tell_later(freeze);
        assert_eq!(ongoing.untold(Duration::from_secs(3600)), None);
        assert_eq!(ongoing.untold(Duration::ZERO), Some(freeze));
        assert_eq!(ongoing.untold(Duration::ZERO), None);
        // The line at the end of the work, which includes the freeze, was logged.
        ongoing.tell_later(freeze);
        drop(busy);
        assert_eq!(ongoing.untold(Duration::ZERO), None);
    }

    #[test]
    fn wait_for_work_ends_with_the_close() {
        let ongoing = Ongoing::default();
        ongoing.close();
        assert!(!ongoing.wait_for_work(Duration::ZERO));
        let ongoing = Ongoing::default();
        let _busy = ongoing.begin(Work::Restore, Step::Rewind);
        assert!(ongoing.wait_for_work(Duration::ZERO));
    }
}
