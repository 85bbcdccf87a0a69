//! The job's standard streams: pipes of ckpt-run, or a terminal of ckpt-run. They outlive each start of the job.
//!
//! ```text
//!                stdin          stdout      stderr
//! in a terminal  it, or a pipe  it          it, or a pipe
//! in none        a pipe         a pipe      a pipe
//! ```
//! The choice is made when the job starts; a restored job gets the streams that it had. A stream that the caller has
//! redirected stays a pipe.

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::sys::stat::SFlag;
use serde::{Deserialize, Serialize};

use crate::config::Tty;
use crate::criu::Inherited;
use crate::job::{
    self, Input, InputMark, OtherBytes, Output, OutputMark, Pty, Relation, RewindError, StatusLine,
    TerminalDevice,
};
use crate::sandbox::Sandbox;
use crate::telemetry;

/// The job's standard streams.
#[derive(Debug)]
pub(crate) struct Streams {
    pub stdin: Input,
    pub stdout: Output,
    /// Unused if the job's stderr and stdout are the same file.
    pub stderr: Output,
    /// True if both have the same destination at the caller (`2>&1`): the job gets one pipe for both, so that its lines
    /// keep their order.
    joined: bool,
    /// The streams of a new job that are its terminal, if it gets one.
    in_terminal: Option<Parts>,
    /// The caller's terminal, on whichever stream of ckpt-run it is.
    callers: Option<OwnedFd>,
    /// The current job's terminal.
    terminal: Option<(Pty, Parts)>,
}

/// The streams of the job that are its terminal; stdout always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parts {
    /// True if stdin is the terminal.
    pub stdin: bool,
    /// True if stderr is the terminal.
    pub stderr: bool,
}

/// The job's terminal at a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalMark {
    /// The device files that led to the terminal.
    pub devices: Vec<TerminalDevice>,
    /// The streams of the job that were the terminal.
    pub parts: Parts,
    /// True if the terminal is nonblocking: the job does not wait at it.
    pub nonblocking: bool,
}

/// The positions of all streams at a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Marks {
    /// The job's stdin.
    pub stdin: InputMark,
    /// The job's stdout.
    pub stdout: OutputMark,
    /// The job's stderr; equal to stdout if both have the same destination.
    pub stderr: OutputMark,
    /// The job's terminal, if any.
    #[serde(default)]
    pub terminal: Option<TerminalMark>,
}

/// The descriptors of ckpt-run that replace those that the job had open.
pub(crate) type Ends = Vec<(Inherited, OwnedFd)>;

impl Streams {
    /// Creates the streams from those of this process.
    pub fn ours(tty: Tty) -> io::Result<Self> {
        let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
        let joined = same_file(stdout.as_fd(), stderr.as_fd());
        // Truncating a file that also receives ckpt-run's own messages would cut them off too.
        let apart = telemetry::is_apart();
        let wanted = match tty {
            Tty::Auto => stdin.is_terminal() && stdout.is_terminal() && can_have_terminal(),
            Tty::Always => true,
            Tty::Never => false,
        };
        let parts = Parts {
            stdin: stdin.is_terminal(),
            stderr: joined || stderr.is_terminal(),
        };
        let ours = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
        let callers = ours.into_iter().find(IsTerminal::is_terminal);
        Ok(Self {
            stdin: Input::new(Input::callers())?,
            stdout: Output::new(stdout.as_fd().try_clone_to_owned()?, apart || !joined),
            stderr: Output::new(stderr.as_fd().try_clone_to_owned()?, apart),
            joined,
            in_terminal: wanted.then_some(parts),
            callers: callers.map(|one| one.try_clone_to_owned()).transpose()?,
            terminal: None,
        })
    }

    /// Puts ckpt-run's own messages on separate lines between the job's output.
    pub fn share_lines(&self) {
        if telemetry::is_apart() {
            return;
        }
        let joined = self.joined;
        if io::stderr().is_terminal() {
            let output = if joined { &self.stdout } else { &self.stderr };
            telemetry::share_lines_with(output.line_writer());
            return;
        }
        let (stdout, stderr) = (self.stdout.line_watch(), self.stderr.line_watch());
        telemetry::share_lines_with(move |line| {
            // Both functions must be called for every line, so the operator must not be lazy.
            let at_start = stderr() & (!joined || stdout());
            let before = if at_start { "" } else { "\n" };
            // If stderr cannot be written to, the failure cannot be reported either.
            let _ = io::stderr().write_all(format!("{before}{line}").as_bytes());
        });
    }

    /// Returns the place for a status line of ckpt-run below the job's output. It exists only if stderr is a terminal
    /// and ckpt-run sees everything that is written to that terminal; not if the reader of ckpt-run's stdout writes to
    /// it too (`| tee`).
    pub fn status_line(&self) -> Option<StatusLine> {
        let capable = std::env::var_os("TERM").is_some_and(|name| name != "dumb");
        if !io::stderr().is_terminal() || !capable || telemetry::is_apart() {
            return None;
        }
        if self.joined {
            return Some(self.stdout.status_line());
        }
        let kind = nix::sys::stat::fstat(io::stdout()).ok()?.st_mode & SFlag::S_IFMT.bits();
        let is_file = kind == SFlag::S_IFREG.bits();
        is_file.then(|| self.stderr.status_line())
    }

    /// Connects the stdin, stdout and stderr of a new job in this sandbox, and returns the job's ends.
    pub fn connect(&mut self, sandbox: &Sandbox) -> io::Result<[OwnedFd; 3]> {
        let Some(parts) = self.in_terminal else {
            let stdin = self.stdin.connect()?;
            let [stdout, stderr] = self.connect_pipes()?;
            return Ok([stdin, stdout, stderr]);
        };
        let slave = self.connect_terminal(parts, sandbox)?;
        let stdin = if parts.stdin {
            slave.try_clone()?
        } else {
            self.stdin.connect()?
        };
        let stderr = if parts.stderr {
            slave.try_clone()?
        } else {
            self.stderr.connect()?
        };
        Ok([stdin, slave, stderr])
    }

    /// Ensures that the files of the outputs hold what they held at the marks; see [`Output::make_whole`].
    pub fn make_whole(
        &self,
        marks: &Marks,
        relation: Relation,
        aside: &Path,
        other_bytes: OtherBytes,
    ) -> Result<(), RewindError> {
        let (stdout, stderr) = (&self.stdout, &self.stderr);
        stdout.make_whole(&marks.stdout, relation, (aside, "stdout"), other_bytes)?;
        stderr.make_whole(&marks.stderr, relation, (aside, "stderr"), other_bytes)
    }

    /// Ends the rewind of the outputs: the restored job runs.
    pub fn keep(&self) {
        self.stdout.keep();
        self.stderr.keep();
    }

    /// Creates the replacements, in this sandbox, for the streams that a job had at a snapshot.
    pub fn connect_again(&mut self, marks: &Marks, sandbox: &Sandbox) -> io::Result<Ends> {
        let mut ends = Ends::new();
        if marks.stdin.pipe != 0 {
            let stdin = self.stdin.connect_pipe()?;
            ends.push((Inherited::Pipe(marks.stdin.pipe), stdin));
        }
        let Some(mark) = &marks.terminal else {
            let [stdout, stderr] = self.connect_pipes()?;
            ends.push((Inherited::Pipe(marks.stdout.pipe), stdout));
            if marks.stderr.pipe != marks.stdout.pipe {
                ends.push((Inherited::Pipe(marks.stderr.pipe), stderr));
            }
            return Ok(ends);
        };
        let slave = self.connect_terminal(mark.parts, sandbox)?;
        if mark.nonblocking
            && let Some((pty, _)) = &self.terminal
        {
            pty.set_nonblocking()?;
        }
        for device in &mark.devices {
            ends.push((inherited(device), slave.try_clone()?));
        }
        if !mark.parts.stderr {
            let stderr = self.stderr.connect()?;
            ends.push((Inherited::Pipe(marks.stderr.pipe), stderr));
        }
        Ok(ends)
    }

    /// Starts to deliver input: the job has its stdin (or CRIU has it for the job).
    pub fn open(&mut self) {
        self.stdin.open();
        // CRIU restored the window size of the snapshot.
        self.resize();
    }

    /// Closes the job's terminal: all its users have exited, and its output ends once ckpt-run has closed it too.
    pub fn disconnect_terminal(&mut self) {
        self.terminal = None;
        self.stdin.disconnect_terminal();
    }

    /// Returns the positions of the streams. They are exact while the job is frozen.
    pub fn mark(&self) -> io::Result<Marks> {
        let stdout = self.stdout.mark()?;
        let with_stdout = match &self.terminal {
            Some((_, parts)) => parts.stderr,
            None => self.joined,
        };
        let stderr = if with_stdout {
            stdout
        } else {
            self.stderr.mark()?
        };
        let mark = |(pty, parts): &(Pty, Parts)| {
            Ok::<_, io::Error>(TerminalMark {
                devices: pty.devices()?,
                parts: *parts,
                nonblocking: pty.is_nonblocking()?,
            })
        };
        Ok(Marks {
            stdin: self.stdin.mark()?,
            stdout,
            stderr,
            terminal: self.terminal.as_ref().map(mark).transpose()?,
        })
    }

    /// Returns the terminals of ckpt-run that the job may have open.
    pub fn terminals(&self) -> io::Result<Vec<Inherited>> {
        let Some((pty, _)) = &self.terminal else {
            return Ok(Vec::new());
        };
        Ok(pty.devices()?.iter().map(inherited).collect())
    }

    /// Returns true if the caller's keyboard input is for the job's terminal.
    pub fn job_reads_keys(&self) -> bool {
        self.terminal.as_ref().is_some_and(|(_, parts)| parts.stdin)
    }

    /// Gives the job's terminal the window size of the caller's.
    pub fn resize(&self) {
        let size = self
            .callers
            .as_ref()
            .and_then(|one| job::window(one.as_fd()));
        if let Some(((pty, _), size)) = self.terminal.as_ref().zip(size)
            && let Err(error) = pty.resize(size)
        {
            tracing::debug!(%error, "cannot resize the job's terminal");
        }
    }

    /// Opens the first terminal of a fresh sandbox: it has the same number as at the snapshot.
    fn connect_terminal(&mut self, parts: Parts, sandbox: &Sandbox) -> io::Result<OwnedFd> {
        let caller = self.callers.as_ref().map(AsFd::as_fd);
        let maker = sandbox.terminal_maker();
        let pty = match maker.map(|maker| Pty::open_from(&maker, caller)) {
            Some(Ok(pty)) => pty,
            // The sandbox has no separate terminals, or cannot be accessed: a terminal of the machine is used.
            Some(Err(_)) | None => Pty::open(caller)?,
        };
        let slave = pty.slave()?;
        self.stdout.connect_terminal(pty.master()?)?;
        if parts.stdin {
            self.stdin.connect_terminal(pty.master()?);
        }
        self.terminal = Some((pty, parts));
        Ok(slave)
    }

    /// Connects new pipes for stdout and stderr, and returns the job's ends.
    fn connect_pipes(&mut self) -> io::Result<[OwnedFd; 2]> {
        let stdout = self.stdout.connect()?;
        let stderr = if self.joined {
            stdout.try_clone()?
        } else {
            self.stderr.connect()?
        };
        Ok([stdout, stderr])
    }
}

fn can_have_terminal() -> bool {
    let pty = Pty::open(None);
    if let Err(error) = &pty {
        tracing::warn!(%error, "cannot create a terminal for the job, which gets pipes instead; check that /dev/pts is mounted");
    }
    pty.is_ok()
}

fn inherited(terminal: &TerminalDevice) -> Inherited {
    Inherited::Terminal {
        device: terminal.device,
        filesystem: terminal.filesystem,
    }
}

fn same_file(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    let identity = |descriptor| {
        nix::sys::stat::fstat(descriptor)
            .map(|about| (about.st_dev, about.st_ino))
            .ok()
    };
    identity(one) == identity(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_from_before_there_were_terminals_are_understood() {
        let old = r#"{"stdin": {"position": 7, "pipe": 1}, "stdout": {"position": 8, "pipe": 2, "file": null},
                      "stderr": {"position": 9, "pipe": 3, "file": null}}"#;
        let marks: Marks = serde_json::from_str(old).unwrap();
        assert_eq!((marks.stdin.pipe, marks.stderr.position), (1, 9));
        assert_eq!(marks.terminal, None);
    }
}
