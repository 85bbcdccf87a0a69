//! A pseudo-terminal for the job, and the caller's terminal in front of it.
//!
//! ```text
//! caller's terminal, raw ──▶ stdin-read ──▶ master │ slave ──▶ job's stdin
//!                        ◀── output     ◀──        │       ◀── job's stdout, stderr
//! ```
//! The line discipline between master and slave does what a terminal's does: echo, editing, Ctrl-C. The caller's does
//! nothing meanwhile; its modes are given back when the job stops, ends, or we do.
//!
//! Must not know who runs the job, or how the slave gets to it.

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

/// The window where nobody has one: what a terminal without a size is taken for.
const WINDOW: Winsize = Winsize {
    ws_row: 24,
    ws_col: 80,
    ws_xpixel: 0,
    ws_ypixel: 0,
};
/// The name under which a process finds its own terminal.
const OWN_TERMINAL: &str = "/dev/tty";

/// How both ends are opened.
const FLAGS: OpenptFlags = OpenptFlags::RDWR
    .union(OpenptFlags::NOCTTY)
    .union(OpenptFlags::CLOEXEC);

/// A terminal's device file, as CRIU knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalDevice {
    /// Number of the device.
    pub device: u64,
    /// Number of the file system that it is in.
    pub filesystem: u64,
}

/// Both ends of a pseudo-terminal. The master says that the job is gone once no slave is open: also not ours.
#[derive(Debug)]
pub struct Pty {
    master: File,
    slave: OwnedFd,
}

impl Pty {
    /// A new one of the machine's, with the modes and the window of the caller's.
    ///
    /// # Errors
    /// When there is none to be had.
    pub fn open(caller: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        Self::of(openpt(FLAGS)?, caller)
    }

    /// As `open`, from this file, which makes terminals that are elsewhere.
    ///
    /// # Errors
    /// When there is none to be had.
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

    /// Another descriptor of our end.
    ///
    /// # Errors
    /// When there are too many.
    pub fn master(&self) -> io::Result<File> {
        self.master.try_clone()
    }

    /// Another descriptor of the job's end.
    ///
    /// # Errors
    /// When there are too many.
    pub fn slave(&self) -> io::Result<OwnedFd> {
        self.slave.try_clone()
    }

    /// Whether reads and writes of the job's end do not wait.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn is_nonblocking(&self) -> io::Result<bool> {
        Ok(fcntl_getfl(&self.slave)?.contains(OFlags::NONBLOCK))
    }

    /// Has reads and writes of the job's end not wait: CRIU (4.2.1) does not restore that of a terminal of ours.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        Ok(fcntl_setfl(
            &self.slave,
            fcntl_getfl(&self.slave)? | OFlags::NONBLOCK,
        )?)
    }

    /// The device files that lead to it: its own, and `/dev/tty` for those it belongs to.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub fn devices(&self) -> io::Result<Vec<TerminalDevice>> {
        let own = File::from(self.slave()?).metadata()?;
        let by_name = fs::metadata(OWN_TERMINAL).ok();
        let of = |metadata: fs::Metadata| TerminalDevice {
            device: metadata.rdev(),
            filesystem: metadata.dev(),
        };
        Ok([own].into_iter().chain(by_name).map(of).collect())
    }

    /// Gives it a window of this size; whoever is in its foreground gets SIGWINCH if that is new.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn resize(&self, window: Winsize) -> io::Result<()> {
        Ok(tcsetwinsize(&self.master, window)?)
    }
}

/// The size of a terminal's window; `None` where it is no terminal or has none.
#[must_use]
pub fn window(terminal: BorrowedFd<'_>) -> Option<Winsize> {
    let window = tcgetwinsize(terminal).ok()?;
    (window.ws_row > 0 && window.ws_col > 0).then_some(window)
}

/// A key that means something to more than the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// The job is interrupted (Ctrl-C, Ctrl-\).
    Interrupt,
    /// The job is to be stopped (Ctrl-Z). Its terminal does not do that: the kernel leaves a session alone whose leader
    /// has no parent in it.
    Suspend,
}

/// The first such key among what is typed at this master, and its place; none while the job reads all keys itself, or
/// a shell in it has another process group in the foreground, which it watches over.
#[must_use]
pub fn first_key(master: BorrowedFd<'_>, typed: &[u8]) -> Option<(usize, Key)> {
    let modes = tcgetattr(master).ok()?;
    if !modes.local_modes.contains(LocalModes::ISIG) {
        return None;
    }
    let codes = &modes.special_codes;
    let meaning = |byte: u8| match byte {
        0 => None, // is no key
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

/// Whether the leader of the terminal's session is in its foreground.
fn leads_foreground(master: BorrowedFd<'_>) -> bool {
    let session = tcgetsid(master);
    session.is_ok() && session == tcgetpgrp(master)
}

/// What ends a line that we write there: a terminal in raw mode does not go back to the first column by itself.
#[must_use]
pub fn line_end(sink: BorrowedFd<'_>) -> &'static str {
    let raw = tcgetattr(sink).is_ok_and(|modes| !modes.output_modes.contains(OutputModes::OPOST));
    if raw { "\r\n" } else { "\n" }
}

/// The caller's terminal. Dropped, it has its own modes again.
#[derive(Debug)]
pub struct CallersTerminal {
    terminal: File,
    /// Its own modes, while it has ours.
    own: Option<Termios>,
}

impl CallersTerminal {
    /// That of our stdin, if it is one.
    #[must_use]
    pub fn of_stdin() -> Option<Self> {
        let stdin = io::stdin();
        let terminal = File::from(stdin.as_fd().try_clone_to_owned().ok()?);
        isatty(&terminal).then_some(Self {
            terminal,
            own: None,
        })
    }

    /// Makes it pass everything on as it is. False when it is not ours to set, because we are in its background.
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

    /// Gives it its own modes back.
    pub fn give_back(&mut self) {
        if let Some(modes) = self.own.take()
            && self.is_ours()
        {
            self.set(&modes);
        }
    }

    /// Whether it has our modes.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.own.is_some()
    }

    /// Whether we are in its foreground. One that is not our controlling terminal has none for us.
    fn is_ours(&self) -> bool {
        tcgetpgrp(&self.terminal).map_or(true, |group| group == rustix::process::getpgrp())
    }

    /// With SIGTTOU blocked: where the shell takes the terminal away under our hands, we are not stopped.
    fn set(&self, modes: &Termios) {
        let mut background_write = SigSet::empty();
        background_write.add(Signal::SIGTTOU);
        let before = background_write.thread_swap_mask(SigmaskHow::SIG_BLOCK);
        // A terminal that is gone needs no modes.
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

    /// One that behaves as a caller's terminal, and is not our controlling one.
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
    fn the_callers_terminal_has_its_modes_again_when_it_is_dropped() {
        let (pty, mut caller) = caller();
        let slave = pty.slave().unwrap();
        let canonical = || {
            let modes = tcgetattr(&slave).unwrap();
            modes.local_modes.contains(LocalModes::ICANON)
        };
        assert!(caller.take() && caller.is_taken());
        assert!(!canonical());
        assert_eq!(line_end(slave.as_fd()), "\r\n");
        // Taken twice, it still knows its own.
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
        // Nobody leads the session.
        assert_eq!(first(b"abc\x04\x1a\0"), None);
        // A job that reads keys itself.
        caller.take();
        assert_eq!(first(b"\x03"), None);
    }

    #[test]
    fn what_is_typed_arrives_and_a_line_of_output_is_that_of_a_terminal() {
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
