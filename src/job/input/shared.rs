//! The way of stdin: a thread reads what the caller gives, another gives it to the job, and this is what they share.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};

use crate::job::output::wait_until;
use crate::job::terminal::{Key, first_key};
use crate::sync::{locked, wait};

/// Input that is remembered for a restore. A job that reads more between two snapshots cannot read
/// it again; it then goes on with what comes next.
const JOURNAL_BYTES_MAX: usize = 16 << 20;
const READ_BYTES: usize = 64 << 10;

/// Is told of keys with a meaning for us. The job gets Ctrl-C too, afterwards.
type OnKey = Box<dyn Fn(Key) + Send + Sync>;

pub(super) struct Shared {
    pub state: Mutex<State>,
    pub changed: Condvar,
    pub on_key: OnceLock<OnKey>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state.fmt(f)
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Our end of the job's pipe, or the master of its terminal.
    pub sink: Option<File>,
    pub way: Way,
    /// The other end of a pipe whose writing end is closed: tells what the job has not read of it.
    pub unread: Option<File>,
    /// The job has its end. Before, ours must stay open: who opens a pipe for reading waits for a writer.
    pub opened: bool,
    /// The newest input, up to position `end`.
    pub journal: VecDeque<u8>,
    /// Bytes that came from the caller.
    pub end: u64,
    /// Bytes given to the job, as an uninterrupted run counts them.
    pub given: u64,
    /// What is done with the caller's input.
    pub source: Source,
    /// We are in the background of the terminal, which gives no input there.
    pub refused: bool,
}

/// What is done with the caller's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Source {
    /// Nothing, until the job wants more.
    #[default]
    Waits,
    /// It is read, which takes no time of a file.
    Read,
    /// It has ended.
    Ended,
}

/// How the job gets its input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Way {
    /// Through a pipe: every byte, again after a restore.
    #[default]
    Piped,
    /// Typed at its terminal.
    Typed,
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Takes the caller's input as the job takes it, no faster.
    pub fn read(&self, mut source: File) {
        let mut buffer = vec![0; READ_BYTES];
        let is_file = source.metadata().is_ok_and(|about| about.is_file());
        // With the signal blocked, a read from the background fails instead of stopping us and the job.
        let mut background_read = SigSet::empty();
        background_read.add(Signal::SIGTTIN);
        let _ = background_read.thread_block();
        loop {
            let mut state = self.lock();
            while state.end > state.given
                || state.sink.is_none()
                || state.refused
                || state.source == Source::Ended
            {
                state = wait(&self.changed, state);
            }
            state.source = Source::Read;
            drop(state);
            let result = source.read(&mut buffer);
            let mut state = self.lock();
            state.source = Source::Waits;
            let got = match result {
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    drop(state);
                    wait_until(&source, PollFlags::POLLIN);
                    continue;
                }
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
            if got == 0 {
                state.source = Source::Ended;
            }
            state.end += got as u64;
            state.journal.extend(&buffer[..got]);
            let excess = state.journal.len().saturating_sub(JOURNAL_BYTES_MAX);
            state.journal.drain(..excess);
            self.changed.notify_all();
            // Of a file, a part may be wanted again.
            if got == 0 && !is_file {
                return;
            }
        }
    }

    pub fn give(&self) {
        let mut state = self.lock();
        loop {
            let behind = usize::try_from(state.end - state.given).unwrap_or(usize::MAX);
            if behind == 0
                && state.source == Source::Ended
                && state.opened
                && state.way == Way::Piped
            {
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
                state = wait(&self.changed, state);
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

/// Another descriptor of the end from which a pipe is read.
fn read_end(pipe: &File) -> io::Result<File> {
    File::options()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(format!("/proc/self/fd/{}", pipe.as_raw_fd()))
}
