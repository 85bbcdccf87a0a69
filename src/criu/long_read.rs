//! A long read of a restoring CRIU, whose bytes are written into its memory by several threads.
//!
//! `src/plugin/pages.rs` describes the exchange.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, Scope, available_parallelism};

use nix::libc::pid_t;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use crate::plugin::variables::GO_ON;

/// Maximum number of threads that write into the memory of a process, besides the sender's own. CRIU's long reads have
/// about five pieces, and CRIU restores several processes at once.
const WRITERS_MAX: usize = 4;

/// Maximum number of parts on their way into memory.
const TRANSFERS_MAX: usize = 16;

/// Part of a piece that must still be sent.
#[derive(Debug)]
pub(super) struct Part<T> {
    pub piece: Arc<T>,
    pub bytes: Range<usize>,
}

impl<T: AsRef<[u8]>> Part<T> {
    pub fn bytes(&self) -> &[u8] {
        &self.piece.as_ref().as_ref()[self.bytes.clone()]
    }
}

/// Marks an error as the reader's exit.
fn gone(error: io::Error) -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, error)
}

/// The memory of a process that reads.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pid: pid_t,
    file: Arc<File>,
}

impl Memory {
    /// Opens the memory of the process at the other end, unless it is the `known` one. Returns `None` if that is not
    /// permitted.
    pub fn of(reader: &UnixStream, known: Option<Self>) -> Option<Self> {
        let pid = getsockopt(reader, PeerCredentials).ok()?.pid();
        let open = || {
            let file = File::options().write(true).open(format!("/proc/{pid}/mem"));
            let file = Arc::new(file.ok()?);
            Some(Self { pid, file })
        };
        known.filter(|known| known.pid == pid).or_else(open)
    }
}

/// Part on its way into memory.
#[derive(Debug)]
struct Transfer<T> {
    memory: Memory,
    address: u64,
    part: Part<T>,
}

impl<T: AsRef<[u8]>> Transfer<T> {
    fn carry_out(&self) -> io::Result<()> {
        let file = &self.memory.file;
        let written = file.write_all_at(self.part.bytes(), self.address);
        // Nothing can be written into the memory of a process that has exited.
        written.map_err(|error| match error.kind() {
            io::ErrorKind::WriteZero => gone(error),
            kind => io::Error::new(kind, format!("cannot write into CRIU's memory: {error}")),
        })
    }
}

/// Threads that write into memory.
#[derive(Debug)]
pub(super) struct Writers<T> {
    threads: Vec<Sender<Transfer<T>>>,
    /// The thread for the next transfer.
    next: usize,
    done: Receiver<io::Result<()>>,
    /// Number of transfers that the threads have.
    begun: usize,
}

impl<T: AsRef<[u8]> + Send + Sync> Writers<T> {
    /// Starts the threads. A missing one only reduces the speed.
    pub fn start<'scope>(scope: &'scope Scope<'scope, '_>) -> Self
    where
        T: 'scope,
    {
        let cores = available_parallelism().map_or(1, usize::from);
        let (tell, done) = channel();
        let threads = (0..WRITERS_MAX.min(cores - 1)).map_while(|_| {
            let (tell, (thread, transfers)) = (tell.clone(), channel::<Transfer<T>>());
            let work = move || {
                for transfer in transfers {
                    let _ = tell.send(transfer.carry_out());
                }
            };
            let started = Builder::new().spawn_scoped(scope, work);
            started.ok().map(|_| thread)
        });
        Self {
            threads: threads.collect(),
            next: 0,
            done,
            begun: 0,
        }
    }

    /// Begins a transfer; without threads, carries it out.
    fn begin(&mut self, transfer: Transfer<T>) -> io::Result<()> {
        if self.begun >= TRANSFERS_MAX {
            self.finish_one()?;
        }
        self.next += 1;
        let Some(thread) = self.threads.get(self.next % self.threads.len().max(1)) else {
            return transfer.carry_out();
        };
        thread
            .send(transfer)
            .map_err(|_| io::Error::other("a thread has ended"))?;
        self.begun += 1;
        Ok(())
    }

    /// Waits until all transfers are done.
    fn finish(&mut self) -> io::Result<()> {
        while self.begun > 0 {
            self.finish_one()?;
        }
        Ok(())
    }

    fn finish_one(&mut self) -> io::Result<()> {
        self.begun -= 1;
        self.done.recv().map_err(io::Error::other)?
    }
}

/// A long read, the rest of which is written directly.
#[derive(Debug)]
pub(super) struct LongRead {
    reader: UnixStream,
    memory: Memory,
    /// Place of the next byte.
    address: u64,
    /// Number of bytes that are still to be written.
    left: u64,
}

impl LongRead {
    /// Receives the request of a reader that first reads `in_pipe` bytes from its pipe, of a file that then has `left`
    /// bytes more. Returns `None` if all its bytes come through the pipe. Otherwise the pipe is empty afterwards.
    ///
    /// # Errors
    /// [`io::ErrorKind::BrokenPipe`]: the reader has exited.
    pub fn begin(
        mut reader: UnixStream,
        memory: Memory,
        in_pipe: u64,
        left: u64,
    ) -> io::Result<Option<Self>> {
        let mut request = [[0; 8]; 2];
        if reader.read_exact(request.as_flattened_mut()).is_err() {
            return Ok(None);
        }
        let [address, len] = request;
        let len = u64::from_le_bytes(len).min(in_pipe.saturating_add(left));
        let answer = [in_pipe.to_le_bytes(), len.to_le_bytes()];
        reader.write_all(answer.as_flattened()).map_err(gone)?;
        let left = len.saturating_sub(in_pipe);
        if left == 0 {
            return Ok(None);
        }
        // GO_ON also proves that memory that was opened for this read is the reader's, and not that of a later process with
        // its pid. Memory from an earlier read is the reader's or that of a process that has exited.
        reader.read_exact(&mut [0]).map_err(gone)?;
        Ok(Some(Self {
            reader,
            memory,
            address: u64::from_le_bytes(address).wrapping_add(in_pipe),
            left,
        }))
    }

    /// Writes a part as far as the read goes, and removes this from the part. When the read has all its bytes, they are
    /// in the memory.
    pub fn take<T: AsRef<[u8]> + Send + Sync>(
        &mut self,
        part: &mut Part<T>,
        writers: &mut Writers<T>,
    ) -> io::Result<()> {
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let len = part.bytes.len().min(left);
        let end = part.bytes.start + len;
        let transfer = Transfer {
            memory: self.memory.clone(),
            address: self.address,
            part: Part {
                piece: Arc::clone(&part.piece),
                bytes: part.bytes.start..end,
            },
        };
        part.bytes.start = end;
        self.address = self.address.wrapping_add(len as u64);
        self.left -= len as u64;
        if self.left > 0 {
            return writers.begin(transfer);
        }
        transfer.carry_out()?;
        writers.finish()?;
        self.reader.write_all(&[GO_ON]).map_err(gone)
    }

    /// Returns true if the reader has all its bytes.
    pub fn is_done(&self) -> bool {
        self.left == 0
    }
}
