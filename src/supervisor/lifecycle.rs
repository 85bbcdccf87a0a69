//! The job's beginnings and ends: start, restore, crash, exit.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use super::describe::{chain, seconds, size};
use super::environment;
use super::event::Event;
use super::program::ProgramError;
use super::restart::{Decision, ExitStatus, Images, decide};
use super::restore::{self, Candidate, RestoreError, Restored};
use super::run::{RunError, system};
use super::run_state::Progress;
use super::schedule::Snapshotted as LastSnapshot;
use super::supervise::{AfterEnd, Restoring, Running, Stage, Stopping, Supervisor, now};
use super::workshop::Job;
use crate::clock;
use crate::config;
use crate::sandbox::{
    Ended, Isolation, JobPids, Sandbox, SandboxError, SpawnError, privilege_missing,
};
use crate::store::ImageId;

impl Supervisor {
    /// Starts the job from the beginning.
    pub fn start(&mut self) -> Result<(), RunError> {
        let sandbox = self.new_sandbox(None)?;
        let mut streams = self.streams();
        let connect = system("make the job's standard streams");
        let stdin = streams.stdin.connect().map_err(&connect)?;
        let [stdout, stderr] = streams.connect_outputs().map_err(&connect)?;
        let ends = [stdin, stdout, stderr];
        sandbox.start_job(&self.shop.command, &ends)?;
        streams.stdin.open();
        drop(streams);
        self.stage = Stage::Starting(sandbox);
        Ok(())
    }

    /// A sandbox for a new job, or of the kind that an image wants.
    fn new_sandbox(&mut self, wanted: Option<Isolation>) -> Result<Arc<Sandbox>, RunError> {
        let (first, or_none) = match (wanted, self.shop.config.isolation) {
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
        let environment = environment::for_job(std::env::vars_os(), self.shop.store.path(), &job);
        Sandbox::start(&self.shop.program, isolation, &environment, move |news| {
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::Sandbox(serial, news));
        })
    }

    pub fn started(&mut self, pids: JobPids) {
        let Stage::Starting(sandbox) = &self.stage else {
            return;
        };
        let job = Arc::new(Job {
            sandbox: Arc::clone(sandbox),
            pids,
        });
        tracing::info!(
            store = %self.shop.store.path().display(),
            command = %self.state.command.join(" "),
            "job started"
        );
        self.now_running(job, None, false);
        self.suspend_when_idle();
    }

    /// The kernel did not execute the job's program.
    pub fn not_started(&mut self, errno: i32) -> Result<(), RunError> {
        let program = self.shop.command.first().map(PathBuf::from);
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
            ended,
            gone,
        });
    }

    /// The run was begun by an earlier supervisor.
    pub fn resume_run(&mut self) -> Result<(), RunError> {
        if self.available()?.is_empty() {
            if self.any_images()? {
                return Err(RunError::NothingRestorable);
            }
            tracing::info!("the run was begun before but has no image yet: it begins anew");
            return self.start();
        }
        self.restore_from(0)
    }

    /// Restores the newest image that can be, but `skip_newest`.
    pub fn restore_from(&mut self, skip_newest: usize) -> Result<(), RunError> {
        for id in self.available()?.into_iter().rev().skip(skip_newest) {
            match restore::examine(&self.shop, id) {
                Ok(candidate) => return self.begin_restore(candidate, skip_newest),
                Err(error) => self.image_failed(id, &error),
            }
        }
        // Those that were skipped are better than none.
        if skip_newest > 0 && !self.available()?.is_empty() {
            return self.restore_from(0);
        }
        if !self.refused.is_empty()
            || self.shop.config.restart.without_image == config::WithoutImage::GiveUp
        {
            return Err(RunError::NothingRestorable);
        }
        tracing::warn!("no image could be restored: the job begins anew");
        self.start()
    }

    fn begin_restore(&mut self, candidate: Candidate, skip_newest: usize) -> Result<(), RunError> {
        let id = candidate.id;
        let (isolation, pids) = (candidate.facts.isolation(), candidate.facts.pids);
        let sandbox = self.new_sandbox(Some(isolation))?;
        tracing::info!(image = %id, "restoring");
        let (shop, streams) = (Arc::clone(&self.shop), Arc::clone(&self.streams));
        let (fresh, events) = (Arc::clone(&sandbox), self.events.clone());
        let work = move || {
            let result = restore::bring_back(&shop, &fresh, &streams, candidate);
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::RestoreEnded(Box::new(result)));
        };
        thread::Builder::new()
            .name("restore".to_owned())
            .spawn(work)
            .map_err(system("start a thread"))?;
        self.stage = Stage::Restoring(Restoring {
            sandbox,
            id,
            pids,
            skip_newest,
            ended: None,
            gone: false,
            failed: false,
        });
        Ok(())
    }

    pub fn restore_ended(
        &mut self,
        result: Result<Restored, RestoreError>,
    ) -> Result<(), RunError> {
        let Stage::Restoring(restoring) = &mut self.stage else {
            return Ok(());
        };
        let id = restoring.id;
        match result {
            Ok(restored) => {
                let job = Arc::new(Job {
                    sandbox: Arc::clone(&restoring.sandbox),
                    pids: restoring.pids,
                });
                let (ended, gone) = (restoring.ended, restoring.gone);
                self.now_running(job, ended, gone);
                report(id, &restored);
                self.budget.restarted();
                self.state.restarts += 1;
                self.remember();
                self.suspend_when_idle();
                self.settle()?;
                self.snapshot_when_idle()
            }
            Err(error) => {
                restoring.failed = true;
                restoring.sandbox.kill();
                let (gone, skip_newest) = (restoring.gone, restoring.skip_newest);
                self.image_failed(id, &error);
                self.stage = Stage::Ending(AfterEnd::NextImage { skip_newest });
                if gone { self.drain() } else { Ok(()) }
            }
        }
    }

    /// Remembers why an image did not become the job.
    fn image_failed(&mut self, id: ImageId, error: &RestoreError) {
        let reason = chain(error);
        tracing::error!(image = %id, "restore failed: {reason}");
        self.failed += 1;
        if error.image_may_be_good() {
            self.refused.insert(id);
        } else if let Err(error) = self.shop.store.set_aside(&self.shop.lock, id, &reason) {
            // A full disk: at least this supervisor does not try it again.
            tracing::warn!(image = %id, "cannot set the image aside: {}", chain(&error));
            self.refused.insert(id);
        }
    }

    pub fn job_ended(&mut self, ended: Ended) -> Result<(), RunError> {
        match &mut self.stage {
            Stage::Running(running) => {
                running.ended = Some(ended);
                self.settle()
            }
            Stage::Restoring(restoring) => {
                restoring.ended = Some(ended);
                Ok(())
            }
            Stage::Idle | Stage::Starting(_) | Stage::Ending(_) | Stage::Waiting { .. } => Ok(()),
        }
    }

    pub fn sandbox_gone(&mut self) -> Result<(), RunError> {
        match &mut self.stage {
            Stage::Running(running) => {
                running.gone = true;
                self.settle()
            }
            Stage::Restoring(restoring) => {
                restoring.gone = true;
                Ok(())
            }
            Stage::Ending(_) => self.drain(),
            Stage::Starting(_) => Err(SandboxError::Gone.into()),
            Stage::Idle | Stage::Waiting { .. } => Ok(()),
        }
    }

    /// Ends a job whose root process has ended, once no snapshot of it is under way any more.
    pub fn settle(&mut self) -> Result<(), RunError> {
        let Stage::Running(Running {
            busy: None,
            ended,
            gone,
            ..
        }) = &self.stage
        else {
            return Ok(());
        };
        let status = match (ended, gone) {
            (Some(ended), _) => exit_status(*ended),
            // Somebody killed pid 1, and with it the job.
            (None, true) => ExitStatus::Signaled(nix::libc::SIGKILL),
            (None, false) => return Ok(()),
        };
        self.end_job(AfterEnd::Decide(status))
    }

    /// Kills what is left of the job; `then` follows when it is gone.
    pub fn end_job(&mut self, then: AfterEnd) -> Result<(), RunError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Ending(then));
        let (sandbox, gone) = match stage {
            Stage::Running(running) => (Some(Arc::clone(&running.job.sandbox)), running.gone),
            Stage::Starting(sandbox) => (Some(sandbox), false),
            Stage::Restoring(restoring) => (Some(restoring.sandbox), restoring.gone),
            // Already killed, only the destination changes.
            Stage::Ending(_) => return Ok(()),
            Stage::Idle | Stage::Waiting { .. } => (None, true),
        };
        if let Some(sandbox) = sandbox.filter(|_| !gone) {
            sandbox.kill();
            return Ok(());
        }
        self.drain()
    }

    /// Delivers what the dead job had written, on a thread: our own reader may be slow.
    fn drain(&mut self) -> Result<(), RunError> {
        let (streams, events) = (Arc::clone(&self.streams), self.events.clone());
        let work = move || {
            let mut streams = streams
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            let (stdout, stderr) = (streams.stdout.drain(), streams.stderr.drain());
            drop(streams);
            stdout();
            stderr();
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::Drained);
        };
        thread::Builder::new()
            .name("drain".to_owned())
            .spawn(work)
            .map(drop)
            .map_err(system("start a thread"))
    }

    /// Everything of the job is gone and delivered.
    pub fn all_gone(&mut self) -> Result<(), RunError> {
        let Stage::Ending(then) = self.stage else {
            return Ok(());
        };
        self.stage = Stage::Idle;
        match then {
            AfterEnd::Exit(code, progress) => {
                self.finish(code, progress);
                Ok(())
            }
            AfterEnd::NextImage { skip_newest } => self.restore_from(skip_newest),
            AfterEnd::Decide(status) => self.after(status),
        }
    }

    /// Decides what follows on an end of the job.
    fn after(&mut self, status: ExitStatus) -> Result<(), RunError> {
        if self.stopping != Stopping::No {
            let progress = if status.is_success() {
                Progress::Finished
            } else {
                Progress::Saved
            };
            self.finish(status.code(), progress);
            return Ok(());
        }
        self.failed = 0;
        self.refused.clear();
        self.budget.ended(status);
        let images = Images {
            available: self.available()?.len(),
            failed: 0,
        };
        match decide(status, &self.shop.config.restart, self.budget, images) {
            Decision::Finished { code } => {
                self.finish(code, Progress::Finished);
                Ok(())
            }
            Decision::Restore { skip_newest, delay } => {
                tracing::warn!(end = %status, wait = %seconds(delay), "the job crashed");
                self.stage = Stage::Waiting {
                    until: clock::now() + delay,
                    skip_newest: Some(skip_newest),
                };
                Ok(())
            }
            Decision::StartAnew { delay } => {
                tracing::warn!(end = %status, wait = %seconds(delay), "the job ended; there is no image, it begins anew");
                self.stage = Stage::Waiting {
                    until: clock::now() + delay,
                    skip_newest: None,
                };
                Ok(())
            }
            Decision::GiveUp { code, reason } => {
                tracing::error!(end = %status, "giving up: {reason}");
                self.finish(code, Progress::Failed { code });
                Ok(())
            }
        }
    }

    /// Whether a crash now would be followed by a restore.
    pub fn would_restore(&self) -> Result<bool, RunError> {
        let crash = ExitStatus::Signaled(nix::libc::SIGKILL);
        let mut budget = self.budget;
        budget.ended(crash);
        let images = Images {
            available: self.available()?.len(),
            failed: 0,
        };
        let decision = decide(crash, &self.shop.config.restart, budget, images);
        Ok(matches!(decision, Decision::Restore { .. }))
    }

    pub fn backoff_over(&mut self) -> Result<(), RunError> {
        let Stage::Waiting { skip_newest, .. } = self.stage else {
            return Ok(());
        };
        self.stage = Stage::Idle;
        if let Some(skip_newest) = skip_newest {
            return self.restore_from(skip_newest);
        }
        self.budget.restarted();
        self.state.restarts += 1;
        self.remember();
        self.start()
    }

    fn finish(&mut self, code: u8, progress: Progress) {
        self.state.progress = progress;
        self.remember();
        self.exit = Some(code);
    }

    /// Writes the run's state down. On a full disk the job matters more: the state that is there stays.
    fn remember(&self) {
        if let Err(error) = self.state.save(self.shop.store.path()) {
            tracing::warn!("cannot remember how far the run is: {}", chain(&error));
        }
    }

    /// This run's images that are not set aside, oldest first.
    fn available(&self) -> Result<Vec<ImageId>, RunError> {
        let images = self.shop.store.images()?;
        let ours = images
            .into_iter()
            .filter(|image| image.damaged.is_none() && self.is_ours(&image.meta));
        Ok(ours
            .map(|image| image.id)
            .filter(|id| !self.refused.contains(id))
            .collect())
    }

    /// Whether the run has any image, good or not.
    fn any_images(&self) -> Result<bool, RunError> {
        Ok(self
            .shop
            .store
            .images()?
            .iter()
            .any(|image| image.damaged.is_some() || self.is_ours(&image.meta)))
    }

    /// The newest image to go on from.
    pub fn newest(&self) -> Result<Option<ImageId>, RunError> {
        Ok(self.available()?.pop())
    }

    fn is_ours(&self, meta: &[u8]) -> bool {
        super::image::run_of(meta) == Some(self.state.started_unix_ms)
    }
}

fn exit_status(ended: Ended) -> ExitStatus {
    match ended {
        Ended::Exited(code) => ExitStatus::Exited(u8::try_from(code).unwrap_or(u8::MAX)),
        Ended::Signaled(signal) => ExitStatus::Signaled(signal),
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
    for cut in &restored.cut {
        tracing::info!(
            file = %cut.path.display(),
            bytes = %size(cut.bytes),
            kept = %cut.kept.display(),
            "cut off what came after the snapshot"
        );
    }
    if restored.input_lost {
        tracing::warn!(
            "stdin goes on with what comes next: what the job had read since the snapshot is forgotten"
        );
    }
    let phases: Vec<String> = restored
        .phases
        .iter()
        .map(|phase| format!("{} {:.3}", phase.name, phase.seconds))
        .collect();
    tracing::info!(image = %id, took = %seconds(restored.total), phases = %phases.join(", "), "restored");
}
