//! Pid 1 of the sandbox: an event loop over the control socket, SIGCHLD and the timers of leases.
//!
//! Pid 1 is single-threaded and never waits for anything else, so that forks are safe and it cannot hang. It exits when
//! the supervisor closes the control socket, or when a lease expires. In a PID namespace, the kernel then kills all
//! processes in it. Without one, pid 1 kills them itself.

use std::collections::HashMap;
use std::fs;
use std::io::{self, PipeWriter, Write as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{ExitCode, Stdio};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, setsid};

use super::protocol::{Ended, Event, JobPids, Request, ToolCommand, receive, send};
use super::spawn::CONTROL_DESCRIPTOR;
use super::tool_start::start_tool;
use super::user_namespace::{map_user, network_of, user_of};
use super::{descendants, message_queues, mounts, own_network, root};
use crate::network_socket::NetworkSocket;

/// Runs pid 1 until the supervisor is gone. `mode` is `namespaces`, `user UID GID`, `network UID GID SETTINGS` or `none`.
#[must_use]
pub fn main(mode: &str) -> ExitCode {
    let control = take_control();
    let isolated = mode != "none";
    let users = (user_of(mode), network_of(mode));
    let result = Init::set_up(control, isolated, users).and_then(Init::run);
    if !isolated {
        // Without a PID namespace, only this call prevents the job from outliving the supervisor.
        descendants::kill_all();
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[allow(unsafe_code, reason = "the control socket is inherited by number")]
fn take_control() -> UnixStream {
    use std::os::fd::FromRawFd;
    // SAFETY: the supervisor has put the control socket there, and nothing else in this process owns it.
    let control = unsafe { OwnedFd::from_raw_fd(CONTROL_DESCRIPTOR) };
    UnixStream::from(control)
}

struct Init {
    control: UnixStream,
    children: SignalFd,
    /// Timers of the leases. The job must not run after one has expired, even if the supervisor does not run.
    timers: Vec<OwnedFd>,
    isolated: bool,
    /// True if the sandbox has a user namespace of its own.
    in_user_namespace: bool,
    /// True if the sandbox has a network namespace of its own.
    has_network: bool,
    job: Option<JobPids>,
    /// Running tools, with true for one that restores the job.
    tools: HashMap<Pid, bool>,
    /// The watcher, which exits after the job.
    watcher: Option<Watcher>,
    /// The process that opens the folder of message queues.
    opener: Option<Pid>,
    /// End of a restored job whose restore has not been reported yet.
    early_end: Option<Ended>,
}

impl Init {
    fn set_up(
        control: UnixStream,
        isolated: bool,
        (user, network): (Option<(u32, u32)>, Option<&str>),
    ) -> io::Result<Self> {
        let attempt = || -> Result<SignalFd, (&str, io::Error)> {
            let step =
                |operation, result: io::Result<()>| result.map_err(|error| (operation, error));
            step("close inherited descriptors", close_inherited(&control))?;
            step(
                "start a session",
                setsid().map(drop).map_err(io::Error::from),
            )?;
            if let Some(user) = user {
                step("map the user into a user namespace", map_user(user))?;
            }
            if isolated {
                step("make the mounts private", mounts::slave_mounts())?;
                step("mount /proc", mounts::mount_proc())?;
                // If this fails, the job uses the machine's terminals.
                let _ = mounts::mount_terminals(user.is_some());
                if let (Some(network), Some((_, group))) = (network, user) {
                    let done = own_network::set_up(network, group);
                    step("make name servers reachable", done)?;
                }
            } else {
                step(
                    "adopt orphans",
                    prctl::set_child_subreaper(true).map_err(io::Error::from),
                )?;
            }
            step("open /dev/null", root::detach_standard_streams())?;
            let mut signals = SigSet::empty();
            signals.add(Signal::SIGCHLD);
            step(
                "block SIGCHLD",
                signals.thread_block().map_err(io::Error::from),
            )?;
            SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
                .map_err(|error| ("watch children", error.into()))
        };
        match attempt() {
            Ok(children) => {
                send(&control, &Event::Ready, &[])?;
                Ok(Self {
                    control,
                    children,
                    timers: Vec::new(),
                    isolated,
                    in_user_namespace: user.is_some(),
                    has_network: network.is_some(),
                    job: None,
                    tools: HashMap::new(),
                    watcher: None,
                    opener: None,
                    early_end: None,
                })
            }
            Err((operation, error)) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                send(
                    &control,
                    &Event::Failed {
                        operation: operation.to_owned(),
                        errno,
                    },
                    &[],
                )?;
                Err(error)
            }
        }
    }

    fn run(mut self) -> io::Result<()> {
        // A message to a supervisor that was killed fails.
        let served = self.serve();
        self.end();
        served
    }

    /// Carries out requests until there are no more, or until a timer expires.
    fn serve(&mut self) -> io::Result<()> {
        loop {
            let sockets = [self.control.as_fd(), self.children.as_fd()];
            let watched = sockets
                .into_iter()
                .chain(self.timers.iter().map(AsFd::as_fd));
            let mut watched: Vec<PollFd<'_>> = watched
                .map(|file| PollFd::new(file, PollFlags::POLLIN))
                .collect();
            match poll(&mut watched, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let is_ready = |file: &PollFd<'_>| file.any().unwrap_or(true);
            let requested = is_ready(&watched[0]);
            if watched[sockets.len()..].iter().any(is_ready) {
                return Ok(());
            }
            self.reap()?;
            if requested {
                match receive(&self.control)? {
                    Some((Request::End, _)) | None => return Ok(()),
                    Some((request, descriptors)) => self.handle(request, descriptors)?,
                }
            }
        }
    }

    fn handle(&mut self, request: Request, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let answer = match request {
            Request::Start {
                program,
                arguments,
                hidden,
                signals,
                user,
            } => self
                .start(
                    &root::JobCommand {
                        program: &program,
                        arguments: &arguments,
                        hidden,
                        signals,
                        user: user.as_ref(),
                    },
                    descriptors,
                )
                .map(Some),
            Request::Run(tool) => self.run_tool(&tool, &descriptors).map(|()| None),
            Request::Watch { tool, obituary } => {
                self.watch(&tool, obituary, descriptors).map(|()| None)
            }
            Request::EndAt => {
                self.timers = descriptors;
                Ok(None)
            }
            Request::End => Ok(None),
            Request::Signal { signal, everyone } => {
                self.signal(signal, everyone);
                Ok(None)
            }
            Request::Socket(kind) => return self.open_socket(kind),
            Request::MessageQueues => return self.open_message_queues(),
            Request::KillTools => {
                for tool in self.tools.keys() {
                    // The tool is not reaped yet, so the number belongs to no other process.
                    let _ = kill(*tool, Signal::SIGKILL);
                }
                Ok(None)
            }
        };
        let event = answer.unwrap_or_else(|error| {
            Some(Event::Failed {
                operation: "start a process".to_owned(),
                errno: error.raw_os_error().unwrap_or(libc::EIO),
            })
        });
        event.map_or(Ok(()), |event| send(&self.control, &event, &[]))
    }

    fn start(&mut self, job: &root::JobCommand<'_>, stdio: Vec<OwnedFd>) -> io::Result<Event> {
        let stdio = match <[OwnedFd; 3]>::try_from(stdio) {
            Ok([stdin, stdout, stderr]) => [in_namespace(stdin)?, stdout, stderr],
            Err(_) => return Err(Errno::EINVAL.into()),
        };
        if self.isolated {
            root::number_on(root::draw_pid()? - 1)?;
        }
        match root::start(job, stdio, self.isolated, self.in_user_namespace) {
            Ok(pids) => {
                self.job = Some(pids);
                Ok(Event::Started(pids))
            }
            Err(error) => Ok(Event::NotStarted(error.raw_os_error().unwrap_or(libc::EIO))),
        }
    }

    fn run_tool(&mut self, tool: &ToolCommand, descriptors: &[OwnedFd]) -> io::Result<()> {
        if let Some(offsets) = tool.clock_offsets {
            // Takes effect in what is forked: `start_tool` does not use vfork, because of its closure. The supervisor compares
            // the clocks of the restored job.
            let _ = offsets.offset_children();
        }
        let child = start_tool(tool, Stdio::null(), descriptors)?;
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        if tool.restores.is_some() {
            self.job = tool.restores;
        }
        self.tools.insert(pid, tool.restores.is_some());
        Ok(())
    }

    fn open_socket(&self, kind: NetworkSocket) -> io::Result<()> {
        match kind.open() {
            Ok(socket) => send(&self.control, &Event::Opened(None), &[socket.as_raw_fd()]),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                send(&self.control, &Event::Opened(Some(errno)), &[])
            }
        }
    }

    fn open_message_queues(&mut self) -> io::Result<()> {
        let started = self.job.ok_or(Errno::ESRCH);
        let started = started.and_then(|job| message_queues::start_opener(&self.control, job.root));
        match started {
            Ok(opener) => self.opener = Some(opener),
            Err(errno) => send(&self.control, &Event::Opened(Some(errno as i32)), &[])?,
        }
        Ok(())
    }

    fn watch(
        &mut self,
        tool: &ToolCommand,
        obituary: Vec<u8>,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<()> {
        let (stdin, ends) = io::pipe()?;
        let child = start_tool(tool, stdin.into(), &descriptors)?;
        let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        let log = descriptors.into_iter().next().ok_or(Errno::EINVAL)?;
        self.watcher = Some(Watcher {
            pid,
            ends,
            log: log.into(),
            obituary,
        });
        // With a watcher, the end of the control socket ends the job first. The kernel would kill the watcher first.
        Ok(prctl::set_pdeathsig(None)?)
    }

    /// Ends the job and the tools; then the watcher, which records their last changes, and the network, which still
    /// carries their last data.
    fn end(&mut self) {
        if let Some(mut watcher) = self.watcher.take() {
            descendants::kill_all_but(watcher.pid);
            // The end alone is also what the kernel makes of a killed pid 1, before it kills the job.
            let _ = watcher.ends.write_all(b".");
            while waitpid(watcher.pid, None) == Err(Errno::EINTR) {}
        }
        if self.has_network {
            // All at once, which no fork escapes. Having none left is no error.
            let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
            while matches!(waitpid(None, None), Ok(_) | Err(Errno::EINTR)) {}
            own_network::await_delivery();
        }
    }

    fn signal(&self, signal: i32, everyone: bool) {
        let Some(job) = self.job else { return };
        let Ok(signal) = Signal::try_from(signal) else {
            return;
        };
        // A process that has exited needs no signal.
        let _ = match (everyone, self.isolated) {
            // In the namespace of pid 1, -1 stands for every other process in it.
            (true, true) if self.watcher.is_none() => kill(Pid::from_raw(-1), signal),
            (true, _) => {
                descendants::signal_all_but(&self.watcher(), signal);
                Ok(())
            }
            (false, _) => kill(Pid::from_raw(-job.job), signal),
        };
    }

    /// Reaps all children that have exited and reports relevant ones.
    fn reap(&mut self) -> io::Result<()> {
        while self.children.read_signal()?.is_some() {}
        loop {
            let (pid, ended) = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid, Ended::Exited(code)),
                Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, Ended::Signaled(signal as i32)),
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(()),
                Ok(_) | Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            self.report(pid, ended)?;
        }
    }

    fn report(&mut self, pid: Pid, ended: Ended) -> io::Result<()> {
        if let Some(mut watcher) = self.watcher.take_if(|watcher| watcher.pid == pid) {
            // Only the record of the job's files is affected, so errors are ignored.
            let _ = watcher.log.write_all(&watcher.obituary);
        } else if let Some(restores) = self.tools.remove(&pid) {
            if restores && ended != Ended::Exited(0) {
                self.job = None;
                self.early_end = None;
            }
            send(&self.control, &Event::ToolEnded(ended), &[])?;
            if let Some(ended) = self.early_end.take() {
                self.job_ended(ended)?;
            }
        } else if self.opener.take_if(|opener| *opener == pid).is_some() {
            if let Some(errno) = message_queues::failed_with(ended) {
                send(&self.control, &Event::Opened(Some(errno)), &[])?;
            }
        } else if self.job.is_some_and(|job| job.root == pid.as_raw()) {
            // During a restore, the end of the job must be reported after the result of the restore.
            if self.tools.values().any(|restores| *restores) {
                self.early_end = Some(ended);
            } else {
                self.job_ended(ended)?;
            }
        }
        Ok(())
    }

    /// Reports the job's end. After a crash, no process of the job may run until the supervisor, which may be taking a
    /// snapshot, has decided: orphans that notice the crash may remove files that the restored job needs. After an
    /// exit, orphans may run until then, to write their remaining data.
    fn job_ended(&self, ended: Ended) -> io::Result<()> {
        match ended {
            Ended::Signaled(_) => self.kill_orphans(),
            Ended::Exited(_) => {}
        }
        send(&self.control, &Event::JobEnded(ended), &[])
    }

    fn kill_orphans(&self) {
        if self.isolated && self.tools.is_empty() && self.watcher.is_none() {
            // All processes are killed at once. Having none left is no error.
            let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
            return;
        }
        // CRIU continues, because it may have everything for an image. Processes forked meanwhile end with the sandbox.
        let mut spared: Vec<Pid> = self.tools.keys().copied().collect();
        spared.extend(self.watcher());
        descendants::signal_all_but(&spared, Signal::SIGKILL);
    }

    fn watcher(&self) -> Vec<Pid> {
        self.watcher.iter().map(|watcher| watcher.pid).collect()
    }
}

/// The watcher of the job's files.
struct Watcher {
    pid: Pid,
    /// Pipe in which a byte makes the watcher exit.
    ends: PipeWriter,
    /// The watcher's first descriptor.
    log: fs::File,
    obituary: Vec<u8>,
}

/// Closes all inherited descriptors except the control socket.
fn close_inherited(control: &UnixStream) -> io::Result<()> {
    root::close_from(control.as_raw_fd() + 1);
    nix::fcntl::fcntl(
        control,
        nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC),
    )?;
    Ok(())
}

/// Returns the job's stdin: a pipe or terminal of the supervisor unchanged, `/dev/null` reopened in this mount
/// namespace.
fn in_namespace(stdin: OwnedFd) -> io::Result<OwnedFd> {
    let kind = nix::sys::stat::fstat(&stdin)?.st_mode & libc::S_IFMT;
    if kind == libc::S_IFIFO || rustix::termios::isatty(&stdin) {
        Ok(stdin)
    } else {
        Ok(fs::File::open("/dev/null")?.into())
    }
}
