//! The job's stdin: forwards the caller's stdin through a pipe or a terminal of ckpt-run.
//!
//! For a pipe, ckpt-run counts the bytes that the job had read at a snapshot and stores the later ones, so that a
//! restored job reads the same bytes again. A file can be read again, also by another supervisor. Typed input is not
//! stored, because the user sees the state of the job.

use std::fs::File;
use std::io::{self, IsTerminal, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde::{Deserialize, Serialize};

use super::terminal::Key;
use crate::sync::wait;
use shared::{Shared, Source, Way};

mod shared;

nix::ioctl_read_bad!(
    /// Reads the number of bytes in a pipe.
    bytes_in_pipe, nix::libc::FIONREAD, nix::libc::c_int
);

/// The position of stdin at a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputMark {
    /// Bytes that the job had read.
    pub position: u64,
    /// Inode of the pipe, by which CRIU identifies it. 0 if stdin is `/dev/null` or a terminal.
    pub pipe: u64,
    /// The caller's file, if stdin is a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<InputFile>,
}

/// Identity of a file that feeds the job's stdin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Number of the file's device.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Offset of the first byte given to the job.
    pub start: u64,
}

impl InputFile {
    /// Describes the source; returns `None` if it is not a file.
    fn of(mut source: &File) -> io::Result<Option<Self>> {
        let about = source.metadata()?;
        if !about.is_file() {
            return Ok(None);
        }
        Ok(Some(Self {
            device: about.dev(),
            inode: about.ino(),
            start: source.stream_position()?,
        }))
    }
}

/// The job's standard input.
#[derive(Debug)]
pub struct Input {
    shared: Option<Arc<Shared>>,
    pipe: u64,
    /// Write end of a pipe without input, held until the job has opened the read end.
    idle: Option<OwnedFd>,
    /// The caller's file, if stdin is a file.
    file: Option<(File, InputFile)>,
}

impl Input {
    /// Creates the stdin from `source`, or `/dev/null` if there is no source.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn new(source: Option<File>) -> io::Result<Self> {
        let Some(source) = source else {
            return Ok(Self {
                shared: None,
                pipe: 0,
                idle: None,
                file: None,
            });
        };
        let file = match InputFile::of(&source)? {
            Some(about) => Some((source.try_clone()?, about)),
            None => None,
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
            file,
        })
    }

    /// Returns the caller's stdin if it is a pipe, a file, a socket or a terminal; `None` for `/dev/null` or a closed
    /// stdin.
    #[must_use]
    pub fn callers() -> Option<File> {
        let stdin = io::stdin();
        let source = File::from(stdin.as_fd().try_clone_to_owned().ok()?);
        let kind = source.metadata().ok()?.mode() & nix::libc::S_IFMT;
        let device = kind == nix::libc::S_IFCHR || kind == nix::libc::S_IFBLK;
        (!device || stdin.is_terminal()).then_some(source)
    }

    /// Creates the stdin of a new job and returns the job's end.
    ///
    /// # Errors
    /// No pipe can be created, or `/dev/null` cannot be opened.
    pub fn connect(&mut self) -> io::Result<OwnedFd> {
        if self.shared.is_none() {
            return Ok(File::open("/dev/null")?.into());
        }
        self.connect_pipe()
    }

    /// Creates a pipe that replaces a restored job's former one. Without a source, the pipe is at its end.
    ///
    /// # Errors
    /// No pipe can be created.
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

    /// Forwards the input to the master of the job's terminal.
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

    /// Disconnects the terminal of a job that has exited. Input typed later is for the next job.
    pub fn disconnect_terminal(&mut self) {
        if let Some(shared) = &self.shared {
            let mut state = shared.lock();
            if state.way == Way::Typed {
                state.sink = None;
            }
        }
    }

    /// Sets the function called for special keys before the job gets them. Can be called once.
    pub fn on_key(&self, call: impl Fn(Key) + Send + Sync + 'static) {
        if let Some(shared) = &self.shared {
            let _ = shared.on_key.set(Box::new(call));
        }
    }

    /// Starts the delivery, after the job (or CRIU for it) has opened its end.
    pub fn open(&mut self) {
        self.idle = None;
        if let Some(shared) = &self.shared {
            shared.lock().opened = true;
            shared.changed.notify_all();
        }
    }

    /// Retries input that failed because ckpt-run was in the terminal's background.
    pub fn resume(&self) {
        if let Some(shared) = &self.shared {
            shared.lock().refused = false;
            shared.changed.notify_all();
        }
    }

    /// Returns the job's position in its input. It is exact while the job is frozen.
    ///
    /// # Errors
    /// The pipe cannot be queried.
    pub fn mark(&self) -> io::Result<InputMark> {
        let file = self.file.as_ref().map(|(_, about)| *about);
        let Some(shared) = &self.shared else {
            return Ok(InputMark {
                position: 0,
                pipe: self.pipe,
                file,
            });
        };
        let state = shared.lock();
        if state.way == Way::Typed {
            return Ok(InputMark {
                position: state.given,
                pipe: 0,
                file,
            });
        }
        let pipe = state.sink.as_ref().or(state.unread.as_ref());
        let waiting = pipe.map_or(Ok(0), waiting_in)?;
        Ok(InputMark {
            position: state.given - waiting,
            pipe: self.pipe,
            file,
        })
    }

    /// Continues from `mark`: the job reads the bytes after the mark again. Returns false if they are no longer stored.
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

    /// Continues from a mark of another supervisor. Returns false if the input is not a file or is a different file.
    ///
    /// # Errors
    /// The file cannot be read from that offset.
    pub fn take_up(&mut self, mark: &InputMark) -> io::Result<bool> {
        let (Some(shared), Some((source, about)), Some(then)) =
            (&self.shared, &mut self.file, mark.file)
        else {
            return Ok(false);
        };
        let place = then.start.saturating_add(mark.position);
        let is_same = (about.device, about.inode) == (then.device, then.inode);
        if !is_same || source.metadata()?.len() < place {
            return Ok(false);
        }
        let mut state = shared.lock();
        state.sink = None;
        state.unread = None;
        while state.source == Source::Read {
            state = wait(&shared.changed, state);
        }
        source.seek(SeekFrom::Start(place))?;
        about.start = then.start;
        state.journal.clear();
        (state.end, state.given) = (mark.position, mark.position);
        state.source = Source::Waits;
        Ok(true)
    }
}

#[allow(unsafe_code, reason = "ioctl")]
fn waiting_in(pipe: &File) -> io::Result<u64> {
    use std::os::fd::AsRawFd;
    let mut bytes = 0;
    // SAFETY: the kernel writes one int to a valid pointer.
    unsafe { bytes_in_pipe(pipe.as_raw_fd(), &raw mut bytes) }?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests;
