//! Threads of long work: a snapshot, a restore, the continuation of a paused job, the record of a hung job's stacks.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc::Sender;

use super::meter::{self, Meter};
use super::perform::{Effects, Outcome, Processes};
use crate::config::Occasion;
use crate::gpu::resident::Standby;
use crate::restore::error::RestoreError;
use crate::restore::restore_image;
use crate::run::format::chain;
use crate::run::run_context::RunContext;
use crate::run::run_state::RunState;
use crate::run::running_job::{Job, SharedStreams};
use crate::snapshot::disk_space;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::paused::{Paused, Refused};
use crate::snapshot::take_snapshot::{self, Afterwards, Snapshotted, Subject};
use crate::store::ImageId;
use crate::supervisor::decide::action::SnapshotOrder;
use crate::supervisor::decide::event::{Event, Refusal, SnapshotEnd, Suspect};
use crate::supervisor::error::{RunError, system};
use crate::supervisor::hang::stack_report;
use crate::supervisor::hooks::hook_command::{self, Call};
use crate::supervisor::hooks::process_group::HookHold;
use crate::supervisor::inbox::Message;
use crate::supervisor::notice::Notice;
use crate::sync::locked;

impl Effects {
    /// Begins a snapshot on its thread, unless the job's first process has exited: no hook is called then.
    pub(super) fn begin_snapshot(&mut self, order: SnapshotOrder, state: &RunState) -> Outcome {
        let SnapshotOrder {
            trigger,
            hook_limit,
            ..
        } = order;
        let Some(job) = self.job().filter(|job| !job.has_ended()).map(Arc::clone) else {
            return Outcome::Event(Event::Leaving);
        };
        let run = state.started_unix_ms;
        let facts = vec![("CKPT_RUN_TRIGGER", trigger.as_str().into())];
        let hook = Call::new(&self.context, run, Occasion::BeforeSnapshot, facts);
        self.hook = HookHold(hook.as_ref().map(|call| Arc::clone(&call.hook_group)));
        if let Some(limit) = hook_limit {
            self.hook.shorten(limit);
        }
        let work = SnapshotWork {
            context: Arc::clone(&self.context),
            standby: Arc::clone(&self.standby),
            streams: Arc::clone(&self.streams),
            paused: Arc::clone(&self.paused),
            meter: Arc::clone(&self.meter),
            inbox: self.inbox.clone(),
            job,
            state: state.clone(),
            hook,
            order,
        };
        match on_thread("snapshot", move || work.run()) {
            Ok(()) => Outcome::Notice(Notice::SnapshotBegan(trigger)),
            Err(error) => Outcome::Event(Event::SnapshotEnded(Box::new(SnapshotEnd {
                result: Err(SnapshotError::Prepare(error)),
                paused: false,
                slowdown: Duration::ZERO,
                is_synced: true,
            }))),
        }
    }

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
            let failure = result.as_ref().err();
            if let Some(remote) = &context.remote
                && failure.is_none_or(RestoreError::job_may_have_run)
            {
                remote.has_returned();
            }
            report(&inbox, Event::RestoreEnded(Box::new(result)));
        };
        match on_thread("restore", work) {
            Ok(()) => Outcome::None,
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
            report(&inbox, Event::Unpaused(result));
        };
        // Without a thread, the job continues as the pause is dropped, and dies if it cannot.
        on_thread("unpause", work).map_err(system("start a thread"))
    }

    /// Delivers what the dead job had written, and reverts the streams after a failed restore, on a thread: the reader of
    /// the output may be slow.
    pub(super) fn drain(&self) -> Result<(), RunError> {
        let (streams, inbox) = (Arc::clone(&self.streams), self.inbox.clone());
        let work = move || {
            let mut streams = locked(&streams);
            streams.disconnect_terminal();
            let (stdout, stderr) = (streams.stdout.drain(), streams.stderr.drain());
            drop(streams);
            stdout();
            stderr();
            report(&inbox, Event::Drained);
        };
        on_thread("drain", work).map_err(system("start a thread"))
    }

    pub(super) fn diagnose(&mut self, suspect: Suspect) -> Outcome {
        let Some(job) = self.job().map(Arc::clone) else {
            return Outcome::Event(Event::Diagnosed(suspect, None));
        };
        let (context, inbox) = (Arc::clone(&self.context), self.inbox.clone());
        let work = move || {
            let why = suspect.finding.to_string();
            let write = || stack_report::write(&context, &job, &why);
            let panicked = || Err(io::Error::other("a bug in ckpt-run, please report it"));
            let log = job.disturbed(|| catch_unwind(AssertUnwindSafe(write)));
            let log = log.unwrap_or_else(|_| panicked());
            if let Err(error) = &log {
                tracing::warn!("cannot write the report on the hung job: {}", chain(error));
            }
            report(&inbox, Event::Diagnosed(suspect, log.ok()));
        };
        if let Err(error) = on_thread("diagnosis", work) {
            tracing::warn!(%error, "cannot write the report on the hung job");
            return Outcome::Event(Event::Diagnosed(suspect, None));
        }
        Outcome::None
    }
}

fn on_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(work).map(drop)
}

/// Reports to the loop, which ends with the run only.
fn report(inbox: &Sender<Message>, event: Event) {
    let _ = inbox.blocking_send(Message::Event(event));
}

/// A snapshot, for its thread.
struct SnapshotWork {
    context: Arc<RunContext>,
    standby: Arc<Standby>,
    streams: SharedStreams,
    paused: Arc<Mutex<Option<Paused>>>,
    meter: Arc<Mutex<Meter>>,
    inbox: Sender<Message>,
    job: Arc<Job>,
    state: RunState,
    /// The hook before it, if one is configured.
    hook: Option<Call>,
    order: SnapshotOrder,
}

impl SnapshotWork {
    /// Takes the snapshot and reports its end. A paused job is handed over before that.
    fn run(self) {
        let take = AssertUnwindSafe(|| self.take());
        let result = catch_unwind(take).unwrap_or(Err(SnapshotError::Panicked));
        let (result, paused) = match result {
            Ok((done, paused)) => (Ok(Box::new(done)), paused),
            Err(error) => (Err(error), None),
        };
        if paused.is_none() {
            self.job.left_alone();
        }
        let mut slowdown = Duration::ZERO;
        if result.is_ok() {
            slowdown = locked(&self.meter).snapshot_ends(meter::read(&self.job));
            disk_space::rotate(&self.context, &self.state);
        }
        let is_synced = result.as_ref().map_or(true, |done| self.sync(done.id));
        let end = SnapshotEnd {
            result,
            paused: paused.is_some(),
            slowdown,
            is_synced,
        };
        *locked(&self.paused) = paused;
        report(&self.inbox, Event::SnapshotEnded(Box::new(end)));
    }

    /// Waits for the upload of an image, if the settings want that, while the job computes. The end of a run waits for
    /// the last one itself.
    fn sync(&self, image: ImageId) -> bool {
        match &self.context.remote {
            Some(remote)
                if self.context.config.remote.sync && self.order.afterwards != Afterwards::Stop =>
            {
                remote.upload_and_wait(image, &|| self.job.has_ended())
            }
            Some(_) | None => true,
        }
    }

    fn take(&self) -> Result<(Snapshotted, Option<Paused>), SnapshotError> {
        if self.is_vetoed() {
            return Err(SnapshotError::Vetoed);
        }
        locked(&self.meter).snapshot_begins(meter::read(&self.job));
        let subject = Subject {
            context: &self.context,
            standby: &self.standby,
            job: &self.job,
            streams: &self.streams,
            state: &self.state,
            trigger: self.order.trigger,
        };
        take_snapshot::take(subject, self.order.afterwards, |freeze| {
            locked(&self.meter).job_released(meter::read(&self.job));
            report(&self.inbox, Event::Computing(freeze));
        })
    }

    /// Runs the hook. The snapshot before a stop cannot be cancelled.
    fn is_vetoed(&self) -> bool {
        let Some(call) = &self.hook else {
            return false;
        };
        let ended = call.run();
        let vetoes = ended.outcome == hook_command::Outcome::Veto;
        // The loop ends with the run only.
        let _ = self.inbox.blocking_send(Message::HookEnded(ended));
        vetoes && self.order.afterwards != Afterwards::Stop
    }
}
