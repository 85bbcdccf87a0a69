//! Starts and restores of the job. `restorable_images` lists the images.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use crate::clock;
use crate::config;
use crate::cuda;
use crate::job::InputMark;
use crate::restore::error::RestoreError;
use crate::restore::huge_pages;
use crate::restore::restore_image::{self, Candidate, Restored};
use crate::run::environment::{self, Setting};
use crate::run::format::{chain, seconds, size};
use crate::run::own_activity::OwnActivity;
use crate::run::program::ProgramError;
use crate::run::run_state::RunState;
use crate::run::running_job::Job;
use crate::sandbox::{
    Ended, IoUring, Isolation, JobPids, Sandbox, SandboxError, SpawnError, privilege_missing,
};
use crate::store::ImageId;
use crate::supervisor::error::{RunError, system};
use crate::supervisor::event::Event;
use crate::supervisor::event_loop::{Supervisor, now};
use crate::supervisor::policy::schedule::Snapshotted as LastSnapshot;
use crate::supervisor::stage::{AfterEnd, AfterWait, Restoring, Running, Stage};

/// Limit on the files that are named, a line each, when a restore has cut them.
const CUT_NAMED_MAX: usize = 5;

impl Supervisor {
    /// Starts the job from the beginning.
    pub fn start(&mut self) -> Result<(), RunError> {
        let sandbox = self.new_sandbox(None)?;
        let mut streams = self.streams();
        if !streams.stdin.rewind(&InputMark::default()) {
            tracing::warn!("stdin goes on with what comes next: its beginning is forgotten");
        }
        let connect = system("make the job's standard streams");
        let ends = streams.connect(&sandbox).map_err(&connect)?;
        let user = self.context.user.as_ref();
        if let Some(user) = user {
            ends.iter()
                .try_for_each(|end| user.own(end))
                .map_err(&connect)?;
        }
        let io_uring = match self.context.config.sandbox.io_uring {
            config::IoUring::Hide => IoUring::Hide,
            config::IoUring::Allow => IoUring::Allow,
        };
        let anew = self.context.files.begin_anew();
        anew.map_err(system("forget the record of the job's files"))?;
        self.context.watch(&sandbox);
        let credentials = user.map(|user| &user.credentials);
        sandbox.start_job(&self.context.command, io_uring, credentials, &ends)?;
        streams.open();
        drop(streams);
        self.restored_from = None;
        self.stage = Stage::Starting(sandbox);
        Ok(())
    }

    /// A sandbox for a new job, or of the kind that an image wants.
    fn new_sandbox(&mut self, wanted: Option<Isolation>) -> Result<Arc<Sandbox>, RunError> {
        let (first, or_none) = match (wanted, self.context.config.isolation) {
            (Some(isolation), _) => (isolation, false),
            (None, config::Isolation::Auto) => (Isolation::Namespaces, true),
            (None, config::Isolation::Namespaces) => (Isolation::Namespaces, false),
            (None, config::Isolation::None) => (Isolation::None, false),
        };
        match self.try_sandbox(first) {
            Err(error) if or_none && is_privilege(&error) => {
                tracing::warn!(
                    "running without isolation, because {}: a restore works only while the job's pids are free",
                    chain(&error)
                );
                Ok(self.try_sandbox(Isolation::None)?)
            }
            other => Ok(other?),
        }
    }

    fn try_sandbox(&mut self, isolation: Isolation) -> Result<Arc<Sandbox>, SandboxError> {
        self.serial += 1;
        let (serial, events) = (self.serial, self.events.clone());
        let job = self.state.started_unix_ms.to_string();
        let store = self.context.store.path();
        let mut settings = self.for_nccl();
        settings.extend(environment::for_hwloc(cuda::device_count(), |name| {
            std::env::var_os(name)
        }));
        let mut environment = environment::for_job(std::env::vars_os(), store, &job, &settings);
        if let Some((library, token)) = &self.context.agent {
            environment::preload(&mut environment, library, token);
        }
        if let Some(user) = &self.context.user {
            environment::set_user(&mut environment, user);
        }
        Sandbox::start(
            &self.context.program,
            isolation,
            &environment,
            move |news| {
                // The loop only ends with the run.
                let _ = events.blocking_send(Event::Sandbox(serial, news));
            },
        )
    }

    fn for_nccl(&self) -> Vec<Setting> {
        let choice = self.context.config.cuda.nccl;
        environment::for_nccl(choice, cuda::device_count(), |name| std::env::var_os(name))
    }

    pub fn started(&mut self, pids: JobPids) -> Result<(), RunError> {
        let Stage::Starting(sandbox) = &self.stage else {
            return Ok(());
        };
        let job = Arc::new(Job {
            sandbox: Arc::clone(sandbox),
            pids,
            token: self.context.agent.as_ref().map(|(_, token)| *token),
            moved: Vec::new(),
            own_activity: OwnActivity::default(),
        });
        self.tell_started(&job.sandbox, pids);
        tracing::info!(
            store = %self.context.store.path().display(),
            command = %self.state.command,
            "job started"
        );
        let nccl = self.for_nccl();
        if !nccl.is_empty() {
            let set: Vec<String> = nccl
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            let set = set.join(" ");
            if self.context.config.cuda.nccl == config::Nccl::Peer {
                tracing::info!(%set, "NCCL shares memory between GPUs in a way that comes back on the same GPUs");
            } else {
                tracing::info!(
                    %set,
                    "NCCL shares no memory between GPUs, so that the job can be snapshotted and comes back on any; \
                     cuda.nccl = \"peer\" is faster and comes back on the same GPUs, \"off\" leaves it alone"
                );
            }
        }
        self.now_running(job, None, false);
        self.suspend_when_idle();
        self.snapshot_when_idle()
    }

    /// The kernel did not execute the job's program.
    pub fn not_started(&mut self, errno: i32) -> Result<(), RunError> {
        let program = self.context.command.first().map(PathBuf::from);
        Err(ProgramError::NotStarted {
            program: program.unwrap_or_default(),
            source: io::Error::from_raw_os_error(errno),
        }
        .into())
    }

    pub fn start_failed(&mut self, operation: String, errno: i32) -> Result<(), RunError> {
        if !matches!(self.stage, Stage::Starting(_)) {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(errno);
        Err(SandboxError::Step { operation, source }.into())
    }

    fn now_running(&mut self, job: Arc<Job>, ended: Option<Ended>, gone: bool) {
        self.last = LastSnapshot::not_yet(now());
        self.stage = Stage::Running(Running {
            job,
            busy: None,
            pause: None,
            leaving: None,
            ended,
            gone,
        });
        self.watch_anew();
    }

    /// The run was begun by an earlier supervisor.
    pub fn resume_run(&mut self) -> Result<(), RunError> {
        let available = self.to_restore()?;
        if available.is_empty() {
            let start = self.context.config.restart.without_image == config::WithoutImage::Start;
            if self.any_images()? && !start {
                return Err(RunError::NothingRestorable);
            }
            tracing::info!("the run was begun before but has no image yet: it begins anew");
            return self.start();
        }
        self.restore_one_of(available, 0)
    }

    /// Restores this image once more; if that fails, an older one.
    fn retry(&mut self, id: ImageId, skip_newest: usize) -> Result<(), RunError> {
        match restore_image::examine(&self.context, &self.standby, id) {
            Ok(candidate) => self.begin_restore(candidate, skip_newest),
            Err(error) => {
                self.image_failed(id, error)?;
                self.restore_from(skip_newest)
            }
        }
    }

    /// Restores this image; when that fails, no other, and the run does not go on.
    pub fn restore_this(&mut self, id: ImageId) -> Result<(), RunError> {
        self.chosen = Some(id);
        match restore_image::examine(&self.context, &self.standby, id) {
            Ok(candidate) => self.begin_restore(candidate, 0),
            Err(error) => self.image_failed(id, error),
        }
    }

    /// Sets the run back to where it was `before`, if the requested image was not restored.
    pub fn leave_as_it_was(&self, before: Option<&RunState>) {
        let Some((_, before)) = self.chosen.zip(before) else {
            return;
        };
        if let Err(error) = before.save(self.context.store.path()) {
            tracing::warn!("the run counts as gone back: {}", chain(&error));
        }
    }

    /// Restores the newest image that can be, but `skip_newest`.
    pub fn restore_from(&mut self, skip_newest: usize) -> Result<(), RunError> {
        let available = self.to_restore()?;
        self.restore_one_of(available, skip_newest)
    }

    fn restore_one_of(&mut self, images: Vec<ImageId>, skip_newest: usize) -> Result<(), RunError> {
        for id in images.into_iter().rev().skip(skip_newest) {
            match restore_image::examine(&self.context, &self.standby, id) {
                Ok(candidate) => return self.begin_restore(candidate, skip_newest),
                Err(error) => self.image_failed(id, error)?,
            }
        }
        // Those that were skipped are better than none.
        let all = self.available()?;
        if skip_newest > 0 && !all.is_empty() {
            return self.restore_one_of(all, 0);
        }
        if !self.refused.is_empty()
            || self.context.config.restart.without_image == config::WithoutImage::GiveUp
        {
            return Err(RunError::NothingRestorable);
        }
        tracing::warn!("no image could be restored: the job begins anew");
        self.start()
    }

    fn begin_restore(&mut self, candidate: Candidate, skip_newest: usize) -> Result<(), RunError> {
        let id = candidate.id;
        let (isolation, pids) = (candidate.facts.isolation(), candidate.facts.pids);
        let token = candidate.facts.token;
        let sandbox = self.new_sandbox(Some(isolation))?;
        self.abandon_newer(id)?;
        tracing::info!(image = %id, "restoring");
        let (context, streams) = (Arc::clone(&self.context), Arc::clone(&self.streams));
        let (fresh, events) = (Arc::clone(&sandbox), self.events.clone());
        let standby = Arc::clone(&self.standby);
        let work = move || {
            let restore =
                || restore_image::bring_back(&context, &standby, &fresh, &streams, candidate);
            let result =
                catch_unwind(AssertUnwindSafe(restore)).unwrap_or(Err(RestoreError::Panicked));
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::RestoreEnded(Box::new(result)));
        };
        let thread = thread::Builder::new().name("restore".to_owned());
        if let Err(error) = thread.spawn(work) {
            self.revert_return();
            return Err(system("start a thread")(error));
        }
        self.restore.begin();
        self.stage = Stage::Restoring(Restoring {
            sandbox,
            id,
            pids,
            token,
            skip_newest,
            ended: None,
            gone: false,
        });
        Ok(())
    }

    pub fn restore_ended(
        &mut self,
        result: Result<Restored, RestoreError>,
    ) -> Result<(), RunError> {
        let drain_is_due = self.restore.ended();
        if result
            .as_ref()
            .err()
            .is_none_or(RestoreError::job_may_have_run)
        {
            self.restore.job_ran();
        }
        let Stage::Restoring(restoring) = &mut self.stage else {
            return if drain_is_due { self.drain() } else { Ok(()) };
        };
        // An image without device memory has not taken it.
        self.standby.dismiss();
        let id = restoring.id;
        match result {
            Ok(restored) => {
                let job = Arc::new(Job {
                    sandbox: Arc::clone(&restoring.sandbox),
                    pids: restoring.pids,
                    token: restoring.token.take(),
                    moved: restored.moved.clone(),
                    own_activity: OwnActivity::default(),
                });
                let (ended, gone) = (restoring.ended, restoring.gone);
                huge_pages::give_back(&self.context, &job);
                self.chosen = None;
                self.now_running(job, ended, gone);
                report(id, &restored);
                self.tell_restored(id, &restored);
                self.after_restore(id);
                if let Some(reply) = self.unpausing.take() {
                    let _ = reply.send(Ok(())); // a client that went away
                }
                self.restored_from = Some(id);
                self.state.restarts += 1;
                self.remember();
                self.suspend_when_idle();
                self.settle()?;
                self.snapshot_when_idle()
            }
            Err(error) => {
                restoring.sandbox.kill();
                let (gone, skip_newest) = (restoring.gone, restoring.skip_newest);
                self.restore.fail(id, error);
                self.stage = Stage::Ending(AfterEnd::NextImage { skip_newest });
                if gone { self.drain() } else { Ok(()) }
            }
        }
    }

    pub fn backoff_over(&mut self) -> Result<(), RunError> {
        let Stage::Waiting { then, .. } = self.stage else {
            return Ok(());
        };
        self.stage = Stage::Idle;
        if let AfterWait::Retry { id, skip_newest } = then {
            return self.retry(id, skip_newest);
        }
        // Here alone: what somebody asked for is no restart.
        self.budget.restarted();
        if let AfterWait::Restore { skip_newest } = then {
            return self.restore_from(skip_newest);
        }
        self.state.restarts += 1;
        // A new life from the beginning: images of the old one do not belong to it.
        let life = clock::unix_ms().max(self.state.started_unix_ms + 1);
        // Without a list, any of them may be its own.
        let images = self.context.store.images().unwrap_or_default();
        self.state.begin_attempt(life, &images);
        self.remember();
        self.start()
    }
}

fn is_privilege(error: &SandboxError) -> bool {
    match error {
        SandboxError::Spawn(SpawnError::NotPermitted(_)) => true,
        SandboxError::Step { source, .. } => source.raw_os_error().is_some_and(privilege_missing),
        _ => false,
    }
}

fn report(id: ImageId, restored: &Restored) {
    let cut = &restored.cut;
    if cut.len() > CUT_NAMED_MAX {
        let bytes = cut.iter().map(|cut| cut.bytes).sum();
        let kept = cut.first().and_then(|cut| cut.kept.parent());
        tracing::info!(
            files = cut.len(),
            bytes = %size(bytes),
            kept = %kept.unwrap_or(Path::new("")).display(),
            "kept aside what came after the snapshot"
        );
    }
    for cut in cut.iter().take_while(|_| cut.len() <= CUT_NAMED_MAX) {
        tracing::info!(
            file = %cut.path.display(),
            bytes = %size(cut.bytes),
            kept = %cut.kept.display(),
            "kept aside what came after the snapshot"
        );
    }
    if restored.input_lost {
        tracing::warn!(
            "stdin goes on with what comes next: what the job may have read since the snapshot it does not read again"
        );
    }
    let phases: Vec<String> = restored
        .phases
        .iter()
        .map(|phase| format!("{} {:.3}", phase.name, phase.seconds))
        .collect();
    tracing::info!(image = %id, took = %seconds(restored.total), phases = %phases.join(", "), "restored");
}
