//! Transport of stdin: one thread reads the caller's input, another one writes it to the job. This file has their
//! shared state.

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

/// Limit on the input stored for a restore. A job that reads more between two snapshots cannot read it again; after a
/// restore it continues with the next input.
const JOURNAL_BYTES_MAX: usize = 16 << 20;
const READ_BYTES: usize = 64 << 10;

/// A function called for keys that ckpt-run handles. The job receives Ctrl-C afterwards.
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
    /// Write end of the job's pipe, or the master of its terminal.
    pub sink: Option<File>,
    pub way: Way,
    /// Read end of a pipe whose write end is closed. It shows how many bytes the job has not read.
    pub unread: Option<File>,
    /// True if the job has opened its end. Before that, the write end must stay open, because opening a pipe for
    /// reading waits for a writer.
    pub opened: bool,
    /// The newest input, up to position `end`.
    pub journal: VecDeque<u8>,
    /// Bytes received from the caller.
    pub end: u64,
    /// Bytes given to the job, as in an uninterrupted run.
    pub given: u64,
    /// State of the caller's input.
    pub source: Source,
    /// True if ckpt-run is in the background of the terminal, where it receives no input.
    pub refused: bool,
}

/// State of the caller's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Source {
    /// Input is not read until the job needs more.
    #[default]
    Waits,
    /// Input is being read. For a file this takes no time.
    Read,
    /// The input has ended.
    Ended,
}

/// Source of the job's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Way {
    /// Input through a pipe. The job reads every byte, again after a restore.
    #[default]
    Piped,
    /// Input typed at its terminal.
    Typed,
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Reads the caller's input no faster than the job consumes it.
    pub fn read(&self, mut source: File) {
        let mut buffer = vec![0; READ_BYTES];
        let is_file = source.metadata().is_ok_and(|about| about.is_file());
        // With the signal blocked, a read in the background fails instead of stopping ckpt-run and the job.
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
                // Ctrl-D was typed while no job could receive it. A closed terminal counts as no terminal.
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
            // Input from a file may be needed again.
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
                // The job reads the remaining bytes of the pipe and then its end.
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
                // The function may need the lock.
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
                // The job has closed its stdin or exited. A restored job gets a new pipe.
                Err(_) => state.sink = None,
            }
            self.changed.notify_all();
        }
    }

    /// Calls the function for the keys in typed text, and truncates the text after the first key. Keys that the job
    /// must not receive are removed. Returns their number.
    fn hear_keys(&self, master: &File, typed: &mut Vec<u8>) -> u64 {
        let Some((place, key)) = first_key(master.as_fd(), typed) else {
            return 0;
        };
        match (key, place) {
            (Key::Interrupt, _) => typed.truncate(place + 1),
            (Key::Suspend, 0) => typed.clear(),
            // The key is handled with the next piece.
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

/// Opens another descriptor for the read end of a pipe.
fn read_end(pipe: &File) -> io::Result<File> {
    File::options()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(format!("/proc/self/fd/{}", pipe.as_raw_fd()))
}
