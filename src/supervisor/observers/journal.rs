//! Writer of the event log and of the run's account. A log that cannot be written is reported once and never harms the
//! run.

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::clock;
use crate::history::{self, Account, Entry, Event, Log, Phase};
use crate::job;
use crate::run::format::chain;
use crate::run::image_facts;
use crate::sandbox::{JobPids, Sandbox};
use crate::supervisor::notice::{AfterSnapshotFailure, Notice};
use crate::supervisor::policy::crash_progress::CrashProgress;
use crate::supervisor::policy::restart::ExitStatus;

/// The run's events, in the log and added up.
#[derive(Debug)]
pub(crate) struct Journal {
    /// The logs. True if a failure to write one was reported.
    logs: Vec<(Log, bool)>,
    pub account: Account,
    crash_progress: CrashProgress,
    /// Time at which the supervisor began, shifted by the time that it was stopped.
    begun: Instant,
}

impl Journal {
    /// Opens the log in a store, and another one if it is named. Continues the account of the run in the store's log.
    pub fn open(store: &Path, other: Option<&PathBuf>, run: u64) -> Self {
        let path = history::path(store);
        let account = Account::of(history::entries(&path));
        let logs = std::iter::once(path).chain(other.cloned());
        Self {
            logs: logs.map(|path| (Log::new(path), false)).collect(),
            account: Some(account)
                .filter(|account| account.run() == Some(run))
                .unwrap_or_default(),
            crash_progress: CrashProgress::default(),
            begun: clock::now(),
        }
    }

    /// Seconds since the supervisor was opened, without those that it was stopped.
    pub fn elapsed(&self) -> f64 {
        (clock::now().saturating_duration_since(self.begun)).as_secs_f64()
    }

    /// Returns true if the newest image is past the point of the last crash.
    pub fn is_new_ground(&mut self) -> bool {
        self.crash_progress.is_passed(self.account.durable())
    }

    /// Records a notice of this run, if it is for the log.
    pub fn notice(&mut self, run: u64, notice: &Notice) {
        match notice {
            Notice::Stopped(time) => self.begun += *time,
            // A kill from outside says nothing about the place of the job.
            Notice::Crashed(status) if *status != ExitStatus::Signaled(nix::libc::SIGKILL) => {
                let (account, now) = (&self.account, self.elapsed());
                let (place, beyond_image) = (account.progress_at(now), account.at_risk(now));
                self.crash_progress.crashed(place, beyond_image);
            }
            _ => {}
        }
        if let Some(event) = self.event_of(notice) {
            self.append(run, event);
        }
    }

    fn event_of(&self, notice: &Notice) -> Option<Event> {
        Some(match notice {
            Notice::Opened { command } => Event::Opened {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                command: command.clone(),
            },
            Notice::Started(pid) => Event::Started { pid: *pid },
            Notice::Preempted(notice) => Event::Preempted {
                cloud: notice.cloud.as_str().to_owned(),
                action: notice.action.as_str().to_owned(),
                deadline: notice.deadline,
            },
            Notice::SnapshotBegan(trigger) => Event::SnapshotBegan {
                trigger: trigger.as_str().to_owned(),
            },
            Notice::Computing { freeze, .. } => Event::Computing {
                freeze_seconds: freeze.as_secs_f64(),
            },
            Notice::Snapshot(done) => Event::Snapshot {
                image: done.id.to_string(),
                trigger: done.facts.trigger.as_str().to_owned(),
                freeze_seconds: done.freeze.as_secs_f64(),
                durable_seconds: done.total.as_secs_f64(),
                raw_bytes: done.raw_bytes,
                stored_bytes: done.stored_bytes,
                phases: phases(&done.facts.phases),
            },
            Notice::SnapshotFailed { kind, reason, then } => Event::SnapshotFailed {
                kind: (*kind).to_owned(),
                reason: reason.clone(),
                job_goes_on: match then {
                    AfterSnapshotFailure::Ended | AfterSnapshotFailure::Killed => false,
                    AfterSnapshotFailure::Vetoed | AfterSnapshotFailure::Continues { .. } => true,
                },
            },
            Notice::Paused(image) => Event::Paused {
                image: image.to_string(),
            },
            Notice::Unpaused(took) => Event::Unpaused {
                seconds: took.as_secs_f64(),
            },
            Notice::RestoreBegan(image) => Event::RestoreBegan {
                image: image.to_string(),
            },
            Notice::Restored { image, restored } => Event::Restored {
                image: image.to_string(),
                seconds: restored.total.as_secs_f64(),
                phases: phases(&restored.phases),
            },
            Notice::RestoreFailed { image, reason, .. } => Event::RestoreFailed {
                image: image.to_string(),
                reason: reason.clone(),
            },
            Notice::Crashed(status) => Event::Crashed {
                code: status.code(),
                how: status.to_string(),
                lost_seconds: self.account.at_risk(self.elapsed()),
            },
            Notice::Hung { reason, silent, .. } => Event::Hung {
                reason: reason.clone(),
                silent_seconds: silent.as_secs_f64(),
            },
            Notice::Interval(chosen) => Event::Interval {
                seconds: chosen.interval.as_secs_f64(),
                why: chosen.to_string(),
            },
            Notice::HookEnded(ended) => Event::Hook {
                hook: ended.occasion.as_str().to_owned(),
                outcome: ended.outcome.as_str().to_owned(),
                seconds: ended.took.as_secs_f64(),
            },
            Notice::Ended { how, code, .. } => Event::Ended {
                how: (*how).to_owned(),
                code: *code,
            },
            _ => return None,
        })
    }

    fn append(&mut self, run: u64, event: Event) {
        let entry = Entry {
            time: clock::timestamp(),
            elapsed: self.elapsed(),
            run,
            event,
        };
        self.account.add(&entry);
        for (log, told) in &mut self.logs {
            match log.append(&entry) {
                Ok(()) => {}
                Err(error) if *told => tracing::debug!("{}", chain(&error)),
                Err(error) => {
                    tracing::warn!("{}; this log lacks events", chain(&error));
                    *told = true;
                }
            }
        }
    }
}

fn phases(phases: &[image_facts::Phase]) -> Vec<Phase> {
    let phase = |phase: &image_facts::Phase| Phase {
        name: phase.name.clone(),
        seconds: phase.seconds,
    };
    phases.iter().map(phase).collect()
}

/// The job's own first process, as the machine sees it.
pub(crate) fn host_pid(sandbox: &Sandbox, pids: JobPids) -> Option<i32> {
    let root = job::child_with_pid(sandbox.pid(), pids.root).ok()?;
    job::child_with_pid(root, pids.job).ok()
}
