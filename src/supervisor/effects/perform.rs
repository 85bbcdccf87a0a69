//! Execution of actions. Each produces at most one event or notice at once; the results of threads arrive as messages.

use std::sync::{Arc, Mutex};

use tokio::sync::mpsc::Sender;

use super::meter::Meter;
use crate::clock;
use crate::cuda;
use crate::gpu::resident::Standby;
use crate::restore::huge_pages;
use crate::restore::restore_image::{self, Candidate, Restored};
use crate::run::format::chain;
use crate::run::image_facts::ImageFacts;
use crate::run::own_activity::OwnActivity;
use crate::run::run_context::RunContext;
use crate::run::run_state::RunState;
use crate::run::running_job::{Job, SharedStreams};
use crate::sandbox::{JobPids, Sandbox};
use crate::snapshot::paused::{Paused, lacking};
use crate::store::ImageId;
use crate::supervisor::decide::action::Action;
use crate::supervisor::decide::event::Event;
use crate::supervisor::error::RunError;
use crate::supervisor::hooks::process_group::HookHold;
use crate::supervisor::inbox::Message;
use crate::supervisor::notice::Notice;
use crate::supervisor::observers::keyboard::Keyboard;
use crate::sync::locked;

/// The means by which actions are carried out.
#[derive(Debug)]
pub(crate) struct Effects {
    pub context: Arc<RunContext>,
    pub streams: SharedStreams,
    pub(super) inbox: Sender<Message>,
    /// The copiers of the next snapshot and the next restore.
    pub(super) standby: Arc<Standby>,
    pub(super) processes: Processes,
    /// Number of the present sandbox; reports of older ones are dropped.
    pub(super) serial: u64,
    /// The paused job, while no thread is continuing it.
    pub(super) paused: Arc<Mutex<Option<Paused>>>,
    /// The hook of the last snapshot, which may run.
    pub(super) hook: HookHold,
    pub(super) meter: Arc<Mutex<Meter>>,
    pub keyboard: Keyboard,
}

#[derive(Debug)]
pub(super) enum Processes {
    None,
    /// The job is being started.
    Starting(Arc<Sandbox>),
    /// The candidate was examined, or is being restored.
    Restoring(Arc<Sandbox>, Box<Restoring>),
    Job(Arc<Job>),
}

/// The facts of a restore that its job needs.
#[derive(Debug)]
pub(super) struct Restoring {
    pub pids: JobPids,
    pub token: Option<crate::agent_client::Token>,
    /// Taken when the restore begins.
    pub candidate: Option<Candidate>,
}

#[derive(Debug)]
pub(crate) enum Outcome {
    None,
    Event(Event),
    Notice(Notice),
}

impl Effects {
    /// Must be called inside the runtime.
    pub fn new(context: Arc<RunContext>, streams: SharedStreams, inbox: Sender<Message>) -> Self {
        let keyboard = Keyboard::attach(&streams, &inbox);
        Self {
            context,
            streams,
            inbox,
            standby: Arc::default(),
            processes: Processes::None,
            serial: 0,
            paused: Arc::default(),
            hook: HookHold::default(),
            meter: Arc::default(),
            keyboard,
        }
    }

    /// Carries out an action. `state` is the run as the machine has it. The loop handles [`Action::Notify`],
    /// [`Action::WatchAnew`] and the end of the run.
    pub fn perform(&mut self, action: Action, state: &RunState) -> Result<Outcome, RunError> {
        match action {
            Action::Start => self.start(state)?,
            Action::Examine(id) => return self.examine(id, state).map(Outcome::Event),
            Action::BringBack => return Ok(self.bring_back()),
            Action::AdoptRestored(image, restored) => {
                return Ok(self.adopt_restored(image, restored));
            }
            Action::Snapshot(order) => return Ok(self.begin_snapshot(order, state)),
            Action::Hurry(limit) => {
                self.hook.shorten(limit);
                if let Some(remote) = &self.context.remote {
                    remote.hurry();
                }
            }
            Action::Unpause(image) => self.unpause(image)?,
            Action::AbandonPause => {
                if let Some(paused) = locked(&self.paused).take() {
                    paused.abandon();
                }
            }
            Action::FindRoom(image) => {
                return Ok(Outcome::Event(Event::Room(self.lacking(image))));
            }
            Action::SignalJob(signal) => self.signal_job(signal, false),
            Action::Kill => {
                if let Some(sandbox) = self.sandbox() {
                    sandbox.kill();
                }
            }
            Action::Drain => self.drain()?,
            Action::PrepareStandby(image) => self.standby.prepare(&self.context, image),
            Action::DismissStandby => self.standby.dismiss(),
            Action::Diagnose(suspect) => return Ok(self.diagnose(suspect)),
            Action::StopSelf { with_job } => return Ok(Outcome::Event(self.stop_self(with_job))),
            Action::AttachTerminal => self.attach_terminal(),
            Action::ResizeTerminal => locked(&self.streams).resize(),
            // A client that went away needs no answer.
            Action::AnswerSnapshot(reply, answer) => drop(reply.send(answer)),
            Action::AnswerUnpause(reply, answer) => drop(reply.send(answer)),
            Action::SetAside(id, reason) => {
                return Ok(Outcome::Event(self.set_aside(id, &reason)));
            }
            Action::Save => self.save(state),
            Action::SaveOrFail => state.save(self.context.store.path())?,
            Action::Notify(_) | Action::WatchAnew | Action::Exit(_) | Action::Fail(_) => {}
        }
        Ok(Outcome::None)
    }

    pub fn job(&self) -> Option<&Arc<Job>> {
        match &self.processes {
            Processes::Job(job) => Some(job),
            Processes::None | Processes::Starting(_) | Processes::Restoring(..) => None,
        }
    }

    fn sandbox(&self) -> Option<&Arc<Sandbox>> {
        match &self.processes {
            Processes::None => None,
            Processes::Starting(sandbox) | Processes::Restoring(sandbox, _) => Some(sandbox),
            Processes::Job(job) => Some(&job.sandbox),
        }
    }

    fn examine(&mut self, id: ImageId, state: &RunState) -> Result<Event, RunError> {
        match restore_image::examine(&self.context, &self.standby, id) {
            Ok(candidate) => {
                let sandbox = self.new_sandbox(Some(candidate.facts.isolation()), state)?;
                let restoring = Restoring {
                    pids: candidate.facts.pids,
                    token: candidate.facts.token,
                    candidate: Some(candidate),
                };
                self.processes = Processes::Restoring(sandbox, Box::new(restoring));
                Ok(Event::Fit)
            }
            Err(error) => Ok(Event::Unfit(Box::new(error))),
        }
    }

    fn adopt_restored(&mut self, image: ImageId, restored: Box<Restored>) -> Outcome {
        let Processes::Restoring(sandbox, restoring) = &self.processes else {
            return Outcome::None;
        };
        let job = Arc::new(Job {
            sandbox: Arc::clone(sandbox),
            pids: restoring.pids,
            token: restoring.token,
            moved: restored.moved.clone(),
            own_activity: OwnActivity::default(),
            runs_since: Mutex::default(),
        });
        job.runs_again();
        huge_pages::give_back(&self.context, &job);
        self.processes = Processes::Job(job);
        Outcome::Notice(Notice::Restored { image, restored })
    }

    /// Returns what the GPUs lack for the image. An image that cannot be read now is read by its restore.
    fn lacking(&self, image: ImageId) -> Option<String> {
        let manifest = self.context.store.manifest(image).ok()?;
        let facts: ImageFacts = serde_json::from_slice(&manifest.meta).ok()?;
        lacking(&facts.cuda?, &cuda::inventory().unwrap_or_default())
    }

    /// Sends the job a signal. A job that is just ending needs none.
    fn signal_job(&self, signal: i32, everyone: bool) {
        let sent = self
            .sandbox()
            .map(|sandbox| sandbox.signal(signal, everyone));
        if let Some(Err(error)) = sent {
            tracing::debug!("cannot send the job signal {signal}: {}", chain(&error));
        }
    }

    /// Stops the job and this process. Returns when somebody continues this process.
    fn stop_self(&mut self, with_job: bool) -> Event {
        let stopped = clock::now();
        if with_job {
            self.signal_job(nix::libc::SIGSTOP, true);
        }
        self.keyboard.give_back();
        if let Err(error) = signal_hook::low_level::emulate_default_handler(nix::libc::SIGTSTP) {
            tracing::warn!(%error, "cannot stop ckpt-run");
        }
        if with_job {
            self.signal_job(nix::libc::SIGCONT, true);
        }
        Event::Continued(clock::now() - stopped)
    }

    fn attach_terminal(&mut self) {
        self.keyboard.continued();
        let streams = locked(&self.streams);
        streams.stdin.resume();
        streams.resize();
    }

    /// Gives the caller's terminal to the job, if the job may have it and reads its keys, or takes it back.
    pub fn attend_keyboard(&mut self, job_may_read: bool) {
        if !self.keyboard.is_attached() {
            return;
        }
        let by_job = job_may_read && locked(&self.streams).job_reads_keys();
        if self.keyboard.attend(by_job) {
            locked(&self.streams).stdin.resume();
        }
    }

    fn set_aside(&self, id: ImageId, reason: &str) -> Event {
        let result = self.context.store.set_aside(&self.context.lock, id, reason);
        if let Err(error) = &result {
            tracing::warn!(image = %id, "cannot mark the image as damaged: {}", chain(error));
        }
        Event::SetAside {
            done: result.is_ok(),
        }
    }

    /// Saves the run's state. On a full disk the job matters more: the saved state stays as it is.
    fn save(&self, state: &RunState) {
        if let Err(error) = state.save(self.context.store.path()) {
            tracing::warn!("cannot save the state of the run: {}", chain(&error));
        }
    }
}
