//! Report of a freeze that does not end: the job's user sees a job that hangs, and nothing else says why.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use crate::clock;
use crate::run::progress::Ongoing;

/// Longest time before the first report.
const FIRST_MAX: Duration = Duration::from_secs(60);
/// The first report comes after this part of the time that each step may take (`snapshot.timeout`).
const SHARE: u32 = 2;

/// Reports the freeze in the log until this value is dropped, at growing intervals.
#[must_use = "dropped, nothing is reported"]
pub(super) struct LongFreeze {
    /// Its drop ends the reports.
    _over: Sender<()>,
}

impl LongFreeze {
    /// Watches a freeze that begins now; `limit` is `snapshot.timeout`. Without a thread nothing is reported.
    pub fn watch(ongoing: &Ongoing, limit: Duration) -> Self {
        let (over, is_over) = mpsc::channel();
        let ongoing = ongoing.clone();
        let begun = clock::now();
        let report = move || {
            let mut pause = FIRST_MAX.min(limit / SHARE);
            while let Err(RecvTimeoutError::Timeout) = is_over.recv_timeout(pause) {
                let step = ongoing.now().map_or("", |now| now.step.as_str());
                tracing::warn!(
                    step,
                    "a snapshot has kept the job frozen for {} s; if that does not end, kill ckpt-run (SIGKILL) and start \
                     it again: the job continues from its newest image",
                    begun.elapsed().as_secs()
                );
                pause = begun.elapsed();
            }
        };
        let _ = thread::Builder::new()
            .name("long-freeze".to_owned())
            .spawn(report);
        Self { _over: over }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns true if the thread of a report is there.
    fn is_watched() -> bool {
        let tasks = procfs::process::Process::myself().unwrap().tasks().unwrap();
        let mut names = tasks.filter_map(|task| Some(task.ok()?.stat().ok()?.comm));
        names.any(|name| name == "long-freeze")
    }

    #[test]
    fn the_watch_ends_with_the_freeze() {
        let watch = LongFreeze::watch(&Ongoing::default(), Duration::from_secs(3600));
        while !is_watched() {
            thread::yield_now();
        }
        drop(watch);
        while is_watched() {
            thread::yield_now();
        }
    }
}
