//! The supervisor's end of an image file's pipe to a restoring CRIU.
//!
//! `write` copies into the pipe's own pages while it holds the pipe's lock, which delays the reader's copy. `vmsplice`
//! instead lends this process's pages to the pipe, and they must not change until they are read. A pipe with n slots of
//! at most a page holds at most the last n pages. So a buffer is free again after n more pages. The last pages of a
//! file, with nothing after them, are copied.
//!
//! Memory pages do better without the pipe: for a long read, the plugin lets the supervisor write into CRIU's memory
//! (`src/plugin/pages.rs` describes the exchange). The pipe is empty while this happens, so that the order of the bytes
//! is kept.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, Scope};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, vmsplice};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{major, minor};
use rustix::io::ioctl_fionread;

use super::long_read::{LongRead, Memory, Part, Writers};
use super::plugin::{PluginVariable, name};
use crate::plugin::variables::{LONG_READ_MIN, PAGES};

/// Maximum size of a slot. If pages are larger, buffers are only kept longer.
const PAGE_BYTES: u64 = 4096;
/// Beginning of the names of the sockets for long reads.
const SOCKET: &str = "pages";
/// Size of a pipe whose reader makes long reads: bytes in the pipe are not written directly. Until the first long read, the
/// pipes of memory pages are larger (`message`).
const SHORT_PIPE: i32 = 64 << 10;

/// Returns the variable for long reads, with their sockets in this folder.
#[must_use]
pub fn plugin_reads_directly(folder: &Path) -> PluginVariable {
    (name(PAGES), folder.join(SOCKET).into())
}

/// Returns the name of the socket for long reads of a pipe.
fn socket_name(pipe: &File) -> io::Result<String> {
    let pipe = pipe.metadata()?;
    let (major, minor) = (major(pipe.dev()), minor(pipe.dev()));
    Ok(format!("{SOCKET}.{major}.{minor}.{}", pipe.ino()))
}

/// Writing end of the pipe of an image file.
#[derive(Debug)]
pub struct ImagePipe<'a> {
    pub(super) pipe: File,
    /// Folder of the sockets for long reads.
    pub(super) folder: &'a Path,
}

impl ImagePipe<'_> {
    /// Sends a file of this length, which `send` puts in pieces of `T`. Returns the result of `send`.
    ///
    /// # Errors
    /// The descriptor is not a pipe.
    pub fn send<'env, T: 'env, R>(
        &'env self,
        file_len: u64,
        send: impl for<'scope> FnOnce(&mut Sending<'scope, 'env, T>) -> R,
    ) -> io::Result<R> {
        fcntl(&self.pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let socket = self.folder.join(socket_name(&self.pipe)?);
        // Without the socket, all bytes come through the pipe.
        let has_long = file_len >= LONG_READ_MIN as u64;
        let requests = has_long.then(|| UnixListener::bind(socket).ok()).flatten();
        let capacity = capacity(&self.pipe)?;
        Ok(thread::scope(|scope| {
            let mut sending = Sending {
                scope,
                pipe: &self.pipe,
                requests,
                capacity,
                left: file_len,
                pages: 0,
                lent: VecDeque::new(),
                memory: None,
                writers: None,
                long_read: None,
                direct: 0,
            };
            let result = send(&mut sending);
            let bytes = sending.direct;
            if bytes > 0 {
                tracing::debug!(bytes, "wrote memory directly into CRIU");
            }
            result
        }))
    }
}

/// An image file on its way. If it is dropped before the end, bytes still in the pipe may change.
#[derive(Debug)]
pub struct Sending<'scope, 'env, T> {
    scope: &'scope Scope<'scope, 'env>,
    pipe: &'env File,
    requests: Option<UnixListener>,
    /// Capacity of the pipe.
    capacity: u64,
    /// Bytes of the file that remain after the present piece.
    left: u64,
    /// Number of complete pages lent so far.
    pages: u64,
    /// Pieces lent to the pipe, each with the value of `pages` at that time.
    lent: VecDeque<(u64, Arc<T>)>,
    /// Memory of the last process with a long read.
    memory: Option<Memory>,
    /// Threads for long reads. They start with the first one.
    writers: Option<Writers<T>>,
    /// The long read that is being served.
    long_read: Option<LongRead>,
    /// Bytes that were written directly.
    direct: u64,
}

impl<'env, T: AsRef<[u8]> + Send + Sync + 'env> Sending<'_, 'env, T> {
    /// Sends a piece, and drops the pieces that are free again.
    ///
    /// # Errors
    /// [`io::ErrorKind::BrokenPipe`] if the reader has closed the pipe or exited; CRIU's memory cannot be written. CRIU may
    /// not notice the end of the file: it ignores failed reads of shared memory (4.2.1).
    pub fn put(&mut self, piece: T) -> io::Result<()> {
        let bytes = 0..piece.as_ref().len();
        self.left = self.left.saturating_sub(bytes.len() as u64);
        let piece = Arc::new(piece);
        let mut part = Part { piece, bytes };
        let mut lent = 0;
        while !part.bytes.is_empty() {
            if let Some(read) = &mut self.long_read {
                let (writers, before) = (&mut self.writers, part.bytes.start);
                read.take(
                    &mut part,
                    writers.get_or_insert_with(|| Writers::start(self.scope)),
                )?;
                self.direct += (part.bytes.start - before) as u64;
                self.long_read.take_if(|read| read.is_done());
            } else if self.is_requested()? {
                self.long_read = self.accept(part.bytes.len() as u64)?;
                if self.long_read.is_some() {
                    // The pipe is empty.
                    lent = 0;
                }
            } else {
                let is_lent = self.left >= self.capacity;
                let sent = self.fill_pipe(part.bytes(), is_lent)?;
                part.bytes.start += sent;
                lent += if is_lent { sent as u64 } else { 0 };
            }
        }
        if lent > 0 {
            self.keep(lent / PAGE_BYTES, part.piece);
        }
        Ok(())
    }

    /// Waits until the pipe has room or CRIU requests a long read. Returns true for the latter.
    fn is_requested(&self) -> io::Result<bool> {
        let mut polled = vec![PollFd::new(self.pipe.as_fd(), PollFlags::POLLOUT)];
        let requests = self.requests.as_ref();
        polled.extend(requests.map(|it| PollFd::new(it.as_fd(), PollFlags::POLLIN)));
        loop {
            match poll(&mut polled, PollTimeout::NONE) {
                Ok(_) => break,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(polled.get(1).is_some_and(|it| it.any() == Some(true)))
    }

    /// Puts as many bytes as fit into the pipe. Returns their number.
    fn fill_pipe(&self, bytes: &[u8], is_lent: bool) -> io::Result<usize> {
        let sent = if is_lent {
            let flags = SpliceFFlags::SPLICE_F_NONBLOCK;
            vmsplice(self.pipe, &[IoSlice::new(bytes)], flags).map_err(io::Error::from)
        } else {
            (&*self.pipe).write(bytes)
        };
        match sent {
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            sent => sent,
        }
    }

    /// Keeps a piece until `pages` pages of it and those after them have left the pipe.
    fn keep(&mut self, pages: u64, piece: Arc<T>) {
        self.pages += pages;
        self.lent.push_back((self.pages, piece));
        let slots = self.capacity / PAGE_BYTES;
        while let Some((then, piece)) = self.lent.pop_front() {
            if self.pages - then < slots {
                self.lent.push_front((then, piece));
                break;
            }
        }
    }

    /// Begins to serve a long read, with `left` bytes of the piece. Returns `None` if its bytes come through the pipe.
    fn accept(&mut self, left: u64) -> io::Result<Option<LongRead>> {
        let Some(requests) = &self.requests else {
            return Ok(None);
        };
        let (reader, _) = requests.accept()?;
        self.memory = Memory::of(&reader, self.memory.take());
        let Some(memory) = self.memory.clone() else {
            // From now on, the kernel refuses the connections.
            self.requests = None;
            return Ok(None);
        };
        let waiting = ioctl_fionread(self.pipe)?;
        let long_read = LongRead::begin(reader, memory, waiting, self.left + left)?;
        if long_read.is_some() {
            self.lent.clear();
            // A larger pipe works too, but less is written directly.
            let _ = fcntl(self.pipe, FcntlArg::F_SETPIPE_SZ(SHORT_PIPE));
            self.capacity = capacity(self.pipe)?;
        }
        Ok(long_read)
    }
}

fn capacity(pipe: &File) -> io::Result<u64> {
    let capacity = fcntl(pipe, FcntlArg::F_GETPIPE_SZ)?;
    u64::try_from(capacity).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::io::{PipeWriter, Read, Write as _};
    use std::os::fd::OwnedFd;
    use std::process::{Child, Command, Stdio};
    use std::sync::Mutex;

    use tempfile::TempDir;

    use super::super::plugin::{NAME, install_plugin};
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let next = || {
            // Knuth, The Art of Computer Programming, volume 2, section 3.3.4.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 56) as u8
        };
        std::iter::repeat_with(next).take(len).collect()
    }

    /// Size of the pieces. They are no multiple of a page.
    const PIECE: usize = (256 << 10) - 100;

    /// Seed of a reader that begins with a long read.
    const LONG_FIRST: usize = 5;

    /// Reads its input in reads of many lengths, each like CRIU's to its end, and writes it to its output.
    const READER: &str = r"
import ctypes, random, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.read.restype = ctypes.c_ssize_t
libc.read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
choose = random.Random(int(sys.argv[1]))
into = ctypes.create_string_buffer(9 << 20)
while True:
    length = choose.choice([4096, 12288, 300000, 524288, 1 << 20, 2093056, 9 << 20])
    filled = 0
    while filled < length:
        read = libc.read(0, ctypes.addressof(into) + filled, length - filled)
        if read < 0: sys.exit(ctypes.get_errno())
        if read == 0: break
        filled += read
    sys.stdout.buffer.write(into.raw[:filled])
    if filled < length: break

";

    /// Starts the reader of a new pipe.
    fn start_reader(folder: &TempDir, seed: usize) -> (Child, PipeWriter) {
        start_script(folder, READER, seed)
    }

    fn start_script(folder: &TempDir, script: &str, seed: usize) -> (Child, PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        fcntl(&writer, FcntlArg::F_SETPIPE_SZ(1 << 20)).unwrap();
        let (variable, value) = plugin_reads_directly(folder.path());
        let child = Command::new("python3")
            .args(["-c", script, &seed.to_string()])
            .env("LD_PRELOAD", folder.path().join(NAME))
            .env(variable, value)
            .stdin(reader)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        (child, writer)
    }

    fn folder_with_plugin() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        install_plugin(folder.path()).unwrap();
        folder
    }

    /// Piece that is overwritten on drop.
    struct Piece<'a>(Vec<u8>, &'a Mutex<Vec<Vec<u8>>>);

    impl AsRef<[u8]> for Piece<'_> {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl Drop for Piece<'_> {
        fn drop(&mut self) {
            self.0.fill(0xEE);
            self.1.lock().unwrap().push(std::mem::take(&mut self.0));
        }
    }

    /// Sends bytes in pieces. Returns true if some were written directly. `keep` gets the number of pieces in the pipe.
    fn send(
        pipe: PipeWriter,
        folder: &Path,
        bytes: &[u8],
        keep: impl Fn(usize),
    ) -> io::Result<bool> {
        let pipe = OwnedFd::from(pipe).into();
        let free = Mutex::new(Vec::<Vec<u8>>::new());
        let sent = ImagePipe { pipe, folder }.send(bytes.len() as u64, |sending| {
            for piece in bytes.chunks(PIECE) {
                let mut buffer = free.lock().unwrap().pop().unwrap_or_default();
                buffer.clear();
                buffer.extend_from_slice(piece);
                sending.put(Piece(buffer, &free))?;
                keep(sending.lent.len());
            }
            Ok(sending.direct > 0)
        });
        sent?
    }

    fn output_of(child: &mut Child) -> Vec<u8> {
        let mut read = Vec::new();
        let mut output = child.stdout.take().unwrap();
        output.read_to_end(&mut read).unwrap();
        read
    }

    #[test]
    fn a_process_reads_what_was_sent_in_reads_of_any_length() {
        let folder = folder_with_plugin();
        for (seed, len) in [0, 1, 100_000, 64 << 20, (90 << 20) + 7]
            .into_iter()
            .enumerate()
        {
            let bytes = noise(len);
            let (mut child, pipe) = start_reader(&folder, seed);
            let (read, is_direct) = thread::scope(|scope| {
                let reading = scope.spawn(|| output_of(&mut child));
                let is_direct = send(pipe, folder.path(), &bytes, |_| ()).unwrap();
                (reading.join().unwrap(), is_direct)
            });
            assert!(child.wait().unwrap().success());
            assert!(read == bytes, "{len}: {} bytes", read.len());
            assert_eq!(is_direct, len >= 64 << 20, "{len}");
        }
    }

    /// Sends pieces to a reader that makes no long reads.
    fn sent_through(count: usize, keep: impl Fn(usize)) -> (Vec<u8>, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let (mut reader, pipe) = io::pipe().unwrap();
        let bytes = noise(count * PIECE);
        let read = thread::scope(|scope| {
            let reading = scope.spawn(move || {
                let mut read = Vec::new();
                reader.read_to_end(&mut read).unwrap();
                read
            });
            send(pipe, folder.path(), &bytes, keep).unwrap();
            reading.join().unwrap()
        });
        (bytes, read)
    }

    #[test]
    fn pipe_delivers_the_input_although_buffers_are_reused() {
        for count in [0, 1, 5, 6, 400] {
            let (bytes, read) = sent_through(count, |_| ());
            assert!(bytes == read, "{count}");
        }
    }

    #[test]
    fn no_more_is_lent_than_the_pipe_holds_and_one() {
        // A pipe of 64 KiB has 16 slots.
        let pages = PIECE / 4096;
        sent_through(400, |lent| assert!(lent <= 16 / pages + 1, "{lent}"));
    }

    /// Answers the first long read of a process with `answer`, and then closes the connection.
    fn answered(answer: &[u8]) -> (Vec<u8>, Option<i32>) {
        let folder = folder_with_plugin();
        let (mut child, mut pipe) = start_reader(&folder, LONG_FIRST);
        let name = socket_name(&OwnedFd::from(pipe.try_clone().unwrap()).into()).unwrap();
        let socket = UnixListener::bind(folder.path().join(name)).unwrap();
        let bytes = noise(1 << 20);
        let read = thread::scope(|scope| {
            let reading = scope.spawn(|| output_of(&mut child));
            let (mut connection, _) = socket.accept().unwrap();
            connection.read_exact(&mut [0; 16]).unwrap();
            connection.write_all(answer).unwrap();
            drop((connection, socket));
            // A reader that has failed closes the pipe.
            let _ = pipe.write_all(&bytes);
            drop(pipe);
            reading.join().unwrap()
        });
        let is_whole = read == bytes;
        let code = child.wait().unwrap().code();
        (if is_whole { bytes } else { read }, code)
    }

    #[test]
    fn an_exchange_that_breaks_is_an_error_and_never_loses_bytes() {
        let (read, code) = answered(&[]);
        assert_eq!((read.len(), code), (1 << 20, Some(0)), "through the pipe");
        assert_eq!(answered(&[0xff; 16]).1, Some(0), "it is in the pipe");
        for in_pipe in [0_u64, 4096] {
            let answer = [in_pipe.to_le_bytes(), (1_u64 << 20).to_le_bytes()];
            let (read, code) = answered(answer.as_flattened());
            assert_eq!((read.len(), code), (0, Some(1)), "{in_pipe}");
        }
    }

    /// Reads to an address where there is no memory.
    const NO_MEMORY: &str = "import ctypes, sys\n\
        libc = ctypes.CDLL(None, use_errno=True)\n\
        libc.read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]\n\
        sys.exit(7 if libc.read(0, 8, 100) == -1 else 8)";

    #[test]
    fn a_process_exits_if_its_pipe_cannot_be_read() {
        let folder = folder_with_plugin();
        let (mut child, mut pipe) = start_script(&folder, NO_MEMORY, 0);
        pipe.write_all(b"bytes").unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(1));
    }

    #[test]
    fn a_file_is_no_pipe() {
        let pipe = tempfile::tempfile().unwrap();
        let folder = Path::new("/");
        assert!(
            ImagePipe { pipe, folder }
                .send::<Vec<u8>, _>(1, |_| ())
                .is_err()
        );
    }
}
