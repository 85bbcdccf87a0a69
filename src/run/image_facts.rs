//! The facts that an image records about itself for restores and for the user, stored in the manifest as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::cpu_facts::CpuFacts;
use super::gpu_facts::CudaFacts;
use super::streams::Marks;
use crate::agent_client::Token;
use crate::checked;
use crate::clock;
use crate::files::Kept;
use crate::job::{
    ExitCode, HungUp, MovedSocket, Node, OpenFile, ProcessAccount, SocketOptions, Sockets,
    ThreadAttributes, Timer,
};
use crate::path_text::{self, CommandLine};
use crate::safe_path::JobUsers;
use crate::sandbox::{Clocks, Hidden, Isolation, JobPids, Network};
use crate::store::{ImageId, WorkShares};

/// Stream with the list of the files that the job writes.
pub(crate) const KEPT_LIST: &str = "kept/list";
/// Name of the stream with the state of processes that CRIU omits. An image without such state has none.
pub(crate) const OMITTED_STATE: &str = "omitted";

/// Returns the name of the stream with the contents that an image adds.
pub(crate) fn kept_stream(image: ImageId) -> String {
    format!("kept/{image}")
}

/// Returns the name of the stream with the content of a file that the list of files has without content: of one that the
/// job appends to, and in an uploaded image of one that the store holds. `number` is the file's position in the list.
pub(crate) fn rest_stream(number: usize) -> String {
    format!("rest/{number}")
}

/// The reason why a snapshot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trigger {
    /// The interval or the cron time.
    Schedule,
    /// SIGUSR1.
    Signal,
    /// `ckpt-run snapshot`.
    Request,
    /// `ckpt-run stop`, SIGUSR2 or SIGTERM: the last snapshot before the run stops.
    Stop,
}

impl Trigger {
    /// Returns the word for logs and lists.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Schedule => "schedule",
            Self::Signal => "signal",
            Self::Request => "request",
            Self::Stop => "stop",
        }
    }
}

/// A part of a snapshot and the time it took.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Name of the part.
    pub name: String,
    /// Its duration in seconds.
    #[serde(deserialize_with = "checked::seconds")]
    pub seconds: f64,
}

/// The facts that an image records about itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ImageFacts {
    /// The reason why the snapshot was taken.
    pub trigger: Trigger,
    /// The job's command line.
    pub command: CommandLine,
    /// The job's working directory at its start.
    #[serde(
        serialize_with = "path_text::serialize",
        deserialize_with = "checked::path"
    )]
    pub directory: PathBuf,
    /// Host name.
    pub host: String,
    /// Kernel release.
    pub kernel: String,
    /// CRIU's version.
    pub criu: String,
    /// The processor; `None` in images made before it was recorded.
    #[serde(default)]
    pub cpu: Option<CpuFacts>,
    /// The run of the store that the image belongs to, identified by the time of its first start, in milliseconds since
    /// 1970.
    pub run: u64,
    /// Identifies the supervisor's process, whose record of the delivered output is lost with it.
    pub instance: String,
    /// Seconds in which the job did not compute.
    #[serde(deserialize_with = "checked::seconds")]
    pub freeze_seconds: f64,
    /// The phases of the freeze and of the time until the chunks were durable.
    pub phases: Vec<Phase>,
    /// Time of the threads that wrote the image after the freeze; `None` in images made before it was recorded.
    #[serde(default)]
    pub writing: Option<WorkShares>,
    /// Number of processes.
    pub processes: usize,
    /// The processes, parents before children, at most the first 512; empty in images made before they were recorded.
    #[serde(default)]
    pub process_tree: Vec<ProcessAccount>,
    /// Pids of the job's first processes, as the job sees them.
    pub pids: JobPids,
    /// True if the job has separate namespaces.
    pub isolated: bool,
    /// The user whose namespace the job had; `None` if it had none of its own.
    #[serde(default)]
    pub namespace_of: Option<u32>,
    /// Features hidden by the filter that the restored job must inherit; none if CRIU restores the job's filters, or if
    /// there are none.
    #[serde(flatten)]
    pub hidden: Hidden,
    /// True if the job had a network namespace.
    #[serde(default)]
    pub own_network: bool,
    /// The job's clocks at the freeze; `None` in images made before they were recorded.
    #[serde(default)]
    pub clocks: Option<Clocks>,
    /// The CUDA part, if there is one.
    pub cuda: Option<CudaFacts>,
    /// Token that names the job's agents; `None` in images made before there were agents.
    #[serde(default)]
    pub token: Option<Token>,
    /// Standard streams.
    #[serde(flatten)]
    pub streams: Marks,
    /// Users as which the job's processes act, or have acted during the run; empty in images made before they were recorded.
    #[serde(default)]
    pub users: Vec<u32>,
    /// Groups of these users, each one's primary group first, as far as processes had all rights of that user alone.
    #[serde(default)]
    pub groups: BTreeMap<u32, Vec<u32>>,
    /// Regular files that the job had open or mapped.
    pub files: Vec<OpenFile>,
    /// Positions of those in `files` that the list of the files that the job writes has, too: a restore can put them
    /// back.
    #[serde(default)]
    pub kept_open: BTreeSet<usize>,
    /// True if a process has huge pages of its own (`MAP_HUGETLB`): CRIU cannot restore them from a stream.
    #[serde(default)]
    pub huge_pages: bool,
    /// Numbers about the files that the job writes; `None` in images made before they were recorded. `kept/list`
    /// contains the files.
    #[serde(default)]
    pub kept: Option<Kept>,
    /// Folders and named pipes that the job needs; empty in images made before they were recorded.
    #[serde(default)]
    pub nodes: Vec<Node>,
    /// Sockets whose files get other names after CRIU has bound them; empty in images made before they were recorded.
    #[serde(default)]
    pub moved_sockets: Vec<MovedSocket>,
    /// The job's TCP sockets; a restore needs their addresses again.
    pub sockets: Sockets,
    /// Options of the job's sockets; empty in images made before they were recorded.
    #[serde(default)]
    pub socket_options: Vec<SocketOptions>,
    /// The job's timers that a restore starts again.
    pub timers: Vec<Timer>,
    /// Terminals that the job has created, and whose programs have ended.
    #[serde(default)]
    pub hung_up: Vec<HungUp>,
    /// Exit codes that CRIU does not restore; empty in images made before they were recorded.
    #[serde(default)]
    pub exit_codes: Vec<ExitCode>,
    /// Thread attributes that a restore sets again.
    #[serde(default)]
    pub attributes: Vec<ThreadAttributes>,
}

impl ImageFacts {
    /// Returns the users as which the job's processes act.
    pub(crate) fn job_users(&self) -> JobUsers {
        JobUsers::new(&self.users, &self.groups)
    }

    /// Returns the isolation of the sandbox that the image needs.
    #[must_use]
    pub fn isolation(&self) -> Isolation {
        if self.namespace_of.is_some() {
            Isolation::User(if self.own_network {
                Network::Own
            } else {
                Network::Host
            })
        } else if self.isolated {
            Isolation::Namespaces
        } else {
            Isolation::None
        }
    }
}

/// Returns the run that an image belongs to; `None` if its facts cannot be read.
pub(crate) fn run_of(meta: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Run {
        run: u64,
    }
    serde_json::from_slice::<Run>(meta)
        .ok()
        .map(|facts| facts.run)
}

/// A timer for consecutive phases.
#[derive(Clone, Debug)]
pub(crate) struct Stopwatch {
    last: Instant,
    phases: Vec<Phase>,
}

impl Stopwatch {
    pub fn start() -> Self {
        Self {
            last: clock::now(),
            phases: Vec::new(),
        }
    }

    /// Ends the current phase under this name and begins the next.
    pub fn lap(&mut self, name: &str) {
        let now = clock::now();
        self.add(name, now - self.last);
        self.last = now;
    }

    /// Adds a phase that was measured elsewhere, and begins the next.
    pub fn add(&mut self, name: &str, took: Duration) {
        tracing::debug!(phase = name, ?took, "done");
        self.phases.push(Phase {
            name: name.to_owned(),
            seconds: took.as_secs_f64(),
        });
        self.last = clock::now();
    }

    pub fn phases(&self) -> &[Phase] {
        &self.phases
    }
}
