//! The activity of the job, observed from outside.

use std::collections::BTreeSet;

use procfs::process::Process as ProcessEntry;

use super::before_kill::Files;
use crate::job;

/// The job at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct JobSample {
    /// Pids of its processes, in its own namespace.
    pub processes: BTreeSet<i32>,
    /// Pids of the same processes on the host.
    host_pids: Vec<i32>,
    /// CPU time of the processes and of their exited children, since their start or restore.
    pub cpu_seconds: f64,
    /// Resident memory in bytes.
    pub memory: u64,
}

impl JobSample {
    /// Inspects the job with this first process (a host pid), including the orphans that its parent has adopted. `None`
    /// if the job no longer exists.
    pub(super) fn at(job: i32) -> Option<Self> {
        let root = ProcessEntry::new(job)
            .and_then(|entry| entry.stat())
            .ok()?
            .ppid;
        let processes = job::tree(root).ok()?;
        let mut look = Self::default();
        for process in processes.iter().filter(|process| process.host_pid != root) {
            look.processes.insert(process.pid);
            look.host_pids.push(process.host_pid);
            look.cpu_seconds += cpu_seconds(process.host_pid);
            look.memory += process.resident;
        }
        (!look.processes.is_empty()).then_some(look)
    }

    /// Removes the processes that no longer exist in `later`.
    pub(super) fn still_there(mut self, later: &Self) -> Self {
        self.processes.retain(|pid| later.processes.contains(pid));
        self
    }

    /// Returns the files that the job writes, as far as its processes can be inspected.
    pub(super) fn files(&self) -> Files {
        let open = self
            .host_pids
            .iter()
            .filter_map(|pid| job::Descriptors::of(*pid).ok())
            .filter_map(|open| job::collect(&[open]).ok());
        Files::of(&open.flatten().collect::<Vec<_>>())
    }
}

fn cpu_seconds(pid: i32) -> f64 {
    let Ok(stat) = ProcessEntry::new(pid).and_then(|entry| entry.stat()) else {
        return 0.0;
    };
    let of_children = stat
        .cutime
        .saturating_add(stat.cstime)
        .max(0)
        .unsigned_abs();
    let ticks = stat
        .utime
        .saturating_add(stat.stime)
        .saturating_add(of_children);
    #[expect(clippy::cast_precision_loss, reason = "exact below 2^53 ticks")]
    let seconds = ticks as f64 / procfs::ticks_per_second() as f64;
    seconds
}
