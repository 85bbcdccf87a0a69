//! Writer of the event log and of the run's account. A log that cannot be written is reported once and never harms the
//! run.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::clock;
use crate::history::{self, Account, Entry, Event, Log, Phase};
use crate::job;
use crate::restore::restore_image::Restored;
use crate::run::format::chain;
use crate::run::image_facts;
use crate::run::run_state::Progress;
use crate::sandbox::{JobPids, Sandbox};
use crate::snapshot::take_snapshot::Snapshotted;
use crate::store::ImageId;
use crate::supervisor::error::RunError;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::policy::restart::ExitStatus;

/// The run's events, in the log and added up.
#[derive(Debug)]
pub(crate) struct Journal {
    /// Each with whether it was told that it cannot be written.
    logs: Vec<(Log, bool)>,
    account: Account,
    /// Time at which the supervisor began, shifted by the time that it was stopped.
    begun: Instant,
}

impl Journal {
    /// The chronicle in a store, and in another file if one is named; goes on with what the store's log has of the run.
    pub fn open(store: &Path, other: Option<&PathBuf>, run: u64) -> Self {
        let path = history::path(store);
        let account = Account::of(history::entries(&path));
        let logs = std::iter::once(path).chain(other.cloned());
        Self {
            logs: logs.map(|path| (Log::new(path), false)).collect(),
            account: Some(account)
                .filter(|account| account.run() == Some(run))
                .unwrap_or_default(),
            begun: clock::now(),
        }
    }

    /// The account so far.
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Seconds since the supervisor was opened, without those that it was stopped.
    pub fn elapsed(&self) -> f64 {
        (clock::now().saturating_duration_since(self.begun)).as_secs_f64()
    }

    /// The supervisor was stopped for so long, as was the job.
    pub fn stopped_for(&mut self, time: Duration) {
        self.begun += time;
    }

    fn tell(&mut self, run: u64, event: Event) {
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
                    tracing::warn!("{}: events are missing there", chain(&error));
                    *told = true;
                }
            }
        }
    }
}

impl Supervisor {
    /// Writes down what happened.
    pub fn tell(&mut self, event: Event) {
        self.journal.tell(self.state.started_unix_ms, event);
        self.metrics.news();
    }

    pub fn tell_opened(&mut self) {
        self.tell(Event::Opened {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            command: self.state.command.shown(),
        });
    }

    pub fn tell_started(&mut self, sandbox: &Sandbox, pids: JobPids) {
        let pid = host_pid(sandbox, pids);
        self.tell(Event::Started { pid });
    }

    pub fn tell_snapshot(&mut self, done: &Snapshotted) {
        self.tell(Event::Snapshot {
            image: done.id.to_string(),
            trigger: done.facts.trigger.as_str().to_owned(),
            freeze_seconds: done.freeze.as_secs_f64(),
            durable_seconds: done.total.as_secs_f64(),
            raw_bytes: done.raw_bytes,
            stored_bytes: done.stored_bytes,
            phases: phases(&done.facts.phases),
        });
    }

    pub fn tell_snapshot_failed(&mut self, kind: &str, reason: &str, job_goes_on: bool) {
        self.tell(Event::SnapshotFailed {
            kind: kind.to_owned(),
            reason: reason.to_owned(),
            job_goes_on,
        });
    }

    /// The job has crashed by itself: what it has to pass is told by the account, which is not told yet.
    pub fn crashed_here(&mut self) {
        let (account, now) = (&self.journal.account, self.journal.elapsed());
        let crash_progress = &mut self.background.crash_progress;
        crash_progress.crashed(account.progress_at(now), account.at_risk(now));
    }

    /// Returns true if the last reported image is past the point at which the job crashed.
    pub fn is_new_ground(&mut self) -> bool {
        let image = self.journal.account.durable();
        self.background.crash_progress.is_passed(image)
    }

    pub fn tell_crashed(&mut self, status: ExitStatus) {
        let lost_seconds = self.journal.account.at_risk(self.journal.elapsed());
        self.tell(Event::Crashed {
            code: status.code(),
            how: status.to_string(),
            lost_seconds,
        });
    }

    pub fn tell_restored(&mut self, id: ImageId, restored: &Restored) {
        self.tell(Event::Restored {
            image: id.to_string(),
            seconds: restored.total.as_secs_f64(),
            phases: phases(&restored.phases),
        });
    }

    /// The last event, and the run in a sentence for the user.
    pub fn tell_ended(&mut self, result: &Result<u8, RunError>) {
        let (how, code) = match (result, self.state.progress) {
            (Err(error), _) => ("error", error.exit_code()),
            (Ok(code), Progress::Finished) => ("finished", *code),
            (Ok(code), Progress::Failed { .. }) => ("failed", *code),
            (Ok(code), Progress::Saved | Progress::Running) => ("saved", *code),
        };
        let how = how.to_owned();
        self.tell(Event::Ended { how, code });
        self.metrics.end(&self.status_at_end(code));
        if result.is_ok() {
            let summary = self.journal.account.summary_then();
            tracing::info!("{}", summary.in_words());
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
