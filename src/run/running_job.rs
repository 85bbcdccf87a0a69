//! A running job, and the streams that it shares with ckpt-run.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::own_activity::OwnActivity;
use super::streams::Streams;
use crate::agent_client::{Channel, Token};
use crate::clock;
use crate::job::{self, Process, TreeError};
use crate::network_socket::NetworkSocket;
use crate::sandbox::{JobPids, Sandbox};
use crate::sync::locked;

/// A job that runs, or is about to.
#[derive(Debug)]
pub(crate) struct Job {
    pub sandbox: Arc<Sandbox>,
    pub pids: JobPids,
    /// Token that names the job's agents, if it was started with any.
    pub token: Option<Token>,
    /// The job's [`CudaFacts::moved`].
    pub moved: Vec<i32>,
    /// ckpt-run's work in the job, for the detection of signs of the job's activity.
    pub own_activity: OwnActivity,
    /// End of the last snapshot with all its attempts, or of the restore; `None` before the first.
    pub runs_since: Mutex<Option<Instant>>,
}

impl Job {
    /// Records that a snapshot or a restore has ended and the job runs again.
    pub fn runs_again(&self) {
        *locked(&self.runs_since) = Some(clock::now());
    }

    /// Returns the time since the last snapshot or restore; without any, the longest there is.
    pub fn runs_for(&self) -> Duration {
        let since = *locked(&self.runs_since);
        since.map_or(Duration::MAX, |since| {
            clock::now().saturating_duration_since(since)
        })
    }

    /// Returns the job's agents, if it was started with any.
    pub fn agents(&self) -> Option<Agents> {
        let sandbox = Arc::clone(&self.sandbox);
        self.token.map(|token| Agents { token, sandbox })
    }

    /// Returns true if the job's first process is in the list and is not about to die.
    pub fn lives(&self, processes: &[Process]) -> bool {
        self.first_among(processes)
            .is_some_and(|pid| !job::is_doomed(pid))
    }

    /// Returns true if the job's first process has exited, according to a direct check: the sandbox's report may arrive
    /// later.
    pub fn has_ended(&self) -> bool {
        let root = job::child_with_pid(self.sandbox.pid(), self.pids.root);
        match root.and_then(job::tree) {
            Ok(there) => self.first_among(&there).is_none(),
            Err(error) => matches!(error, TreeError::NoRoot),
        }
    }

    /// Returns the host pid of the job's first process, if it is alive.
    fn first_among(&self, processes: &[Process]) -> Option<i32> {
        let first = processes
            .iter()
            .find(|process| process.pid == self.pids.job)?;
        job::is_alive(first.host_pid).then_some(first.host_pid)
    }
}

/// The agents of a job, which have names in the job's network namespace.
#[derive(Clone, Debug)]
pub(crate) struct Agents {
    pub token: Token,
    pub sandbox: Arc<Sandbox>,
}

impl Agents {
    /// Creates a socket for requests to them.
    pub fn channel(&self) -> io::Result<Channel> {
        Channel::of(self.sandbox.socket(NetworkSocket::Datagrams)?)
    }
}

/// The streams, as shared by snapshots, restores and the loop.
pub(crate) type SharedStreams = Arc<Mutex<Streams>>;
