//! The process that keeps a sandbox's network connected: it runs pasta, starts it again if it ends, and kills it when
//! the sandbox has ended. It reports to the supervisor by lines on its standard output, and outlives it.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{geteuid, setsid};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::own_network::{NAME_SERVER, needs_name_server};
use super::root::{close_from, ignore_signals};
use super::seccomp::small_pipes;
use crate::clock;

/// First argument that makes the binary keep a sandbox's network connected.
pub const KEEPER_ARGUMENT: &str = "__network";

/// Arguments of pasta (0.0~git20230309, Debian 12, and newer). Ports on which the job listens are opened on the machine,
/// and the machine's ports are opened in the job's loopback. By default pasta gives the gateway's address to the machine,
/// which would hide a name server there. `--quiet` leaves errors.
const ARGUMENTS: [&str; 14] = [
    "--config-net",
    "--no-map-gw",
    "--foreground",
    "--quiet",
    "--ns-mac-addr",
    MAC,
    "--tcp-ports",
    "auto",
    "--udp-ports",
    "auto",
    "--tcp-ns",
    "auto",
    "--udp-ns",
    "auto",
];
/// Further arguments if the job has the machine's name server at this address.
const FORWARD: [&str; 2] = ["--dns-forward", NAME_SERVER];
/// Further arguments where ckpt-run is root, whose user namespace another user could not join.
const AS_ROOT: [&str; 2] = ["--runas", "0:0"];
/// Hardware address of the job's network device. It is always the same, because the device's link-local IPv6 address
/// contains it, and a restored socket may be bound to that.
const MAC: &str = "02:63:6b:70:74:01";
/// Folder for pasta's pid file. pasta's `AppArmor` profile allows it.
const PID_FOLDER: &str = "/tmp";
/// Time limit for pasta's start, which takes some 20 ms.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Interval between two checks of pasta's pid file.
const START_POLL_MS: u8 = 5;
/// Shortest and longest wait before pasta is started again.
const AGAIN_AFTER: Duration = Duration::from_millis(100);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(30);
/// Number of bytes of pasta's last messages that a report contains.
const SAID_BYTES: usize = 300;

/// A line from the keeper to the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// The network is connected.
    Connected,
    /// pasta could not be started, or has ended, for this reason.
    Failed(String),
}

impl Report {
    /// Parses a line; returns the report and pasta's pid.
    pub fn parse(line: &str) -> Option<(Self, Option<i32>)> {
        let line = line.strip_suffix('\n')?;
        if let Some(pid) = line.strip_prefix("connected ") {
            return Some((Self::Connected, Some(pid.parse().ok()?)));
        }
        let reason = line.strip_prefix("failed ")?;
        Some((Self::Failed(reason.to_owned()), None))
    }
}

/// A line for [`Report::parse`].
fn say(words: fmt::Arguments<'_>) {
    // Without a supervisor, no one needs it.
    let _ = writeln!(io::stdout(), "{words}");
}

/// Keeps the network connected until the sandbox has ended. The arguments are the pid of its first process, and the path
/// of pasta.
#[must_use]
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    // Only the standard streams are needed.
    close_from(3);
    // Signals for the supervisor's process group must not end it. pasta inherits what is ignored.
    let _ = setsid();
    ignore_signals();
    let sandbox = arguments.next().and_then(|pid| pid.into_string().ok());
    let (Some(sandbox), Some(pasta)) = (sandbox, arguments.next()) else {
        return ExitCode::FAILURE;
    };
    match keep(&sandbox, Path::new(&pasta)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("failed {error}"));
            ExitCode::FAILURE
        }
    }
}

fn keep(sandbox: &str, program: &Path) -> io::Result<()> {
    let pid = sandbox.parse().ok().and_then(Pid::from_raw);
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    let ended = pidfd_open(pid, PidfdFlags::empty())?;
    let mut pasta = Pasta::start(program, sandbox)?;
    pasta.await_start()?;
    let mut wait = AGAIN_AFTER;
    loop {
        say(format_args!("connected {}", pasta.child.id()));
        let begun = clock::now();
        let Some(reason) = pasta.watch(&ended)? else {
            return Ok(());
        };
        say(format_args!("failed {reason}"));
        if begun.elapsed() > AGAIN_AFTER_MAX {
            wait = AGAIN_AFTER;
        }
        pasta = loop {
            if is_readable(&ended, wait)? {
                return Ok(());
            }
            wait = (2 * wait).min(AGAIN_AFTER_MAX);
            let mut next = Pasta::start(program, sandbox)?;
            if next.await_start().is_ok() {
                break next;
            }
        };
    }
}

/// A running pasta, which is killed when the value is dropped.
struct Pasta {
    child: Child,
    ended: OwnedFd,
    stderr: ChildStderr,
    /// The last messages.
    said: Vec<u8>,
    folder: tempfile::TempDir,
}

impl Pasta {
    fn start(program: &Path, sandbox: &str) -> io::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("ckpt-run-network-")
            .tempdir_in(PID_FOLDER)?;
        let mut command = Command::new(program);
        small_pipes::limit(&mut command);
        let mut child = command
            .args(ARGUMENTS)
            .args(if geteuid().is_root() {
                &AS_ROOT[..]
            } else {
                &[]
            })
            .args(if needs_name_server() {
                &FORWARD[..]
            } else {
                &[]
            })
            .arg("--pid")
            .arg(folder.path().join("pid"))
            .arg(sandbox)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or(io::ErrorKind::InvalidData)?;
        let Some(stderr) = child.stderr.take() else {
            unreachable!("its messages go to a pipe");
        };
        Ok(Self {
            ended: pidfd_open(pid, PidfdFlags::empty())?,
            child,
            stderr,
            said: Vec::new(),
            folder,
        })
    }

    /// Waits until pasta has written its pid file, which it does at the end of its start.
    fn await_start(&mut self) -> io::Result<()> {
        let deadline: Instant = clock::now() + START_LIMIT;
        let pid_file = self.folder.path().join("pid");
        loop {
            if fs::metadata(&pid_file).is_ok_and(|file| file.len() > 0) {
                return Ok(());
            }
            if self.look(None, START_POLL_MS.into())? == Seen::PastaEnded {
                return Err(io::Error::other(self.reason()));
            }
            if clock::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Waits until pasta has ended, and returns its reason; `None` if the sandbox has ended.
    fn watch(&mut self, sandbox: &OwnedFd) -> io::Result<Option<String>> {
        loop {
            match self.look(Some(sandbox), PollTimeout::NONE)? {
                Seen::SandboxEnded => return Ok(None),
                Seen::PastaEnded => return Ok(Some(self.reason())),
                Seen::Nothing => {}
            }
        }
    }

    /// Waits for the end of the sandbox or of pasta, and reads pasta's messages.
    fn look(&mut self, sandbox: Option<&OwnedFd>, limit: PollTimeout) -> io::Result<Seen> {
        let stderr = self.stderr.as_fd();
        let mut watched = vec![
            PollFd::new(self.ended.as_fd(), PollFlags::POLLIN),
            PollFd::new(stderr, PollFlags::POLLIN),
        ];
        watched.extend(sandbox.map(|sandbox| PollFd::new(sandbox.as_fd(), PollFlags::POLLIN)));
        match poll(&mut watched, limit) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let is = |place: usize| watched.get(place).is_some_and(|fd| fd.any() == Some(true));
        let (ended, speaks, sandbox_ended) = (is(0), is(1), is(2));
        if sandbox_ended {
            return Ok(Seen::SandboxEnded);
        }
        if speaks {
            let mut bytes = [0; 4096];
            let read = self.stderr.read(&mut bytes)?;
            self.said.extend_from_slice(&bytes[..read]);
            let surplus = self.said.len().saturating_sub(4 * SAID_BYTES);
            self.said.drain(..surplus);
            if read > 0 {
                return Ok(Seen::Nothing);
            }
            // pasta closes it only when it ends.
            self.child.wait()?;
            return Ok(Seen::PastaEnded);
        }
        Ok(if ended {
            Seen::PastaEnded
        } else {
            Seen::Nothing
        })
    }

    /// Returns the reason of pasta's end: its exit and its last messages in one line.
    fn reason(&mut self) -> String {
        let ended = self.child.wait();
        let ended = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
        let said = String::from_utf8_lossy(&self.said);
        // Without a system logger, this version says so for each message.
        let lines = said.lines().map(str::trim);
        let lines: Vec<_> = lines
            .filter(|line| !line.is_empty() && !line.ends_with("bytes to syslog"))
            .collect();
        let said: String = lines.join("; ");
        let cut = said.chars().count().saturating_sub(SAID_BYTES);
        let said: String = said.chars().skip(cut).collect();
        if said.is_empty() { ended } else { said }
    }
}

impl Drop for Pasta {
    fn drop(&mut self) {
        // Both fail if it has been waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An observation of the keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Nothing,
    PastaEnded,
    SandboxEnded,
}

/// Waits for a process's end, at most this long.
fn is_readable(process: &OwnedFd, limit: Duration) -> io::Result<bool> {
    let mut watched = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    match poll(&mut watched, limit) {
        Ok(ready) => Ok(ready > 0),
        Err(nix::errno::Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_read_back() {
        let connected = Report::parse("connected 4711\n");
        assert_eq!(connected, Some((Report::Connected, Some(4711))));
        let failed = Report::parse("failed no device\n");
        assert_eq!(failed, Some((Report::Failed("no device".to_owned()), None)));
        for cut in ["connected 4711", "connected \n", "", "other\n"] {
            assert_eq!(Report::parse(cut), None, "{cut}");
        }
    }
}
