//! The supervisor's handle of a sandbox: sends requests, dispatches events, and ends the sandbox.

use std::ffi::OsString;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::Pid;

use super::callers_signals::CallersSignals;
use super::message_queues;
use super::mounts::{self, KnownMounts, MountChanges};
use super::network::{self, Connection, NetworkError};
use super::protocol::{Credentials, Ended, Event, Request, ToolCommand, receive, send};
use super::seccomp::Hidden;
use super::spawn::{Keyring, SpawnError, privilege_missing, spawn};
use super::user_namespace::is_in_user_namespace;
use super::{Isolation, Network};
use crate::network_socket::NetworkSocket;
use crate::sync::locked;

/// Time limit for pid 1 to open something.
const OPENING_LIMIT: Duration = Duration::from_secs(10);

/// Reasons why a request to the sandbox failed.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The sandbox could not be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// A step of pid 1 failed.
    #[error("cannot {operation}")]
    Step {
        /// The operation.
        operation: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The connection to pid 1 failed, or an unexpected message arrived.
    #[error("cannot talk to the sandbox")]
    Talk(#[source] io::Error),
    /// The mounts of the machine or the sandbox cannot be read.
    #[error("cannot read the mounts")]
    Mounts(#[source] io::Error),
    /// Pid 1 has exited.
    #[error("cannot reach the sandbox: it has ended")]
    Gone,
    /// The job's own network has no connection to the machine's.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// Another tool is running in the sandbox.
    #[error("cannot run two tools at once in one sandbox")]
    Busy,
    /// The tool did not exit in time and is still running.
    #[error("cannot wait for the tool: it has not ended after {0:?}")]
    Slow(Duration),
}

/// A running sandbox. Dropping the handle ends it: pid 1 sees the end of its control socket.
#[derive(Debug)]
pub struct Sandbox {
    pid: Pid,
    isolation: Isolation,
    /// `None` where the job's mounts are the machine's.
    known_mounts: Option<Mutex<KnownMounts>>,
    control: UnixStream,
    /// Lock held while a message is sent, because several threads send.
    sending: Mutex<()>,
    /// True if pid 1 was reaped. Its number may belong to another process then.
    reaped: Arc<Mutex<bool>>,
    tool_events: Mutex<Receiver<Event>>,
    /// Requested descriptors, or the system's error numbers.
    opened: Mutex<Receiver<io::Result<OwnedFd>>>,
    /// Features that the sandbox hides from the job.
    hidden: OnceLock<Hidden>,
    /// True if pid 1 has more to do after the job's end: for a watcher, or for the network's last data.
    has_last_work: AtomicBool,
}

impl Sandbox {
    /// Starts a sandbox and waits until it is ready.
    ///
    /// `on_event` is called, on a thread of the sandbox's own, with [`Event::Started`], [`Event::NotStarted`],
    /// [`Event::JobEnded`] and [`Event::Failed`]; then, once, with `None` when every process of the sandbox is gone.
    /// Call this from a thread that lives as long as the run: the kernel kills the sandbox when the thread that started
    /// it ends.
    ///
    /// # Errors
    /// [`SpawnError::NotPermitted`] or a [`SandboxError::Step`] with `EPERM` where namespaces are not allowed.
    pub fn start(
        program: &Path,
        isolation: Isolation,
        keyring: Keyring,
        environment: &[(OsString, OsString)],
        on_event: impl Fn(Option<Event>) + Send + 'static,
    ) -> Result<Arc<Self>, SandboxError> {
        let machines = mounts::of_the_machine().map_err(SandboxError::Mounts)?;
        let (pid, control) = spawn(program, isolation, keyring, environment)?;
        let first = receive::<Event>(&control).map_err(SandboxError::Talk);
        match first {
            Ok(Some((Event::Ready, _))) => {}
            failed => {
                abandon(pid);
                return Err(match failed {
                    Ok(Some((Event::Failed { operation, errno }, _)))
                        if isolation.is_user() && privilege_missing(errno) =>
                    {
                        SpawnError::forbidden(operation, io::Error::from_raw_os_error(errno)).into()
                    }
                    Ok(Some((Event::Failed { operation, errno }, _))) => SandboxError::Step {
                        operation,
                        source: io::Error::from_raw_os_error(errno),
                    },
                    Ok(_) => SandboxError::Gone,
                    Err(error) => error,
                });
            }
        }
        let known_mounts = match isolation
            .has_namespaces()
            .then(|| KnownMounts::of(pid.as_raw(), &machines))
        {
            Some(Err(error)) => {
                abandon(pid);
                return Err(SandboxError::Mounts(error));
            }
            Some(Ok(known)) => Some(Mutex::new(known)),
            None => None,
        };
        let network = match isolation
            .has_network()
            .then(|| Connection::start(program, pid))
        {
            Some(Err(error)) => {
                abandon(pid);
                return Err(error.into());
            }
            Some(Ok(connection)) => Some(connection.follow().map_err(SandboxError::Talk)?),
            None => None,
        };
        let (to_tool, tool_events) = channel();
        let (to_opener, opened) = channel();
        let listener = control.try_clone().map_err(SandboxError::Talk)?;
        let reaped = Arc::new(Mutex::new(false));
        let reaping = Arc::clone(&reaped);
        thread::Builder::new()
            .name("sandbox".to_owned())
            .spawn(move || {
                listen(&listener, (&to_tool, &to_opener), &on_event);
                // Who waits for a tool may trace a process of the job, and pid 1 cannot exit before that is released.
                drop((to_tool, to_opener));
                reap(pid, &reaping);
                if let Some(ended) = network {
                    network::await_end(&ended);
                }
                on_event(None);
            })
            .map_err(SandboxError::Talk)?;
        Ok(Arc::new(Self {
            pid,
            isolation,
            known_mounts,
            control,
            sending: Mutex::new(()),
            reaped,
            tool_events: Mutex::new(tool_events),
            opened: Mutex::new(opened),
            hidden: OnceLock::new(),
            has_last_work: AtomicBool::new(isolation.has_network()),
        }))
    }

    /// Returns the host pid of pid 1.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid.as_raw()
    }

    /// Returns true if pid 1 has exited.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        *locked(&self.reaped)
    }

    /// The file by which the machine gets a new one of the sandbox's terminals; `None` where they are the machine's.
    #[must_use]
    pub fn terminal_maker(&self) -> Option<PathBuf> {
        let isolated = self.isolation.has_namespaces();
        isolated.then(|| format!("/proc/{}/root/dev/pts/ptmx", self.pid).into())
    }

    /// Returns the job's isolation.
    #[must_use]
    pub fn isolation(&self) -> Isolation {
        self.isolation
    }

    /// Returns the mounts that the job sees and the machine does not have; none if the sandbox has exited. A mount is
    /// [newly unmounted](MountChanges::newly_unmounted) once.
    #[must_use]
    pub fn mount_changes(&self) -> MountChanges {
        let known = self.known_mounts.as_ref();
        let changes = known.and_then(|known| locked(known).changes(self.pid()).ok());
        changes.unwrap_or_default()
    }

    /// Returns true if CRIU can restore the job's TCP connections: it has `CAP_NET_ADMIN` over their network.
    #[must_use]
    pub fn keeps_connections(&self) -> bool {
        self.isolation != Isolation::User(Network::Host)
    }

    /// Returns true if CRIU has no privileges on the machine in here, only over the job.
    #[must_use]
    pub fn is_unprivileged(&self) -> bool {
        self.isolation.is_user() || is_in_user_namespace()
    }

    /// Returns what the job's filter hides. If the sandbox has not installed it, because CRIU has restored it from an image
    /// of another machine, that is not known and may be everything.
    #[must_use]
    pub fn hidden_or_all(&self) -> Hidden {
        let hidden = self.hidden.get().copied();
        let hidden = hidden.filter(|hidden| *hidden != Hidden::NOTHING);
        hidden.unwrap_or(Hidden::EVERYTHING)
    }

    /// Starts the job, in the terminal that its stdout is, if it is one; [`Event::Started`], [`Event::NotStarted`] or [`Event::Failed`] follows.
    ///
    /// # Errors
    /// Pid 1 cannot be reached.
    pub fn start_job(
        &self,
        command: &[OsString],
        hidden: Hidden,
        user: Option<&Credentials>,
        stdio: &[OwnedFd; 3],
    ) -> Result<(), SandboxError> {
        let (program, arguments) = command.split_first().ok_or(SandboxError::Gone)?;
        let _ = self.hidden.set(hidden);
        let request = Request::Start {
            program: program.clone(),
            arguments: arguments.to_vec(),
            hidden,
            signals: CallersSignals::recorded(),
            user: user.cloned(),
        };
        let descriptors: Vec<RawFd> = stdio.iter().map(AsRawFd::as_raw_fd).collect();
        self.say(&request, &descriptors)
    }

    /// Has pid 1 end everything once one of these timers has expired, even if this process does not run then.
    ///
    /// # Errors
    /// Pid 1 cannot be reached.
    pub fn end_at(&self, timers: &[BorrowedFd<'_>]) -> Result<(), SandboxError> {
        let descriptors: Vec<RawFd> = timers.iter().map(AsRawFd::as_raw_fd).collect();
        self.say(&Request::EndAt, &descriptors)
    }

    fn say(&self, request: &Request, descriptors: &[RawFd]) -> Result<(), SandboxError> {
        let _alone = locked(&self.sending);
        send(&self.control, request, descriptors).map_err(SandboxError::Talk)
    }

    /// Creates a socket in the job's network namespace.
    ///
    /// # Errors
    /// The kernel refuses, or pid 1 cannot be reached.
    pub fn socket(&self, kind: NetworkSocket) -> io::Result<OwnedFd> {
        if !self.isolation.has_network() {
            return kind.open();
        }
        self.open(&Request::Socket(kind))
    }

    /// Returns the names of the job's POSIX message queues, open and closed; none if the job uses the machine's.
    ///
    /// # Errors
    /// The kernel refuses, or pid 1 cannot be reached.
    pub fn message_queues(&self) -> io::Result<Vec<OsString>> {
        if !self.isolation.has_namespaces() {
            return Ok(Vec::new());
        }
        match self.open(&Request::MessageQueues) {
            // The kernel has no message queues, or the job has exited.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ENODEV | libc::ENOENT | libc::ESRCH)
                ) =>
            {
                Ok(Vec::new())
            }
            folder => message_queues::names(folder?),
        }
    }

    fn open(&self, request: &Request) -> io::Result<OwnedFd> {
        let opened = locked(&self.opened);
        while opened.try_recv().is_ok() {} // a late reply
        self.say(request, &[]).map_err(io::Error::other)?;
        let reply = opened.recv_timeout(OPENING_LIMIT);
        reply.map_err(|error| match error {
            RecvTimeoutError::Timeout => io::Error::from(io::ErrorKind::TimedOut),
            RecvTimeoutError::Disconnected => io::ErrorKind::NotConnected.into(),
        })?
    }

    /// Sends a signal to the job's process group, or to every process of the job.
    ///
    /// # Errors
    /// Pid 1 cannot be reached.
    pub fn signal(&self, signal: i32, everyone: bool) -> Result<(), SandboxError> {
        self.say(&Request::Signal { signal, everyone }, &[])
    }

    /// Runs a tool in the sandbox. Only one tool can run at a time.
    ///
    /// # Errors
    /// [`SandboxError::Busy`] while another tool is running; pid 1 cannot be reached.
    pub fn run_tool(
        &self,
        tool: ToolCommand,
        descriptors: &[RawFd],
    ) -> Result<ToolRun<'_>, SandboxError> {
        let events = self
            .tool_events
            .try_lock()
            .map_err(|_| SandboxError::Busy)?;
        while events.try_recv().is_ok() {} // the late end of an earlier tool
        if tool.restores.is_some() {
            let _ = self.hidden.set(tool.hidden);
        }
        self.say(&Request::Run(tool), descriptors)?;
        Ok(ToolRun {
            events,
            sandbox: self,
        })
    }

    /// Runs a watcher beside the job. It exists as long as the sandbox, and reads a byte from its standard input when all
    /// other processes of the sandbox have exited. If it is killed earlier, pid 1 writes `obituary` into its first
    /// descriptor.
    ///
    /// # Errors
    /// Pid 1 cannot be reached.
    pub fn watch(
        &self,
        tool: ToolCommand,
        obituary: Vec<u8>,
        descriptors: &[RawFd],
    ) -> Result<(), SandboxError> {
        self.has_last_work.store(true, Ordering::Relaxed);
        self.say(&Request::Watch { tool, obituary }, descriptors)
    }

    /// Kills every process in the sandbox. The end is reported as the last event.
    pub fn kill(&self) {
        // A sandbox that is gone is what was wanted.
        match self.isolation {
            Isolation::Namespaces | Isolation::User(_)
                if self.has_last_work.load(Ordering::Relaxed)
                    && self.say(&Request::End, &[]).is_ok() => {}
            Isolation::Namespaces | Isolation::User(_) => {
                let reaped = locked(&self.reaped);
                if !*reaped {
                    let _ = kill(self.pid, Signal::SIGKILL);
                }
            }
            // Without a namespace, only pid 1 can kill them. Its remaining messages may still arrive.
            Isolation::None => drop(self.control.shutdown(Shutdown::Write)),
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = self.control.shutdown(Shutdown::Both);
    }
}

/// A tool that is running in the sandbox.
#[derive(Debug)]
pub struct ToolRun<'a> {
    events: std::sync::MutexGuard<'a, Receiver<Event>>,
    sandbox: &'a Sandbox,
}

impl ToolRun<'_> {
    /// Kills the tool. Its end must still be waited for.
    ///
    /// # Errors
    /// Pid 1 cannot be reached.
    pub fn kill(&self) -> Result<(), SandboxError> {
        self.sandbox.say(&Request::KillTools, &[])
    }

    /// Waits until the tool has exited. After [`SandboxError::Slow`] it is still running.
    ///
    /// # Errors
    /// The tool could not be started, the sandbox has ended or is ending, or `limit` has passed.
    pub fn wait(&self, limit: Duration) -> Result<Ended, SandboxError> {
        match self.events.recv_timeout(limit) {
            Ok(Event::ToolEnded(ended)) => Ok(ended),
            Ok(Event::Failed { operation, errno }) => Err(SandboxError::Step {
                operation,
                source: io::Error::from_raw_os_error(errno),
            }),
            Ok(
                Event::Ready
                | Event::Started(_)
                | Event::NotStarted(_)
                | Event::JobEnded(_)
                | Event::Opened(_),
            )
            | Err(RecvTimeoutError::Disconnected) => Err(SandboxError::Gone),
            Err(RecvTimeoutError::Timeout) => Err(SandboxError::Slow(limit)),
        }
    }
}

/// Ends a sandbox that could not be set up.
fn abandon(pid: Pid) {
    let _ = kill(pid, Signal::SIGKILL);
    let _ = waitpid(pid, None);
}

/// Waits until every process of the sandbox has exited.
fn reap(pid: Pid, reaped: &Mutex<bool>) {
    // Pid 1 becomes reapable only after every other process of its namespace has exited. Its number stays reserved
    // until it is reaped, so no other process can be killed by this number.
    let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
    let mut reaped = locked(reaped);
    let _ = waitpid(pid, None);
    *reaped = true;
}

fn listen(
    control: &UnixStream,
    (to_tool, to_opener): (&Sender<Event>, &Sender<io::Result<OwnedFd>>),
    on_event: &impl Fn(Option<Event>),
) {
    while let Ok(Some((event, descriptors))) = receive::<Event>(control) {
        match event {
            Event::ToolEnded(_) => drop(to_tool.send(event)),
            Event::Opened(errno) => {
                let opened = match errno {
                    Some(errno) => Err(io::Error::from_raw_os_error(errno)),
                    None => descriptors
                        .into_iter()
                        .next()
                        .ok_or(io::ErrorKind::InvalidData.into()),
                };
                drop(to_opener.send(opened));
            }
            Event::Failed { .. } => {
                // Pid 1 handles one request at a time, so the event is for the current waiter.
                let _ = to_tool.send(event.clone());
                on_event(Some(event));
            }
            Event::Ready | Event::Started(_) | Event::NotStarted(_) | Event::JobEnded(_) => {
                on_event(Some(event));
            }
        }
    }
}
