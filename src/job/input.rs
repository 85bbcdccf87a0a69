//! The job's stdin: the caller's, through a pipe or a terminal of ours.
//!
//! What the job had read of a pipe at a snapshot is known, and what came after it is
//! remembered, so that a restored job reads the same bytes again; of a file, which is there to be read again, also under
//! another supervisor. What was typed at a terminal is gone once it is typed: whoever did it sees where the job stands.

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
    /// The caller's file, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<InputFile>,
}

/// A file that the job's input comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Number of the device it is on.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Where in it the input began, bytes.
    pub start: u64,
}

impl InputFile {
    /// None where it is no file.
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
    /// Our end of a pipe that gives nothing, until the job has the other.
    idle: Option<OwnedFd>,
    /// The caller's file, if it is one.
    file: Option<(File, InputFile)>,
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

    /// The same for a mark of another supervisor: false when the input is no file, or not that one.
    ///
    /// # Errors
    /// When the file cannot be read from there.
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
