//! Threads of long work: a snapshot, a restore, the continuation of a paused job, the record of a hung job's stacks.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::meter;
use super::perform::{Effects, Outcome, Processes};
use crate::restore::error::RestoreError;
use crate::restore::restore_image;
use crate::run::format::chain;
use crate::run::run_state::RunState;
use crate::snapshot::disk_space;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::paused::Refused;
use crate::snapshot::take_snapshot::{self, Subject};
use crate::store::ImageId;
use crate::supervisor::decide::action::SnapshotOrder;
use crate::supervisor::decide::event::{Event, Refusal, SnapshotEnd, Suspect};
use crate::supervisor::error::{RunError, system};
use crate::supervisor::hang::stack_report;
use crate::supervisor::hooks::before_snapshot::BeforeSnapshot;
use crate::supervisor::inbox::Message;
use crate::supervisor::notice::Notice;
use crate::sync::locked;

impl Effects {
    /// Begins a snapshot on its thread, unless the job's first process has exited: no hook is called then.
    pub(super) fn begin_snapshot(&mut self, order: SnapshotOrder, state: &RunState) -> Outcome {
        let SnapshotOrder {
            trigger,
            afterwards,
            hook_limit,
        } = order;
        let Some(job) = self.job().filter(|job| !job.has_ended()).map(Arc::clone) else {
            return Outcome::Event(Event::Leaving);
        };
        let run = state.started_unix_ms;
        let before = BeforeSnapshot::new(&self.context, run, trigger, afterwards, &self.inbox);
        self.hook = before.hold();
        if let Some(limit) = hook_limit {
            self.hook.shorten(limit);
        }
        let (context, streams) = (Arc::clone(&self.context), Arc::clone(&self.streams));
        let (standby, slot) = (Arc::clone(&self.standby), Arc::clone(&self.paused));
        let (meter, state) = (Arc::clone(&self.meter), state.clone());
        let inbox = self.inbox.clone();
        let work = move || {
            let computing = |freeze| {
                meter::job_released(&meter, &job);
                drop(inbox.blocking_send(Message::Event(Event::Computing(freeze))));
            };
            let subject = Subject {
                context: &context,
                standby: &standby,
                job: &job,
                streams: &streams,
                state: &state,
                trigger,
            };
            let take = AssertUnwindSafe(|| {
                if !before.allows() {
                    return Err(SnapshotError::Vetoed);
                }
                meter::snapshot_begins(&meter, &job);
                take_snapshot::take(subject, afterwards, computing)
            });
            let result = catch_unwind(take).unwrap_or(Err(SnapshotError::Panicked));
            let mut slowdown = Duration::ZERO;
            let mut paused = None;
            let result = result.map(|(done, pause)| {
                paused = pause;
                Box::new(done)
            });
            if paused.is_none() {
                job.left_alone();
            }
            if result.is_ok() {
                slowdown = meter::snapshot_ends(&meter, &job);
                disk_space::rotate(&context, &state);
            }
            let end = SnapshotEnd {
                result,
                paused: paused.is_some(),
                slowdown,
            };
            *locked(&slot) = paused;
            // The loop ends with the run only.
            let _ = inbox.blocking_send(Message::Event(Event::SnapshotEnded(Box::new(end))));
        };
        let thread = thread::Builder::new().name("snapshot".to_owned());
        match thread.spawn(work) {
            Ok(_) => Outcome::Notice(Notice::SnapshotBegan(trigger)),
            Err(error) => Outcome::Event(Event::SnapshotEnded(Box::new(SnapshotEnd {
                result: Err(SnapshotError::Prepare(error)),
                paused: false,
                slowdown: Duration::ZERO,
            }))),
        }
    }

    /// Restores the examined image on its thread.
    pub(super) fn bring_back(&mut self) -> Outcome {
        let Processes::Restoring(sandbox, restoring) = &mut self.processes else {
            return Outcome::None;
        };
        let Some(candidate) = restoring.candidate.take() else {
            return Outcome::None;
        };
        tracing::info!(image = %candidate.id, "restoring");
        let (context, streams) = (Arc::clone(&self.context), Arc::clone(&self.streams));
        let (sandbox, inbox) = (Arc::clone(sandbox), self.inbox.clone());
        let standby = Arc::clone(&self.standby);
        let work = move || {
            let restore =
                || restore_image::bring_back(&context, &standby, &sandbox, &streams, candidate);
            let result =
                catch_unwind(AssertUnwindSafe(restore)).unwrap_or(Err(RestoreError::Panicked));
            // The loop ends with the run only.
            let _ = inbox.blocking_send(Message::Event(Event::RestoreEnded(Box::new(result))));
        };
        let thread = thread::Builder::new().name("restore".to_owned());
        match thread.spawn(work) {
            Ok(_) => Outcome::None,
            Err(error) => {
                let error = RestoreError::Prepare(error);
                Outcome::Event(Event::RestoreEnded(Box::new(Err(error))))
            }
        }
    }

    /// Lets the paused job continue on a thread: the driver takes its time.
    pub(super) fn unpause(&mut self, image: ImageId) -> Result<(), RunError> {
        let Some(paused) = locked(&self.paused).take() else {
            return Ok(());
        };
        let (context, inbox) = (Arc::clone(&self.context), self.inbox.clone());
        let (standby, slot) = (Arc::clone(&self.standby), Arc::clone(&self.paused));
        let work = move || {
            let result = paused.unpause(&context, &standby, image);
            let result = result.map_err(|Refused { paused, why }| {
                let lost = paused.is_none();
                *locked(&slot) = paused.map(|paused| *paused);
                Refusal { why, lost }
            });
            // The loop ends with the run only.
            let _ = inbox.blocking_send(Message::Event(Event::Unpaused(result)));
        };
        // Without a thread, the job continues as the pause is dropped, and dies if it cannot.
        let thread = thread::Builder::new().name("unpause".to_owned());
        let thread = thread.spawn(work);
        thread.map(drop).map_err(system("start a thread"))
    }

    /// Records the stacks of the job on a thread.
    pub(super) fn diagnose(&mut self, suspect: Suspect) -> Outcome {
        let Some(job) = self.job().map(Arc::clone) else {
            return Outcome::Event(Event::Diagnosed(suspect, None));
        };
        let (context, inbox) = (Arc::clone(&self.context), self.inbox.clone());
        let work = move || {
            let write = || stack_report::write(&context, &job, &suspect.finding.to_string());
            let panicked = || Err(io::Error::other("a mistake in ckpt-run, please report it"));
            let log = catch_unwind(AssertUnwindSafe(write)).unwrap_or_else(|_| panicked());
            if let Err(error) = &log {
                tracing::warn!("cannot log what the job does: {}", chain(error));
            }
            // The loop ends with the run only.
            let _ = inbox.blocking_send(Message::Event(Event::Diagnosed(suspect, log.ok())));
        };
        let thread = thread::Builder::new().name("diagnosis".to_owned());
        if let Err(error) = thread.spawn(work) {
            tracing::warn!(%error, "cannot log what the job does");
            return Outcome::Event(Event::Diagnosed(suspect, None));
        }
        Outcome::None
    }
}
