//! Start of the job in a new sandbox.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::perform::{Effects, Processes};
use crate::agent_client;
use crate::config;
use crate::cuda;
use crate::job::InputMark;
use crate::path_text::CommandLine;
use crate::remote_run::RunLease;
use crate::run::environment::{self, Setting};
use crate::run::format::chain;
use crate::run::own_activity::OwnActivity;
use crate::run::program::ProgramError;
use crate::run::run_state::RunState;
use crate::run::running_job::Job;
use crate::sandbox::{
    self, Hidden, Isolation, JobPids, Keyring, Network, NetworkError, Sandbox, SandboxError,
    SpawnError, Visibility, find_pasta, privilege_missing,
};
use crate::supervisor::decide::event::Event;
use crate::supervisor::error::{RunError, system};
use crate::supervisor::inbox::Message;
use crate::supervisor::observers::journal::host_pid;
use crate::sync::locked;

impl Effects {
    pub(super) fn start(&mut self, state: &RunState) -> Result<(), RunError> {
        let sandbox = self.new_sandbox(None, state)?;
        let mut streams = locked(&self.streams);
        if !streams.stdin.rewind(&InputMark::default()) {
            tracing::warn!("cannot rewind stdin: the job reads later input only");
        }
        let connect = system("make the job's standard streams");
        let ends = streams.connect(&sandbox).map_err(&connect)?;
        let user = self.context.user.as_ref();
        if let Some(user) = user {
            ends.iter()
                .try_for_each(|end| user.own(end))
                .map_err(&connect)?;
        }
        let config::Sandbox { io_uring, landlock } = self.context.config.sandbox;
        let hidden = Hidden {
            io_uring: visibility(io_uring),
            landlock: visibility(landlock),
        };
        let anew = self.context.files.begin_anew();
        anew.map_err(system("clear the record of the job's files"))?;
        self.context.watch(&sandbox);
        let credentials = user.map(|user| &user.credentials);
        sandbox.start_job(&self.context.command, hidden, credentials, &ends)?;
        streams.open();
        drop(streams);
        self.processes = Processes::Starting(sandbox);
        Ok(())
    }

    /// Starts a sandbox for a new job, or of the kind that an image needs.
    pub(super) fn new_sandbox(
        &mut self,
        wanted: Option<Isolation>,
        state: &RunState,
    ) -> Result<Arc<Sandbox>, RunError> {
        if self.has_lost_lease() {
            return Err(RunError::LeaseLost { holder: None });
        }
        let only = match (wanted, self.context.config.isolation) {
            (Some(isolation), _) => isolation,
            (None, config::Isolation::Auto) => return self.best_sandbox(state),
            (None, config::Isolation::User) => return Ok(self.user_sandbox(state)?),
            (None, config::Isolation::Namespaces | config::Isolation::None)
                if self.wants_own_network() =>
            {
                return Err(SandboxError::from(NetworkError::Shared).into());
            }
            (None, config::Isolation::Namespaces) => Isolation::Namespaces,
            (None, config::Isolation::None) => Isolation::None,
        };
        Ok(self.try_sandbox(only, state)?)
    }

    /// Returns true if a lease has expired, which another thread may not have reported yet.
    fn has_lost_lease(&self) -> bool {
        self.context.leases().any(RunLease::ends_the_job)
    }

    /// Starts a sandbox with the most isolation that is permitted.
    fn best_sandbox(&mut self, state: &RunState) -> Result<Arc<Sandbox>, RunError> {
        match self.try_sandbox(Isolation::Namespaces, state) {
            Err(error) if is_privilege(&error) => {}
            Ok(_) if self.wants_own_network() => {
                return Err(SandboxError::from(NetworkError::Shared).into());
            }
            other => return Ok(other?),
        }
        match self.user_sandbox(state) {
            Err(error) if is_privilege(&error) && !self.wants_own_network() => {
                tracing::warn!(
                    "running without isolation: {}; snapshots need privileges, and a restore needs the job's pids to be free",
                    chain(&error)
                );
                Ok(self.try_sandbox(Isolation::None, state)?)
            }
            other => Ok(other?),
        }
    }

    /// Starts a sandbox in a user namespace, with the network that the settings want.
    fn user_sandbox(&mut self, state: &RunState) -> Result<Arc<Sandbox>, SandboxError> {
        let host = Isolation::User(Network::Host);
        let own = Isolation::User(Network::Own);
        match self.context.config.network.namespace {
            config::NetworkNamespace::Own => self.try_sandbox(own, state),
            config::NetworkNamespace::Auto if prefers_own_network() && find_pasta().is_some() => {
                match self.try_sandbox(own, state) {
                    Err(SandboxError::Network(error)) => {
                        tracing::warn!(
                            "the job uses the machine's network, and a restore closes its connections: {error}"
                        );
                        self.try_sandbox(host, state)
                    }
                    Err(error) if is_privilege(&error) => self.try_sandbox(host, state),
                    other => other,
                }
            }
            config::NetworkNamespace::Auto | config::NetworkNamespace::Host => {
                self.try_sandbox(host, state)
            }
        }
    }

    fn wants_own_network(&self) -> bool {
        self.context.config.network.namespace == config::NetworkNamespace::Own
    }

    fn try_sandbox(
        &mut self,
        isolation: Isolation,
        state: &RunState,
    ) -> Result<Arc<Sandbox>, SandboxError> {
        self.serial += 1;
        let (serial, inbox) = (self.serial, self.inbox.clone());
        let job = state.started_unix_ms.to_string();
        let store = self.context.store.path();
        let mut settings = self.for_nccl();
        settings.extend(environment::for_hwloc(cuda::device_count(), |name| {
            std::env::var_os(name)
        }));
        let mut environment = environment::for_job(std::env::vars_os(), store, &job, &settings);
        if let Some((library, token)) = &self.context.agent {
            environment::preload(&mut environment, |present| {
                agent_client::environment(library, token, present)
            });
        }
        self.context.preload_witness(isolation, &mut environment);
        if let Some(user) = &self.context.user {
            environment::set_user(&mut environment, user);
        }
        // Keys of root's are not for another user.
        let keyring = match self.context.user {
            Some(_) => Keyring::New,
            None => Keyring::Inherited,
        };
        let sandbox = Sandbox::start(
            &self.context.program,
            isolation,
            keyring,
            &environment,
            move |news| {
                // The loop ends with the run only.
                let _ = inbox.blocking_send(Message::Sandbox(serial, news));
            },
        )?;
        let timers: Vec<_> = self.context.leases().map(RunLease::job_limit).collect();
        if !timers.is_empty() {
            sandbox.end_at(&timers)?;
        }
        Ok(sandbox)
    }

    fn for_nccl(&self) -> Vec<Setting> {
        let choice = self.context.config.cuda.nccl;
        environment::for_nccl(choice, cuda::device_count(), |name| std::env::var_os(name))
    }

    /// Handles a report of a sandbox; returns the event that it means. Reports of older sandboxes mean nothing.
    pub fn sandbox_news(
        &mut self,
        serial: u64,
        news: Option<sandbox::Event>,
    ) -> Result<Option<Event>, RunError> {
        if serial != self.serial {
            return Ok(None);
        }
        Ok(match news {
            Some(sandbox::Event::Started(pids)) => self.adopt(pids),
            Some(sandbox::Event::NotStarted(errno)) => {
                let program = self.context.command.first().map(PathBuf::from);
                return Err(ProgramError::NotStarted {
                    program: program.unwrap_or_default(),
                    source: io::Error::from_raw_os_error(errno),
                }
                .into());
            }
            Some(sandbox::Event::Failed { operation, errno })
                if matches!(self.processes, Processes::Starting(_)) =>
            {
                let source = io::Error::from_raw_os_error(errno);
                return Err(SandboxError::Step { operation, source }.into());
            }
            Some(sandbox::Event::JobEnded(ended)) => Some(Event::JobEnded(ended)),
            Some(
                sandbox::Event::Failed { .. }
                | sandbox::Event::Ready
                | sandbox::Event::ToolEnded(_)
                | sandbox::Event::Opened(_),
            ) => None,
            // The sandbox ends the job of a lease that has expired, without a report.
            None if self.has_lost_lease() => {
                return Err(RunError::LeaseLost { holder: None });
            }
            None => {
                self.context.files.note_end();
                Some(Event::Gone)
            }
        })
    }

    fn adopt(&mut self, pids: JobPids) -> Option<Event> {
        let Processes::Starting(sandbox) = &self.processes else {
            return None;
        };
        let job = Arc::new(Job {
            sandbox: Arc::clone(sandbox),
            pids,
            token: self.context.agent.as_ref().map(|(_, token)| *token),
            moved: Vec::new(),
            own_activity: OwnActivity::default(),
            runs_since: Mutex::default(),
        });
        let pid = host_pid(&job.sandbox, pids);
        self.processes = Processes::Job(job);
        let command = CommandLine::from(self.context.command.clone());
        let store = self.context.store.path().display();
        tracing::info!(%store, %command, "job started");
        self.report_nccl();
        Some(Event::Started(pid))
    }

    fn report_nccl(&self) {
        let nccl = self.for_nccl();
        if !nccl.is_empty() {
            let set: Vec<String> = nccl
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            let set = set.join(" ");
            if self.context.config.cuda.nccl == config::Nccl::Peer {
                tracing::info!(%set, "NCCL shares memory between GPUs: the job can be restored on the same GPUs only");
            } else {
                tracing::info!(
                    %set,
                    "NCCL shares no memory between GPUs: the job can be restored on any GPUs; cuda.nccl = \"peer\" is \
                     faster but needs the same GPUs, \"off\" does not change NCCL"
                );
            }
        }
    }
}

/// Returns false for one of several tasks, and on a machine with GPUs: pasta's pipes count against the user's limit of
/// 64 MiB, and with eight GPU jobs of one user too little was left for the snapshots of some.
fn prefers_own_network() -> bool {
    cuda::device_count() == 0 && !environment::has_other_tasks(|name| std::env::var_os(name))
}

fn visibility(setting: config::Visibility) -> Visibility {
    match setting {
        config::Visibility::Hide => Visibility::Hide,
        config::Visibility::Allow => Visibility::Allow,
    }
}

fn is_privilege(error: &SandboxError) -> bool {
    match error {
        SandboxError::Spawn(SpawnError::NotPermitted(_) | SpawnError::UserNamespace { .. }) => true,
        SandboxError::Step { source, .. } => source.raw_os_error().is_some_and(privilege_missing),
        _ => false,
    }
}
