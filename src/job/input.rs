//! The job's stdin: the caller's, through a pipe or a terminal of ours.
//!
//! What the job had read of a pipe at a snapshot is known, and what came after it is
//! remembered, so that a restored job reads the same bytes again. What was typed at a
//! terminal is gone once it is typed: whoever did it sees where the job stands.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use serde::{Deserialize, Serialize};

use super::terminal::{Key, first_key};

/// Input that is remembered for a restore. A job that reads more between two snapshots cannot read
/// it again; it then goes on with what comes next.
const JOURNAL_BYTES_MAX: usize = 16 << 20;
const READ_BYTES: usize = 64 << 10;

nix::ioctl_read_bad!(
    /// Bytes that wait in a pipe.
    bytes_in_pipe, nix::libc::FIONREAD, nix::libc::c_int
);

/// Where stdin stood at a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputMark {
    /// Bytes that the job had read.
    pub position: u64,
    /// Inode of the pipe; CRIU knows the pipe by it. 0 when stdin is `/dev/null` or a terminal.
    pub pipe: u64,
}

/// Is told of keys with a meaning for us. The job gets Ctrl-C too, afterwards.
type OnKey = Box<dyn Fn(Key) + Send + Sync>;

/// The job's standard input.
#[derive(Debug)]
pub struct Input {
    shared: Option<Arc<Shared>>,
    pipe: u64,
    /// Our end of a pipe that gives nothing, until the job has the other.
    idle: Option<OwnedFd>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    on_key: OnceLock<OnKey>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt(f)
    }
}

#[derive(Debug, Default)]
struct State {
    /// Our end of the job's pipe, or the master of its terminal.
    sink: Option<File>,
    way: Way,
    /// The other end of a pipe whose writing end is closed: tells what the job has not read of it.
    unread: Option<File>,
    /// The job has its end. Before, ours must stay open: who opens a pipe for reading waits for a writer.
    opened: bool,
    /// The newest input, up to position `end`.
    journal: VecDeque<u8>,
    /// Bytes that came from the caller.
    end: u64,
    /// Bytes given to the job, as an uninterrupted run counts them.
    given: u64,
    /// The caller's input has ended.
    ended: bool,
    /// We are in the background of the terminal, which gives no input there.
    refused: bool,
}

/// How the job gets its input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Way {
    /// Through a pipe: every byte, again after a restore.
    #[default]
    Piped,
    /// Typed at its terminal.
    Typed,
}

impl Input {
    /// Stdin from `source`, or `/dev/null` when there is nothing to pass through.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(source: Option<File>) -> io::Result<Self> {
        let Some(source) = source else {
            return Ok(Self {
                shared: None,
                pipe: 0,
                idle: None,
            });
        };
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            on_key: OnceLock::new(),
        });
        let (reading, giving) = (Arc::clone(&shared), Arc::clone(&shared));
        thread::Builder::new()
            .name("stdin-read".to_owned())
            .spawn(move || reading.read(source))?;
        thread::Builder::new()
            .name("stdin-give".to_owned())
            .spawn(move || giving.give())?;
        Ok(Self {
            shared: Some(shared),
            pipe: 0,
            idle: None,
        })
    }

    /// What the caller gave as stdin: a pipe, a file, a socket or a terminal, but not `/dev/null` or nothing.
    #[must_use]
    pub fn callers() -> Option<File> {
        let stdin = io::stdin();
        let source = File::from(stdin.as_fd().try_clone_to_owned().ok()?);
        let kind = source.metadata().ok()?.mode() & nix::libc::S_IFMT;
        let device = kind == nix::libc::S_IFCHR || kind == nix::libc::S_IFBLK;
        (!device || stdin.is_terminal()).then_some(source)
    }

    /// Gives a new job its stdin; returns the job's end.
    ///
    /// # Errors
    /// When no pipe can be made or `/dev/null` cannot be opened.
    pub fn connect(&mut self) -> io::Result<OwnedFd> {
        if self.shared.is_none() {
            return Ok(File::open("/dev/null")?.into());
        }
        self.connect_pipe()
    }

    /// Gives a restored job a pipe in the place of the one it had, at its end when there is nothing to pass through.
    ///
    /// # Errors
    /// When no pipe can be made.
    pub fn connect_pipe(&mut self) -> io::Result<OwnedFd> {
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        fcntl(&write, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let sink = File::from(write);
        self.pipe = sink.metadata()?.ino();
        match &self.shared {
            Some(shared) => {
                let mut state = shared.lock();
                state.sink = Some(sink);
                state.way = Way::Piped;
                state.opened = false;
            }
            None => self.idle = Some(sink.into()),
        }
        Ok(read)
    }

    /// Types what comes at the master of the job's terminal.
    pub fn connect_terminal(&mut self, master: File) {
        self.pipe = 0;
        if let Some(shared) = &self.shared {
            let mut state = shared.lock();
            state.sink = Some(master);
            state.way = Way::Typed;
            state.opened = true;
            shared.changed.notify_all();
        }
    }

    /// The job at the terminal is gone: what is typed now is for the next one.
    pub fn disconnect_terminal(&mut self) {
        if let Some(shared) = &self.shared {
            let mut state = shared.lock();
            if state.way == Way::Typed {
                state.sink = None;
            }
        }
    }

    /// Has this called for keys with a meaning, before the job gets them. Once.
    pub fn on_key(&self, call: impl Fn(Key) + Send + Sync + 'static) {
        if let Some(shared) = &self.shared {
            let _ = shared.on_key.set(Box::new(call));
        }
    }

    /// Starts to give: the job (or CRIU, for it) has opened its end.
    pub fn open(&mut self) {
        self.idle = None;
        if let Some(shared) = &self.shared {
            shared.lock().opened = true;
            shared.changed.notify_all();
        }
    }

    /// We may be in the terminal's foreground again: input that was refused is asked for anew.
    pub fn resume(&self) {
        if let Some(shared) = &self.shared {
            shared.lock().refused = false;
            shared.changed.notify_all();
        }
    }

    /// Where the job stands in its input. Exact while it stands still.
    ///
    /// # Errors
    /// When the pipe cannot be asked.
    pub fn mark(&self) -> io::Result<InputMark> {
        let Some(shared) = &self.shared else {
            return Ok(InputMark {
                position: 0,
                pipe: self.pipe,
            });
        };
        let state = shared.lock();
        if state.way == Way::Typed {
            return Ok(InputMark {
                position: state.given,
                pipe: 0,
            });
        }
        let pipe = state.sink.as_ref().or(state.unread.as_ref());
        let waiting = pipe.map_or(Ok(0), waiting_in)?;
        Ok(InputMark {
            position: state.given - waiting,
            pipe: self.pipe,
        })
    }

    /// Goes on from `mark`: what the job reads next is what it read then. False when that is forgotten.
    #[must_use]
    pub fn rewind(&self, mark: &InputMark) -> bool {
        let Some(shared) = &self.shared else {
            return true;
        };
        let mut state = shared.lock();
        state.sink = None;
        state.unread = None;
        if state.way == Way::Typed {
            return true;
        }
        let oldest = state.end - state.journal.len() as u64;
        let known = (oldest..=state.end).contains(&mark.position);
        state.given = if known { mark.position } else { state.end };
        known
    }
}

/// Another descriptor of the end from which a pipe is read.
fn read_end(pipe: &File) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    File::options()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(format!("/proc/self/fd/{}", pipe.as_raw_fd()))
}

#[allow(unsafe_code, reason = "ioctl")]
fn waiting_in(pipe: &File) -> io::Result<u64> {
    use std::os::fd::AsRawFd;
    let mut bytes = 0;
    // SAFETY: the kernel writes one int to a valid pointer.
    unsafe { bytes_in_pipe(pipe.as_raw_fd(), &raw mut bytes) }?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the caller's input as the job takes it, no faster.
    fn read(&self, mut source: File) {
        let mut buffer = vec![0; READ_BYTES];
        // With the signal blocked, a read from the background fails instead of stopping us and the job.
        let mut background_read = SigSet::empty();
        background_read.add(Signal::SIGTTIN);
        let _ = background_read.thread_block();
        loop {
            let mut state = self.lock();
            while state.end > state.given || state.sink.is_none() || state.refused {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            drop(state);
            let result = source.read(&mut buffer);
            let mut state = self.lock();
            let got = match result {
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error)
                    if error.raw_os_error() == Some(Errno::EIO as i32) && source.is_terminal() =>
                {
                    state.refused = true;
                    continue;
                }
                Err(_) => 0,
            };
            if got == 0 && state.way == Way::Typed && source.is_terminal() {
                // Ctrl-D, typed while no job was there to get it; a terminal that is gone is none any more.
                continue;
            }
            state.ended = got == 0;
            state.end += got as u64;
            state.journal.extend(&buffer[..got]);
            let excess = state.journal.len().saturating_sub(JOURNAL_BYTES_MAX);
            state.journal.drain(..excess);
            self.changed.notify_all();
            if got == 0 {
                return;
            }
        }
    }

    fn give(&self) {
        let mut state = self.lock();
        loop {
            let behind = usize::try_from(state.end - state.given).unwrap_or(usize::MAX);
            if behind == 0 && state.ended && state.opened && state.way == Way::Piped {
                // The job sees the end, after what is still in the pipe.
                if let Some(sink) = state.sink.take() {
                    state.unread = read_end(&sink).ok();
                    self.changed.notify_all();
                }
            }
            let Some(sink) = state
                .sink
                .as_ref()
                .filter(|_| behind > 0)
                .and_then(|sink| sink.try_clone().ok())
            else {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let start = state.journal.len() - behind;
            let mut piece: Vec<u8> = state
                .journal
                .range(start..)
                .take(READ_BYTES)
                .copied()
                .collect();
            if state.way == Way::Typed {
                // Not with the lock: whoever is told may want it.
                drop(state);
                let for_us = self.hear_keys(&sink, &mut piece);
                state = self.lock();
                state.given = state.end.min(state.given + for_us);
            }
            match (&sink).write(&piece) {
                Ok(got) => state.given = state.end.min(state.given + got as u64),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    drop(state);
                    wait_writable(&sink);
                    state = self.lock();
                }
                // The job closed its stdin or is gone: a restored one gets a new pipe.
                Err(_) => state.sink = None,
            }
            self.changed.notify_all();
        }
    }
}

impl Shared {
    /// Tells of the keys in what is about to be typed, and cuts it after the first. Those that the job is not to get are
    /// taken away: how many.
    fn hear_keys(&self, master: &File, typed: &mut Vec<u8>) -> u64 {
        let Some((place, key)) = first_key(master.as_fd(), typed) else {
            return 0;
        };
        match (key, place) {
            (Key::Interrupt, _) => typed.truncate(place + 1),
            (Key::Suspend, 0) => typed.clear(),
            // Its turn comes.
            (Key::Suspend, _) => {
                typed.truncate(place);
                return 0;
            }
        }
        if let Some(call) = self.on_key.get() {
            call(key);
        }
        u64::from(key == Key::Suspend)
    }
}

fn wait_writable(sink: &File) {
    let mut watched = [PollFd::new(sink.as_fd(), PollFlags::POLLOUT)];
    while poll(&mut watched, PollTimeout::NONE) == Err(Errno::EINTR) {}
}

#[cfg(test)]
mod tests;
