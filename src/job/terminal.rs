//! A pseudo-terminal for the job, and the caller's terminal in front of it.
//!
//! ```text
//! caller's terminal, raw ──▶ stdin-read ──▶ master │ slave ──▶ job's stdin
//!                        ◀── output     ◀──        │       ◀── job's stdout, stderr
//! ```
//! The line discipline between master and slave does the work of a terminal: echo, editing, Ctrl-C. The caller's
//! terminal is in raw mode meanwhile. Its modes are restored when the job stops or exits, or ckpt-run exits.
//!
//! This module does not depend on the program that runs the job, or on the way the slave reaches it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{
    LocalModes, OptionalActions, OutputModes, SpecialCodeIndex, Termios, Winsize, isatty,
    tcgetattr, tcgetpgrp, tcgetsid, tcgetwinsize, tcsetattr, tcsetwinsize,
};
use serde::{Deserialize, Serialize};

/// Default window size, which programs assume for a terminal without a size.
const WINDOW: Winsize = Winsize {
    ws_row: 24,
    ws_col: 80,
    ws_xpixel: 0,
    ws_ypixel: 0,
};
/// Path by which a process opens its own terminal.
const OWN_TERMINAL: &str = "/dev/tty";

/// Flags for opening both ends.
const FLAGS: OpenptFlags = OpenptFlags::RDWR
    .union(OpenptFlags::NOCTTY)
    .union(OpenptFlags::CLOEXEC);

/// A terminal's device file in the form that CRIU uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalDevice {
    /// Number of the device.
    pub device: u64,
    /// Number of the file system with the device file.
    pub filesystem: u64,
}

/// Both ends of a pseudo-terminal. The master reports a hangup once no slave is open, including ckpt-run's own.
#[derive(Debug)]
pub struct Pty {
    master: File,
    slave: OwnedFd,
}

impl Pty {
    /// Opens a new terminal of the machine, with the modes and the window size of the caller's terminal.
    ///
    /// # Errors
    /// No terminal is available.
    pub fn open(caller: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        Self::of(openpt(FLAGS)?, caller)
    }

    /// Same as `open`, with the multiplexer `maker`, which may be in another mount of devpts.
    ///
    /// # Errors
    /// No terminal is available.
    pub fn open_from(maker: &Path, caller: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let flags = i32::try_from(FLAGS.bits()).unwrap_or_default();
        let mut options = File::options();
        let master = options.read(true).write(true).custom_flags(flags);
        Self::of(master.open(maker)?.into(), caller)
    }

    fn of(master: OwnedFd, caller: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        grantpt(&master)?;
        unlockpt(&master)?;
        let slave = ioctl_tiocgptpeer(&master, FLAGS)?;
        fcntl_setfl(&master, fcntl_getfl(&master)? | OFlags::NONBLOCK)?;
        if let Some(caller) = caller {
            tcsetattr(&slave, OptionalActions::Now, &tcgetattr(caller)?)?;
        }
        let pty = Self {
            master: File::from(master),
            slave,
        };
        pty.resize(caller.and_then(window).unwrap_or(WINDOW))?;
        Ok(pty)
    }

    /// Returns another descriptor of ckpt-run's end.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn master(&self) -> io::Result<File> {
        self.master.try_clone()
    }

    /// Returns another descriptor of the job's end.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn slave(&self) -> io::Result<OwnedFd> {
        self.slave.try_clone()
    }

    /// Returns true if the job's end is nonblocking.
    ///
    /// # Errors
    /// The flags cannot be read.
    pub fn is_nonblocking(&self) -> io::Result<bool> {
        Ok(fcntl_getfl(&self.slave)?.contains(OFlags::NONBLOCK))
    }

    /// Makes the job's end nonblocking. CRIU (4.2.1) does not restore this flag for a terminal of ckpt-run.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        Ok(fcntl_setfl(
            &self.slave,
            fcntl_getfl(&self.slave)? | OFlags::NONBLOCK,
        )?)
    }

    /// Returns the device files of the terminal: its own, and `/dev/tty` for processes with it as controlling terminal.
    ///
    /// # Errors
    /// The device file cannot be inspected.
    pub fn devices(&self) -> io::Result<Vec<TerminalDevice>> {
        let own = File::from(self.slave()?).metadata()?;
        let by_name = fs::metadata(OWN_TERMINAL).ok();
        let of = |metadata: fs::Metadata| TerminalDevice {
            device: metadata.rdev(),
            filesystem: metadata.dev(),
        };
        Ok([own].into_iter().chain(by_name).map(of).collect())
    }

    /// Sets the window size. Foreground processes get SIGWINCH if the size changes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn resize(&self, window: Winsize) -> io::Result<()> {
        Ok(tcsetwinsize(&self.master, window)?)
    }
}

/// Returns the window size of a terminal; `None` without a terminal or a size.
#[must_use]
pub fn window(terminal: BorrowedFd<'_>) -> Option<Winsize> {
    let window = tcgetwinsize(terminal).ok()?;
    (window.ws_row > 0 && window.ws_col > 0).then_some(window)
}

/// A key with a meaning for ckpt-run as well as for the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Interrupts the job (Ctrl-C, Ctrl-\).
    Interrupt,
    /// Stops the job (Ctrl-Z). The job's terminal cannot stop it, because the kernel does not stop a session whose
    /// leader has no parent in it.
    Suspend,
}

/// Returns the first such key in the text typed at this master, and its offset. Returns `None` while the job reads keys
/// in raw mode, or while a shell in the job has another process group in the foreground and handles the keys for it.
#[must_use]
pub fn first_key(master: BorrowedFd<'_>, typed: &[u8]) -> Option<(usize, Key)> {
    let modes = tcgetattr(master).ok()?;
    if !modes.local_modes.contains(LocalModes::ISIG) {
        return None;
    }
    let codes = &modes.special_codes;
    let meaning = |byte: u8| match byte {
        0 => None, // is disabled
        _ if byte == codes[SpecialCodeIndex::VINTR] => Some(Key::Interrupt),
        _ if byte == codes[SpecialCodeIndex::VQUIT] => Some(Key::Interrupt),
        _ if byte == codes[SpecialCodeIndex::VSUSP] && leads_foreground(master) => {
            Some(Key::Suspend)
        }
        _ => None,
    };
    let mut keys = typed.iter().enumerate();
    keys.find_map(|(place, byte)| Some((place, meaning(*byte)?)))
}

/// Returns true if the leader of the terminal's session is in the foreground.
fn leads_foreground(master: BorrowedFd<'_>) -> bool {
    let session = tcgetsid(master);
    session.is_ok() && session == tcgetpgrp(master)
}

/// Returns the line ending for this output. A terminal in raw mode needs a carriage return too.
#[must_use]
pub fn line_end(sink: BorrowedFd<'_>) -> &'static str {
    let raw = tcgetattr(sink).is_ok_and(|modes| !modes.output_modes.contains(OutputModes::OPOST));
    if raw { "\r\n" } else { "\n" }
}

/// The caller's terminal. Its original modes are restored on drop.
#[derive(Debug)]
pub struct CallersTerminal {
    terminal: File,
    /// Original modes, while ckpt-run's modes are set.
    own: Option<Termios>,
}

impl CallersTerminal {
    /// Returns the terminal of stdin, if stdin is one.
    #[must_use]
    pub fn of_stdin() -> Option<Self> {
        let stdin = io::stdin();
        let terminal = File::from(stdin.as_fd().try_clone_to_owned().ok()?);
        isatty(&terminal).then_some(Self {
            terminal,
            own: None,
        })
    }

    /// Sets raw mode, in which the terminal passes on everything unchanged. Returns false if ckpt-run is in the
    /// background and must not set it.
    pub fn take(&mut self) -> bool {
        if !self.is_ours() {
            return false;
        }
        if self.own.is_none() {
            self.own = tcgetattr(&self.terminal).ok();
        }
        let Some(mut modes) = self.own.clone() else {
            return false;
        };
        modes.make_raw();
        self.set(&modes);
        true
    }

    /// Restores the original modes.
    pub fn give_back(&mut self) {
        if let Some(modes) = self.own.take()
            && self.is_ours()
        {
            self.set(&modes);
        }
    }

    /// Returns true if the terminal has ckpt-run's modes.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.own.is_some()
    }

    /// Returns true if ckpt-run is in the terminal's foreground, or if the terminal is not ckpt-run's controlling
    /// terminal and has no foreground.
    fn is_ours(&self) -> bool {
        tcgetpgrp(&self.terminal).map_or(true, |group| group == rustix::process::getpgrp())
    }

    /// Sets the modes with SIGTTOU blocked, so that ckpt-run is not stopped if the shell takes the terminal back.
    fn set(&self, modes: &Termios) {
        let mut background_write = SigSet::empty();
        background_write.add(Signal::SIGTTOU);
        let before = background_write.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        // A closed terminal needs no modes.
        let _ = tcsetattr(&self.terminal, OptionalActions::Drain, modes);
        if let Ok(before) = before {
            let _ = before.thread_set_mask();
        }
    }
}

impl Drop for CallersTerminal {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl AsFd for CallersTerminal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.terminal.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    /// Returns a terminal that acts as the caller's terminal but is not the controlling one.
    fn caller() -> (Pty, CallersTerminal) {
        let pty = Pty::open(None).unwrap();
        let terminal = File::from(pty.slave().unwrap());
        let caller = CallersTerminal {
            terminal,
            own: None,
        };
        (pty, caller)
    }

    #[test]
    fn a_new_terminal_has_the_modes_and_the_window_of_the_callers() {
        let (pty, caller) = caller();
        let mut modes = tcgetattr(&caller).unwrap();
        modes.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&caller, OptionalActions::Now, &modes).unwrap();
        let size = Winsize {
            ws_row: 33,
            ws_col: 111,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        pty.resize(size).unwrap();
        let jobs = Pty::open(Some(caller.as_fd())).unwrap();
        let slave = jobs.slave().unwrap();
        let echoes = tcgetattr(&slave)
            .unwrap()
            .local_modes
            .contains(LocalModes::ECHO);
        assert!(!echoes);
        let window = window(slave.as_fd()).unwrap();
        assert_eq!((window.ws_row, window.ws_col), (33, 111));
    }

    #[test]
    fn the_callers_terminal_gets_its_modes_back_on_drop() {
        let (pty, mut caller) = caller();
        let slave = pty.slave().unwrap();
        let canonical = || {
            let modes = tcgetattr(&slave).unwrap();
            modes.local_modes.contains(LocalModes::ICANON)
        };
        assert!(caller.take() && caller.is_taken());
        assert!(!canonical());
        assert_eq!(line_end(slave.as_fd()), "\r\n");
        // A second call does not overwrite the stored modes.
        assert!(caller.take());
        drop(caller);
        assert!(canonical());
        assert_eq!(line_end(slave.as_fd()), "\n");
    }

    #[test]
    fn only_keys_with_a_meaning_have_one() {
        let (pty, mut caller) = caller();
        let master = pty.master().unwrap();
        let first = |typed| first_key(master.as_fd(), typed);
        assert_eq!(first(b"abc\x03"), Some((3, Key::Interrupt)));
        assert_eq!(first(b"\x1c"), Some((0, Key::Interrupt)));
        // The session has no leader.
        assert_eq!(first(b"abc\x04\x1a\0"), None);
        // The job reads keys in raw mode.
        caller.take();
        assert_eq!(first(b"\x03"), None);
    }

    #[test]
    fn typed_input_arrives_and_output_has_line_endings() {
        let pty = Pty::open(None).unwrap();
        let mut master = pty.master().unwrap();
        let mut job = File::from(pty.slave().unwrap());
        master.write_all(b"ab\x7fc\n").unwrap();
        let mut line = [0; 16];
        let got = job.read(&mut line).unwrap();
        assert_eq!(&line[..got], b"ac\n");
        job.write_all(b"out\n").unwrap();
        let mut seen = Vec::new();
        let mut piece = [0; 64];
        while !seen.ends_with(b"out\r\n") {
            match master.read(&mut piece) {
                Ok(got) => seen.extend(&piece[..got]),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
    }
}
