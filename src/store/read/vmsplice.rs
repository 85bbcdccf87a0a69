//! Zero-copy output of a stream into a pipe.
//!
//! `write` copies into the pipe's own pages while it holds the pipe's lock, which delays the reader's copy. `vmsplice`
//! instead lends this process's pages to the pipe, and they must not change until they are read. A pipe with n slots of
//! at most a page holds at most the last n pages. So a buffer is free again after n more pages. The last pages of a
//! stream, with nothing after them, are copied. This module is independent of chunks.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice, Write};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SpliceFFlags, fcntl, vmsplice};

/// Maximum size of a slot. If pages are larger, buffers are only kept longer.
const PAGE_BYTES: u64 = 4096;

/// Writing end of a pipe for a stream of known length, which arrives in pieces of `T`.
pub(crate) struct Splicer<'a, T> {
    pipe: &'a File,
    /// Capacity of the pipe.
    capacity: u64,
    /// Bytes of the stream that remain.
    left: u64,
    /// Number of complete pages lent so far.
    pages: u64,
    /// Pieces lent to the pipe, each with the value of `pages` at that time.
    lent: VecDeque<(u64, T)>,
}

impl<'a, T> Splicer<'a, T> {
    /// Creates the writing end.
    ///
    /// # Errors
    /// `pipe` is not a pipe.
    pub(crate) fn new(pipe: &'a File, stream_len: u64) -> io::Result<Self> {
        let capacity = fcntl(pipe, FcntlArg::F_GETPIPE_SZ)?;
        Ok(Self {
            pipe,
            capacity: u64::try_from(capacity).map_err(io::Error::other)?,
            left: stream_len,
            pages: 0,
            lent: VecDeque::new(),
        })
    }

    /// Writes the bytes of a piece, and drops the pieces that are free again.
    pub(crate) fn put(&mut self, piece: T, bytes: impl FnOnce(&T) -> &[u8]) -> io::Result<()> {
        let bytes = bytes(&piece);
        let len = bytes.len() as u64;
        self.left = self.left.saturating_sub(len);
        if self.left < self.capacity {
            return self.pipe.write_all(bytes);
        }
        self.lend(bytes)?;
        self.pages += len / PAGE_BYTES;
        self.lent.push_back((self.pages, piece));
        let slots = self.capacity / PAGE_BYTES;
        while let Some((then, piece)) = self.lent.pop_front() {
            if self.pages - then < slots {
                self.lent.push_front((then, piece));
                break;
            }
        }
        Ok(())
    }

    fn lend(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match vmsplice(self.pipe, &[IoSlice::new(bytes)], SpliceFFlags::empty()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => bytes = &bytes[len..],
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::Read;
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::store::format::codec::tests::noise;

    const PIECE: usize = 3 * 4096 + 700;

    /// Piece that is overwritten on drop.
    struct Piece<'a>(Vec<u8>, &'a RefCell<Vec<Vec<u8>>>);

    impl Drop for Piece<'_> {
        fn drop(&mut self) {
            self.0.fill(0xEE);
            self.1.borrow_mut().push(std::mem::take(&mut self.0));
        }
    }

    /// Sends pieces through a pipe and overwrites free buffers at once.
    fn sent_through(count: usize, keep: impl Fn(usize)) -> (Vec<u8>, Vec<u8>) {
        let (mut reader, writer) = io::pipe().unwrap();
        let pipe = File::from(OwnedFd::from(writer));
        let bytes = noise(1, count * PIECE);
        let read = std::thread::scope(|scope| {
            let reading = scope.spawn(move || {
                let mut read = Vec::new();
                reader.read_to_end(&mut read).unwrap();
                read
            });
            let free = RefCell::new(Vec::<Vec<u8>>::new());
            let mut splicer = Splicer::new(&pipe, bytes.len() as u64).unwrap();
            for piece in bytes.chunks(PIECE) {
                let mut buffer = free.borrow_mut().pop().unwrap_or_default();
                buffer.clear();
                buffer.extend_from_slice(piece);
                let piece = Piece(buffer, &free);
                splicer.put(piece, |piece| &piece.0).unwrap();
                keep(splicer.lent.len());
            }
            drop(splicer);
            drop(pipe);
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
        // A pipe of 64 KiB has 16 slots, and a piece counts as 3 pages.
        sent_through(400, |lent| assert!(lent <= 16 / 3 + 1, "{lent}"));
    }

    #[test]
    fn a_file_is_no_pipe() {
        let file = tempfile::tempfile().unwrap();
        assert!(Splicer::<()>::new(&file, 1).is_err());
    }
}
