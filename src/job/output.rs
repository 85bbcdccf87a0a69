//! The job's stdout or stderr: forwards it from a pipe or terminal to ckpt-run's own, unchanged and unbuffered.
//!
//! A thread delivers the output. A snapshot reads the remaining bytes of the pipe while the job is frozen, so that the
//! position of the stream is exact. An `Output` exists for the whole run, and each start of the job gives it a new pipe
//! or terminal.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use super::file_sample::sample;
use super::terminal::line_end;
use crate::sync::{locked, wait};
use output_replay::Replay;
use rewinding::Before;
pub use rewinding::Relation;
use status_line::Bottom;
pub use status_line::{Patience, Shown, StatusLine};

mod output_replay;
mod place;
mod rewinding;
mod status_line;

/// Bytes per read from the pipe: the capacity of a default pipe.
const READ_BYTES: usize = 64 << 10;

/// The position of a stream at a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputMark {
    /// Bytes that the job had written, as in an uninterrupted run.
    pub position: u64,
    /// Inode of the pipe, by which CRIU identifies it. 0 for a terminal.
    pub pipe: u64,
    /// Position in ckpt-run's own output, if that is a regular file that may be truncated.
    pub file: Option<FilePosition>,
}

/// A place in a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePosition {
    /// Inode number.
    pub inode: u64,
    /// Offset in bytes.
    pub offset: u64,
    /// Hash of the ends of the bytes before the offset; `None` in images made before it was recorded.
    #[serde(default)]
    pub sample: Option<u64>,
}

/// An output stream of the job.
#[derive(Debug)]
pub struct Output {
    shared: Arc<Shared>,
    relay: Option<JoinHandle<()>>,
    pipe: u64,
}

#[derive(Debug)]
struct Shared {
    sink: File,
    /// True if the sink is a regular file that no other part of ckpt-run writes to, so that it can be truncated.
    cuttable: bool,
    state: Mutex<State>,
    delivered: Condvar,
}

#[derive(Debug, Default)]
struct State {
    source: Option<File>,
    replay: Replay,
    /// Pieces that were read but not yet delivered.
    pending: VecDeque<Vec<u8>>,
    /// Status line of ckpt-run below the delivered output, if the sink is a terminal.
    bottom: Bottom,
    delivering: bool,
    /// True if output was lost in a failed write and this was reported.
    lossy: bool,
    /// Changes of a rewind, until they are kept or reverted.
    before: Option<Before>,
}

impl Output {
    /// Creates an output that goes to `sink`. With `cuttable`, a restore may truncate a regular file; it must be false
    /// if ckpt-run's own messages go to the same file.
    #[must_use]
    pub fn new(sink: OwnedFd, cuttable: bool) -> Self {
        let sink = File::from(sink);
        let cuttable = cuttable && sink.metadata().is_ok_and(|metadata| metadata.is_file());
        let shared = Shared {
            sink,
            cuttable,
            state: Mutex::default(),
            delivered: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
            relay: None,
            pipe: 0,
        }
    }

    /// Gives the job a new pipe and starts to deliver from it; returns the job's end.
    ///
    /// # Errors
    /// No pipe or thread can be created.
    pub fn connect(&mut self) -> io::Result<OwnedFd> {
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        fcntl(&read, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let source = File::from(read);
        self.pipe = source.metadata()?.ino();
        self.deliver_from(source)?;
        Ok(write)
    }

    /// Delivers the output from the master of the job's terminal, which must be nonblocking. The delivery ends when no
    /// process has the slave open.
    ///
    /// # Errors
    /// No thread can be created.
    pub fn connect_terminal(&mut self, master: File) -> io::Result<()> {
        self.pipe = 0;
        self.deliver_from(master)
    }

    fn deliver_from(&mut self, source: File) -> io::Result<()> {
        let waiting = source.try_clone()?;
        self.shared.lock().source = Some(source);
        let shared = Arc::clone(&self.shared);
        self.relay = Some(
            thread::Builder::new()
                .name("output".to_owned())
                .spawn(move || shared.relay(&waiting))?,
        );
        Ok(())
    }

    /// Reads all remaining bytes from the pipe and returns the stream's position. It is exact while the job is frozen.
    ///
    /// # Errors
    /// The pipe cannot be read.
    pub fn mark(&self) -> io::Result<OutputMark> {
        let mut state = self.shared.lock();
        while state.pull()? {}
        let position = state.replay.position();
        let file = if self.shared.cuttable {
            Some(self.shared.file_position(state)?)
        } else {
            None
        };
        Ok(OutputMark {
            position,
            pipe: self.pipe,
            file,
        })
    }

    /// Returns the number of bytes that the job has written and ckpt-run has read. Returns `None` while the job is
    /// blocked because the reader of ckpt-run's output is slow.
    #[must_use]
    pub fn progress(&self) -> Option<u64> {
        let state = self.shared.lock();
        (!state.delivering).then(|| state.replay.position())
    }

    /// Returns a function that waits until all output of a dead job is delivered, and reverts a rewind that was not
    /// kept. The function returns when no process holds the pipe and the reader of ckpt-run's output has read
    /// everything. Its caller must hold no lock.
    pub fn drain(&mut self) -> impl FnOnce() + use<> {
        let (relay, shared) = (self.relay.take(), Arc::clone(&self.shared));
        move || {
            // A thread that panicked delivers nothing more.
            drop(relay.map(JoinHandle::join));
            shared.undo_rewind();
        }
    }

    /// Returns a function to call once for each line of ckpt-run. It returns true if the job's output so far ends with
    /// a complete line.
    pub fn line_watch(&self) -> impl Fn() -> bool + use<> {
        let shared = Arc::clone(&self.shared);
        move || shared.lock().replay.begin_foreign_line()
    }

    /// Returns a function that writes a line of ckpt-run to the same terminal, on a separate line between the job's
    /// output.
    pub fn line_writer(&self) -> impl Fn(&str) + use<> {
        let shared = Arc::clone(&self.shared);
        move |line| shared.write_line(line)
    }

    /// Returns a status line, shown below the job's output on the same terminal.
    #[must_use]
    pub fn status_line(&self) -> StatusLine {
        StatusLine::new(&self.shared)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn relay(&self, source: &File) {
        loop {
            let mut watched = [PollFd::new(source.as_fd(), PollFlags::POLLIN)];
            match poll(&mut watched, PollTimeout::NONE) {
                Ok(_) => {}
                // The poll did not check the pipe; reading it while empty would be treated as its end.
                Err(Errno::EINTR) => continue,
                Err(_) => return,
            }
            let more = self.lock().pull();
            self.deliver();
            match more {
                Ok(true) => {}
                Ok(false)
                    if watched[0]
                        .revents()
                        .is_some_and(|events| events.contains(PollFlags::POLLIN)) => {}
                Ok(false) | Err(_) => return,
            }
        }
    }

    /// Writes all pending output. The lock is released during writes, so that a slow reader of ckpt-run's output cannot
    /// block a snapshot.
    fn deliver(&self) {
        let state = self.settled();
        self.deliver_some(state, usize::MAX);
    }

    /// Writes a line of ckpt-run after the job's output read so far.
    fn write_line(&self, line: &str) {
        let mut state = self.settled();
        let end = line_end(self.sink.as_fd());
        let mut text = String::new();
        let after = state.make_place();
        let at_start = if after.is_empty() {
            state.replay.begin_foreign_line_on_terminal()
        } else {
            let before = state.pending.back().and_then(|piece| piece.last());
            before == Some(&b'\n')
        };
        if !at_start {
            text.push_str(end);
        }
        text.push_str(line.trim_end_matches('\n'));
        text.push_str(end);
        state.pending.push_back(text.into_bytes());
        state.pending.push_back(after);
        // Only pieces pending now are written. Another caller writes later output of the job.
        let pieces = state.pending.len();
        self.deliver_some(state, pieces);
    }

    /// Returns the state once no thread is delivering.
    fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while state.delivering {
            state = wait(&self.delivered, state);
        }
        state
    }

    fn deliver_some<'a>(&'a self, mut state: MutexGuard<'a, State>, pieces: usize) {
        state.delivering = true;
        let mut failure = None;
        for _ in 0..pieces {
            let Some(bytes) = state.pending.pop_front() else {
                break;
            };
            let erase = state.bottom.make_way(self.sink.as_fd(), &bytes);
            drop(state);
            let written = write_out(&self.sink, erase).and_then(|()| write_out(&self.sink, &bytes));
            state = self.lock();
            if let Err(error) = written
                && !std::mem::replace(&mut state.lossy, true)
            {
                failure = Some(error);
            }
        }
        state.delivering = false;
        self.delivered.notify_all();
        drop(state);
        // The message is logged last, because it may go to the same sink.
        if let Some(error) = failure {
            tracing::warn!(
                "cannot write the job's output; it is lost from here on, and the job continues: {error}"
            );
        }
    }

    /// Returns the position in ckpt-run's own file once all output read so far is written.
    fn file_position(&self, mut state: MutexGuard<'_, State>) -> io::Result<FilePosition> {
        while state.delivering {
            state = wait(&self.delivered, state);
        }
        while let Some(bytes) = state.pending.pop_front() {
            write_out(&self.sink, &bytes)?;
        }
        let metadata = self.sink.metadata()?;
        let flags = OFlag::from_bits_retain(fcntl(&self.sink, FcntlArg::F_GETFL)?);
        let offset = if flags.contains(OFlag::O_APPEND) {
            // Before the first write the offset is 0, even if the file is not empty.
            metadata.len()
        } else {
            (&self.sink).stream_position()?
        };
        // The sink may be open for writing only.
        let (handle, _) = self.sink_path();
        Ok(FilePosition {
            inode: metadata.ino(),
            offset,
            sample: File::open(&handle)
                .and_then(|file| sample(&file, offset))
                .ok(),
        })
    }
}

impl State {
    /// Reads the pipe's content, up to one read; returns false if it is empty or has ended.
    fn pull(&mut self) -> io::Result<bool> {
        let Some(source) = &mut self.source else {
            return Ok(false);
        };
        let mut buffer = vec![0; READ_BYTES];
        match source.read(&mut buffer) {
            Ok(0) => Ok(false),
            Ok(got) => {
                let fresh = self.replay.take(&buffer[..got]);
                if !fresh.is_empty() {
                    self.pending.push_back(fresh);
                }
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Writes all bytes, and waits if the sink is full.
pub(in crate::job) fn write_out(mut sink: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match sink.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_until(sink, PollFlags::POLLOUT);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until a descriptor is ready, or a signal arrives.
pub(super) fn wait_until(descriptor: &File, ready: PollFlags) {
    let mut watched = [PollFd::new(descriptor.as_fd(), ready)];
    let _ = poll(&mut watched, PollTimeout::NONE);
}

#[cfg(test)]
mod tests;
