#![allow(unsafe_code, reason = "I/O priorities, which no library has")]
//! Attributes of one thread, read and set from outside.

use std::fs;
use std::io;
use std::mem;

use nix::errno::Errno;
use nix::libc;
use serde::{Deserialize, Serialize};

use super::control_groups::ControlGroup;
use super::cpus::Cpus;
use super::memory_policy::{MemoryPolicy, own_memory_policy};
use crate::job::halt::{number_inside, thread_of, threads_of};
use crate::job::tree::{Process, is_alive};

/// Selects a thread as the subject of an I/O priority (`linux/ioprio.h`).
const IOPRIO_WHO_PROCESS: libc::c_long = 1;

/// Attributes of a thread that differ from ckpt-run's own at the snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadAttributes {
    /// Pid of its process as the job sees it.
    pub pid: i32,
    /// Number of the thread as the job sees it.
    pub thread: i32,
    /// CPU affinity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Cpus>,
    /// I/O priority: class and level in the kernel's encoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_priority: Option<i32>,
    /// Timer slack, the permitted delay of its timers, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timer_slack_ns: Option<u64>,
    /// Core file filter of its process: kinds of memory that a core file contains. Recorded with the first thread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core_filter: Option<u32>,
    /// Execution domain (`personality`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub personality: Option<u32>,
    /// Memory policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_policy: Option<MemoryPolicy>,
    /// Control groups of its process. Recorded with the first thread.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub control_groups: Vec<ControlGroup>,
}

/// Attributes of one thread, by host thread id. An attribute that this kernel does not support is `None`.
#[derive(PartialEq, Eq)]
struct Found {
    cpus: Option<Cpus>,
    io_priority: Option<i32>,
    timer_slack_ns: Option<u64>,
    core_filter: Option<u32>,
    personality: Option<u32>,
    memory_policy: Option<MemoryPolicy>,
}

impl Found {
    fn of(thread: i32) -> Self {
        Self {
            cpus: Cpus::of(thread).ok(),
            io_priority: io_priority(thread).ok(),
            timer_slack_ns: number(thread, "timerslack_ns", 10),
            core_filter: number(thread, "coredump_filter", 16)
                .and_then(|bits| bits.try_into().ok()),
            personality: personality(thread),
            memory_policy: MemoryPolicy::of(thread),
        }
    }
}

/// Records the attributes of the threads of `processes` (frozen) that differ from ckpt-run's own.
#[must_use]
pub fn record_attributes(processes: &[Process]) -> Vec<ThreadAttributes> {
    let mut own = Found::of(nix::unistd::getpid().as_raw());
    // The files in `/proc` of a process without core dumps belong to root.
    (own.personality, own.memory_policy) = (own_personality(), own_memory_policy());
    let own_groups = ControlGroup::all_of("self");
    let mut recorded = Vec::new();
    for process in processes {
        // A zombie has left its groups.
        let groups = if is_alive(process.host_pid) {
            ControlGroup::all_of(process.host_pid)
        } else {
            Vec::new()
        };
        let mut groups: Vec<_> = groups
            .into_iter()
            .filter_map(|group| group.besides(&own_groups))
            .collect();
        // Attributes of a zombie are irrelevant.
        for thread in threads_of(process.host_pid).unwrap_or_default() {
            let found = Found::of(thread);
            let is_first = thread == process.host_pid;
            if found == own && (groups.is_empty() || !is_first) {
                continue;
            }
            let attributes = ThreadAttributes {
                pid: process.pid,
                thread: number_inside(process.host_pid, thread).unwrap_or(process.pid),
                cpus: found.cpus.filter(|cpus| own.cpus.as_ref() != Some(cpus)),
                io_priority: found.io_priority.filter(|it| own.io_priority != Some(*it)),
                timer_slack_ns: found
                    .timer_slack_ns
                    .filter(|it| own.timer_slack_ns != Some(*it)),
                core_filter: found
                    .core_filter
                    .filter(|it| is_first && own.core_filter != Some(*it)),
                personality: found.personality.filter(|it| own.personality != Some(*it)),
                memory_policy: found
                    .memory_policy
                    .filter(|it| own.memory_policy != Some(*it)),
                control_groups: if is_first {
                    mem::take(&mut groups)
                } else {
                    Vec::new()
                },
            };
            let is_plain = attributes
                == ThreadAttributes {
                    pid: attributes.pid,
                    thread: attributes.thread,
                    ..ThreadAttributes::default()
                };
            recorded.extend((!is_plain).then_some(attributes));
        }
    }
    recorded
}

/// Sets the recorded attributes on the threads of the restored `processes`, and returns a line for each failure.
///
/// A thread is bound to those of its recorded CPUs that this machine permits. If there are none, it may run on all CPUs
/// of this machine: a job on other CPUs is better than no job.
#[must_use]
pub fn give_back_attributes(recorded: &[ThreadAttributes], processes: &[Process]) -> Vec<String> {
    let mut lost = Vec::new();
    for attributes in recorded {
        let same = processes
            .iter()
            .find(|process| process.pid == attributes.pid);
        // An exited thread is skipped.
        if let Some(thread) = same.and_then(|it| thread_of(it.host_pid, attributes.thread)) {
            attributes.give_to(thread, &mut lost);
        }
    }
    lost.sort();
    lost.dedup();
    lost
}

impl ThreadAttributes {
    fn give_to(&self, thread: i32, lost: &mut Vec<String>) {
        let pid = self.pid;
        let mut failed = |what: String, result: io::Result<()>| match result {
            Ok(()) => {}
            // The thread has exited.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => lost.push(format!(
                "cannot restore the {what} of process {pid}: {error}"
            )),
        };
        if let Some(priority) = self.io_priority {
            let set = set_io_priority(thread, priority);
            failed("I/O priority".into(), set.map_err(io::Error::from));
        }
        if let Some(slack) = self.timer_slack_ns {
            let set = fs::write(format!("/proc/{thread}/timerslack_ns"), slack.to_string());
            failed("timer slack".into(), set);
        }
        if let Some(filter) = self.core_filter {
            let path = format!("/proc/{thread}/coredump_filter");
            failed(
                "core filter".into(),
                fs::write(path, format!("{filter:#x}")),
            );
        }
        for group in &self.control_groups {
            let what = format!("control group {}", group.name());
            failed(what, group.take(thread));
        }
        // Only the thread itself can set these attributes, and it has done so before.
        if self.personality.is_some() && self.personality != personality(thread) {
            lost.push(format!("cannot restore the personality of process {pid}"));
        }
        if self.memory_policy.is_some() && self.memory_policy != MemoryPolicy::of(thread) {
            lost.push(format!("cannot restore the memory policy of process {pid}"));
        }
        let Some(wanted) = &self.cpus else { return };
        let has = wanted.give_to(thread).and_then(|()| Cpus::of(thread));
        match has {
            Err(Errno::ESRCH) => {}
            Ok(has) if has == *wanted => {}
            // The kernel has omitted CPUs that this machine or cgroup lacks.
            Ok(has) => lost.push(format!(
                "process {pid} was bound to CPUs {wanted} and is bound to {has}"
            )),
            Err(_) => lost.push(format!(
                "process {pid} was bound to CPUs {wanted} and is bound to none"
            )),
        }
    }
}

fn own_personality() -> Option<u32> {
    const ONLY_ASK: libc::c_ulong = 0xffff_ffff;
    // SAFETY: takes a number only, which changes nothing.
    u32::try_from(unsafe { libc::personality(ONLY_ASK) }).ok()
}

fn personality(thread: i32) -> Option<u32> {
    number(thread, "personality", 16).and_then(|bits| bits.try_into().ok())
}

/// Reads a number from a file of a thread in `/proc`.
fn number(thread: i32, name: &str, radix: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{thread}/{name}")).ok()?;
    u64::from_str_radix(text.trim(), radix).ok()
}

fn io_priority(thread: i32) -> Result<i32, Errno> {
    let thread = libc::c_long::from(thread);
    // SAFETY: plain system call with integer arguments.
    let got = unsafe { libc::syscall(libc::SYS_ioprio_get, IOPRIO_WHO_PROCESS, thread) };
    i32::try_from(Errno::result(got)?).map_err(|_| Errno::EINVAL)
}

fn set_io_priority(thread: i32, priority: i32) -> Result<(), Errno> {
    let (thread, priority) = (libc::c_long::from(thread), libc::c_long::from(priority));
    // SAFETY: plain system call with integer arguments.
    let set = unsafe { libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, thread, priority) };
    Errno::result(set).map(drop)
}
