//! The job's processes, read from `/proc`.

use std::fs;
use std::path::Path;

use nix::sys::signal::Signal;
use procfs::FromBufRead;
use procfs::ProcError;
use procfs::process::{MMapPath, MemoryMaps, ProcState, Process as ProcessEntry, Stat, Status};

/// Limit on the processes of one job; more are treated as a runaway fork.
const PROCESSES_MAX: usize = 32_768;
/// Signals that do not end a process without a handler: the kernel ignores them, or they stop or continue it.
const HARMLESS: [Signal; 8] = [
    Signal::SIGCHLD,
    Signal::SIGCONT,
    Signal::SIGSTOP,
    Signal::SIGTSTP,
    Signal::SIGTTIN,
    Signal::SIGTTOU,
    Signal::SIGURG,
    Signal::SIGWINCH,
];
/// Signals of faults, without that of traps, by which CRIU itself stops threads.
const FAULTS: [Signal; 5] = [
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGILL,
    Signal::SIGFPE,
    Signal::SIGSYS,
];
/// The kernel's name for the memory that CRIU's code is mapped from (compel, `CRIUMFD`).
const CRIU_MAPPING: &str = "/memfd:CRIUMFD (deleted)";

/// The reason why the process tree could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// A process of the tree has exited, or `/proc` has an unexpected content.
    #[error("cannot read process {pid} in /proc")]
    Process {
        /// Pid as the host sees it.
        pid: i32,
        /// The reason.
        #[source]
        source: ProcError,
    },
    /// The root of the tree does not exist.
    #[error("cannot find the job's first process")]
    NoRoot,
    /// More processes than any job has.
    #[error("cannot read the process tree: more than {PROCESSES_MAX} processes")]
    TooMany,
}

/// A process of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Pid as the host sees it.
    pub host_pid: i32,
    /// Pid as the job sees it; the same number if the job has no PID namespace.
    pub pid: i32,
    /// Resident memory in bytes.
    pub resident: u64,
}

/// Returns the child of `parent` (a host pid) whose innermost pid is `pid`.
///
/// # Errors
/// [`TreeError::NoRoot`] if there is none.
pub fn child_with_pid(parent: i32, pid: i32) -> Result<i32, TreeError> {
    let mut unread = None;
    for child in children(parent)? {
        match describe(child) {
            Ok(process) if process.pid == pid => return Ok(child),
            // Another child may exit at any moment.
            Ok(_) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => unread = Some(error),
        }
    }
    Err(unread.unwrap_or(TreeError::NoRoot))
}

/// Returns true if a process (a host pid) runs or could run: it exists and is not a zombie. A process of which only the
/// first thread has exited looks like a zombie, but runs.
#[must_use]
pub fn is_alive(pid: i32) -> bool {
    stat(pid).is_ok_and(|stat| stat.num_threads > 1 || !is_over(&stat))
}

/// Returns true if the first thread of a process (a host pid) has exited and another one has not.
pub(super) fn has_lost_first_thread(pid: i32) -> bool {
    stat(pid).is_ok_and(|stat| stat.num_threads > 1 && is_over(&stat))
}

fn is_over(stat: &Stat) -> bool {
    matches!(stat.state(), Ok(ProcState::Zombie | ProcState::Dead))
}

/// Returns true if a stopped process dies as soon as it continues, because a deadly signal was sent to it. Returns
/// false if that cannot be determined.
#[must_use]
pub fn is_doomed(pid: i32) -> bool {
    status(pid).is_ok_and(|status| {
        let sent = status.sigpnd | status.shdpnd;
        let held_off = status.sigblk | status.sigign | status.sigcgt;
        let harmless = HARMLESS.iter().map(|signal| 1 << (*signal as u32 - 1));
        let harmless = harmless.fold(0_u64, |all, one| all | one);
        sent & !held_off & !harmless != 0
    })
}

/// Returns the first of `processes` that is stopped by a signal or a debugger, by its pid as the job sees it.
#[must_use]
pub fn first_stopped(processes: &[Process]) -> Option<i32> {
    let stopped = |process: &&Process| is_stopped(process.host_pid);
    processes.iter().find(stopped).map(|process| process.pid)
}

/// Returns true if a process (a host pid) is stopped by a signal or a debugger.
#[must_use]
pub fn is_stopped(pid: i32) -> bool {
    let state = ProcessEntry::new(pid)
        .and_then(|entry| entry.stat())
        .and_then(|stat| stat.state());
    state.is_ok_and(|state| matches!(state, ProcState::Stopped | ProcState::Tracing))
}

/// Reads `/proc/PID/status` of a process, or of a thread by its own number; both as the host sees them. A name in it
/// may be cut in the middle of a character, since the kernel keeps 15 bytes of each.
pub(super) fn status(pid: i32) -> Result<Status, ProcError> {
    let text = fs::read(format!("/proc/{pid}/status"))?;
    Status::from_buf_read(String::from_utf8_lossy(&text).as_bytes())
}

/// Returns true if a process (a host pid) has a pending stop signal, which stops it when its tracer lets it run.
#[must_use]
pub fn is_to_stop(pid: i32) -> bool {
    const STOPS: [Signal; 4] = [
        Signal::SIGSTOP,
        Signal::SIGTSTP,
        Signal::SIGTTIN,
        Signal::SIGTTOU,
    ];
    let bit = |signal: &Signal| 1_u64 << (*signal as u32 - 1);
    status(pid).is_ok_and(|status| STOPS.iter().any(|stop| status.shdpnd & bit(stop) != 0))
}

/// Reads `/proc/PID/stat` of a process (a host pid).
pub(super) fn stat(pid: i32) -> Result<Stat, ProcError> {
    ProcessEntry::new(pid)?.stat()
}

/// Returns true if a process (a host pid) has exited and was not waited for.
pub(super) fn is_zombie(pid: i32) -> bool {
    let state = stat(pid).and_then(|stat| stat.state());
    state.is_ok_and(|state| state == ProcState::Zombie)
}

/// Reads `/proc/PID/maps` of a process (a host pid). In names that are not UTF-8, the invalid bytes become U+FFFD;
/// `/proc/PID/map_files` has the names' bytes.
pub(super) fn maps(pid: i32) -> Result<MemoryMaps, ProcError> {
    mappings(&format!("/proc/{pid}/maps"))
}

/// Reads the mappings from `/proc/PID/smaps`, for which the kernel checks every page.
pub(super) fn smaps(pid: i32) -> Result<MemoryMaps, ProcError> {
    mappings(&format!("/proc/{pid}/smaps"))
}

fn mappings(path: &str) -> Result<MemoryMaps, ProcError> {
    MemoryMaps::from_buf_read(String::from_utf8_lossy(&fs::read(path)?).as_bytes())
}

/// Returns true if one of `processes` was killed while it was traced.
#[must_use]
pub fn died_under_trace(processes: &[Process]) -> bool {
    processes.iter().any(|process| {
        status(process.host_pid)
            .is_ok_and(|status| status.tracerpid != 0 && status.state.starts_with('Z'))
    })
}

/// Returns a thread of `processes` that is stopped by a fault about which its tracer has not asked, and the signal. CRIU
/// does not ask about the one in which its own code runs, and would wait for its answer forever.
#[must_use]
pub fn stopped_by_fault(processes: &[Process]) -> Option<(i32, Signal)> {
    let entries = processes.iter().map(|it| ProcessEntry::new(it.host_pid));
    let threads = entries.filter_map(|entry| entry.and_then(|it| it.tasks()).ok());
    threads.flatten().flatten().find_map(|thread| {
        let stat = thread.stat().ok()?;
        // The kernel has the signal of the stop here until the tracer asks.
        let signal = Signal::try_from(stat.exit_code?).ok()?;
        let is_stopped = stat.state().ok()? == ProcState::Tracing;
        (is_stopped && FAULTS.contains(&signal)).then_some((thread.tid, signal))
    })
}

/// Returns the first of `processes` in which a killed CRIU has left a part of itself, or which it still stops.
///
/// CRIU works in a process through code that it maps there. If CRIU is killed, that code returns the thread to its
/// former state, but stays mapped, and other changes (a TCP connection in repair mode) remain.
#[must_use]
pub fn with_remains_of_criu(processes: &[Process]) -> Option<Process> {
    let found = processes.iter().find(|process| {
        let Ok(entry) = ProcessEntry::new(process.host_pid) else {
            return false;
        };
        let stopped = entry
            .stat()
            .and_then(|stat| stat.state())
            .is_ok_and(|state| state == ProcState::Tracing);
        stopped
            || maps(process.host_pid).is_ok_and(|maps| {
                maps.iter().any(|map| match &map.pathname {
                    MMapPath::Path(path) => path.starts_with(CRIU_MAPPING),
                    _ => false,
                })
            })
    });
    found.copied()
}

/// Returns `root` (a host pid) and all its descendants, parents before children.
///
/// A process that exits while the tree is read is left out; a process that is forked meanwhile may be missing, unless
/// the tree is frozen.
///
/// # Errors
/// [`TreeError::NoRoot`] if the root has exited, [`TreeError::Process`] if an existing process cannot be read.
pub fn tree(root: i32) -> Result<Vec<Process>, TreeError> {
    let first = describe(root).map_err(|error| match error {
        error if is_gone(&error) => TreeError::NoRoot,
        error => error,
    })?;
    let mut found = vec![first];
    let mut next = 0;
    while let Some(process) = found.get(next).copied() {
        next += 1;
        let below = match children(process.host_pid) {
            Err(error) if is_gone(&error) => continue,
            below => below?,
        };
        for pid in below {
            match describe(pid) {
                Err(error) if is_gone(&error) => {}
                described => found.push(described?),
            }
        }
        if found.len() > PROCESSES_MAX {
            return Err(TreeError::TooMany);
        }
    }
    Ok(found)
}

/// Returns true if the cause is that the process has exited; other causes must not count as an exit.
pub(super) fn is_gone(error: &TreeError) -> bool {
    match error {
        TreeError::Process { pid, source } => {
            matches!(source, ProcError::NotFound(_)) || !Path::new(&format!("/proc/{pid}")).exists()
        }
        TreeError::NoRoot | TreeError::TooMany => false,
    }
}

pub(super) fn children(pid: i32) -> Result<Vec<i32>, TreeError> {
    let read = || -> Result<Vec<i32>, ProcError> {
        let mut all = Vec::new();
        for task in ProcessEntry::new(pid)?.tasks()? {
            // A thread that has exited has no children any more: they were given to another thread.
            let Ok(children) = task.and_then(|task| task.children()) else {
                continue;
            };
            all.extend(
                children
                    .into_iter()
                    .filter_map(|child| i32::try_from(child).ok()),
            );
        }
        Ok(all)
    };
    read().map_err(|source| TreeError::Process { pid, source })
}

pub(super) fn describe(host_pid: i32) -> Result<Process, TreeError> {
    let read = || -> Result<Process, ProcError> {
        let pid = status(host_pid)?
            .nspid
            .and_then(|pids| pids.last().copied())
            .unwrap_or(host_pid);
        let resident = ProcessEntry::new(host_pid)?.statm()?.resident * procfs::page_size();
        Ok(Process {
            host_pid,
            pid,
            resident,
        })
    };
    read().map_err(|source| TreeError::Process {
        pid: host_pid,
        source,
    })
}

#[cfg(test)]
mod tests {
    use nix::sys::ptrace;
    use nix::sys::signal::kill;
    use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn a_child_is_in_its_parents_tree() {
        let me = i32::try_from(std::process::id()).unwrap();
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let found = tree(me).unwrap();
        assert_eq!(found[0].host_pid, me);
        let process = found.iter().find(|process| process.host_pid == pid);
        let process = *process.unwrap();
        assert_eq!(process.pid, pid);
        assert_eq!(child_with_pid(me, pid).unwrap(), pid);
        assert!(is_alive(pid));
        // Other tests of this process stop their own children.
        assert_eq!(with_remains_of_criu(&[process]), None);
        drop(child.stdin.take());
        while is_alive(pid) {
            std::thread::yield_now();
        }
        // The process was not waited for, so it is a zombie now.
        assert_eq!(child_with_pid(me, pid).unwrap(), pid);
        child.wait().unwrap();
        assert!(matches!(child_with_pid(me, pid), Err(TreeError::NoRoot)));
    }

    #[test]
    fn a_process_with_a_name_cut_within_a_character_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        // The kernel keeps 15 bytes of the name.
        let program = folder.path().join("trainiermodellé");
        // A copy could still be open for writing in a child of another test.
        std::os::unix::fs::symlink("/bin/sh", &program).unwrap();
        let mut child = std::process::Command::new(&program)
            .args(["-c", "cat; exit 0"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // Once it answers, there are two.
        std::io::Write::write_all(&mut stdin, b"a").unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        assert!(
            fs::read(format!("/proc/{pid}/comm"))
                .unwrap()
                .contains(&0xc3)
        );
        let me = i32::try_from(std::process::id()).unwrap();
        assert_eq!(child_with_pid(me, pid).unwrap(), pid);
        assert_eq!(tree(pid).unwrap().len(), 2);
        drop(stdin);
        child.wait().unwrap();
    }

    #[test]
    fn a_fault_is_seen_until_its_tracer_asks() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "echo; read line; kill -SEGV $$"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Its start is over: that would stop a traced process, too.
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        ptrace::attach(pid).unwrap();
        let seen = || stopped_by_fault(&tree(pid.as_raw()).unwrap());
        let stopped = |signal| WaitStatus::Stopped(pid, signal);
        assert_eq!(waitpid(pid, None).unwrap(), stopped(Signal::SIGSTOP));
        assert_eq!(seen(), None);
        ptrace::cont(pid, None).unwrap();
        drop(child.stdin.take());
        while seen().is_none() {
            std::thread::yield_now();
        }
        assert_eq!(seen(), Some((pid.as_raw(), Signal::SIGSEGV)));
        assert_eq!(waitpid(pid, None).unwrap(), stopped(Signal::SIGSEGV));
        assert_eq!(seen(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_pending_deadly_signal_dooms_an_unprepared_stopped_process() {
        for (handling, doomed) in [
            ("", true),
            ("trap '' TERM;", false),
            ("trap : TERM;", false),
        ] {
            let mut child = std::process::Command::new("sh")
                .args(["-c", &format!("{handling} kill -STOP $$; exit 0")])
                .spawn()
                .unwrap();
            let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
            let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED)).unwrap();
            assert_eq!(stopped, WaitStatus::Stopped(pid, Signal::SIGSTOP));
            assert!(!is_doomed(pid.as_raw()));
            kill(pid, Signal::SIGTERM).unwrap();
            assert_eq!(is_doomed(pid.as_raw()), doomed, "{handling}");
            kill(pid, Signal::SIGCONT).unwrap();
            assert_eq!(child.wait().unwrap().success(), !doomed);
        }
    }
}
