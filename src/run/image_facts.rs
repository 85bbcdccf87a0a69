//! Facts of an image: everything that a restore and a reader need to know about the job, kept in the manifest as JSON.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::gpu_facts::CudaFacts;
use super::streams::Marks;
use crate::agent_client::Token;
use crate::clock;
use crate::job::{Node, OpenFile, ProcessAccount, Sockets, Timer};
use crate::sandbox::{Isolation, JobPids};

/// Why a snapshot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trigger {
    /// The interval or the cron time.
    Schedule,
    /// SIGUSR1.
    Signal,
    /// `ckpt-run snapshot`.
    Request,
    /// `ckpt-run stop`, SIGUSR2 or SIGTERM: the last one before the run stops.
    Stop,
}

impl Trigger {
    /// The word for logs and lists.
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
    /// Its name.
    pub name: String,
    /// Seconds.
    pub seconds: f64,
}

/// The facts of an image.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ImageFacts {
    /// Why it was taken.
    pub trigger: Trigger,
    /// The job's command line.
    pub command: Vec<String>,
    /// Its working directory at the start.
    pub directory: PathBuf,
    /// Host name.
    pub host: String,
    /// Kernel release.
    pub kernel: String,
    /// CRIU's version.
    pub criu: String,
    /// The run of the image: the time of its first start, milliseconds since 1970.
    pub run: u64,
    /// Marks the supervisor's process: its memory of delivered output goes with it.
    pub instance: String,
    /// Seconds the job did not compute.
    pub freeze_seconds: f64,
    /// The phases of the freeze, and of the time until the chunks were durable.
    pub phases: Vec<Phase>,
    /// Number of processes.
    pub processes: usize,
    /// They themselves, parents before children, the first 512; images made before they were recorded have none.
    #[serde(default)]
    pub process_tree: Vec<ProcessAccount>,
    /// The job's first processes, as it sees them.
    pub pids: JobPids,
    /// True if the job has its own namespaces.
    pub isolated: bool,
    /// The CUDA part, where there is one.
    pub cuda: Option<CudaFacts>,
    /// Name of the job's agents; images from before there were agents have none.
    #[serde(default)]
    pub token: Option<Token>,
    /// Standard streams.
    #[serde(flatten)]
    pub streams: Marks,
    /// Regular files that the job had open or mapped.
    pub files: Vec<OpenFile>,
    /// Folders and named pipes that it needs; images made before they were recorded have none.
    #[serde(default)]
    pub nodes: Vec<Node>,
    /// Its TCP sockets, whose addresses a restore needs again.
    pub sockets: Sockets,
    /// Its timers that a restore starts again.
    pub timers: Vec<Timer>,
}

impl ImageFacts {
    /// The sandbox that the image wants.
    #[must_use]
    pub fn isolation(&self) -> Isolation {
        if self.isolated {
            Isolation::Namespaces
        } else {
            Isolation::None
        }
    }
}

/// The run that an image belongs to; `None` when its facts cannot be read.
pub(crate) fn run_of(meta: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Run {
        run: u64,
    }
    serde_json::from_slice::<Run>(meta)
        .ok()
        .map(|facts| facts.run)
}

/// Measures phases one after the other.
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

    /// Ends the present phase under this name and begins the next.
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
