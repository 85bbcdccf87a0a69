//! Frames: the parts of a portable file, each bound to all preceding ones.
//!
//! ```text
//! 0   kind                    u8
//! 1   zero                    3 bytes
//! 4   length of the payload   u32
//! 8   check                   u64: XXH3 of bytes 0..8 and the payload, seeded by the check before
//! 16  payload
//! ```
//! A sealed payload is a nonce, ciphertext and a tag, bound to the frame's number and bytes 0..8. Lengths are compared
//! with the possible lengths of the kind before memory is allocated. This module defines the kinds, but not their
//! meaning.

use std::io::{self, Read, Write};

use xxhash_rust::xxh3::Xxh3;

use super::super::format::chunk::CHUNK_BYTES;
use super::super::format::cipher::{Cipher, OVERHEAD_BYTES};
use super::super::format::manifest_file::META_BYTES_MAX;
use super::error::{ExportError, FileDamage, ImportError};

const HEAD_LEN: usize = 16;
/// Length of the part of a head that is checked and sealed.
const CHECKED_LEN: usize = 8;

/// Length of the head of a chunk's frame: length, codec, name. The encoded bytes follow.
pub(super) const CHUNK_HEAD_LEN: usize = 4 + 1 + 32;
/// Length of the head of an image's frame. The meta data follow.
pub(super) const IMAGE_HEAD_LEN: usize = 8 + 8;
/// Maximum length of a stream's name.
const NAME_BYTES_MAX: usize = 255;

/// Kind of a frame. The numbers are those in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Time, length of all streams, meta data.
    Image = 1,
    /// A stream's name.
    Stream = 2,
    /// Length, codec, name, encoded bytes.
    Chunk = 3,
    /// The number of an earlier chunk of the file.
    Repeat = 4,
    /// A length.
    Zeros = 5,
    /// The length of the stream.
    StreamEnd = 6,
    /// The length of all streams.
    End = 7,
}

impl Kind {
    fn from_file(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Image),
            2 => Some(Self::Stream),
            3 => Some(Self::Chunk),
            4 => Some(Self::Repeat),
            5 => Some(Self::Zeros),
            6 => Some(Self::StreamEnd),
            7 => Some(Self::End),
            _ => None,
        }
    }

    /// Returns the possible lengths of a payload before sealing.
    fn lens(self) -> std::ops::RangeInclusive<usize> {
        match self {
            Self::Image => IMAGE_HEAD_LEN..=IMAGE_HEAD_LEN + META_BYTES_MAX,
            Self::Stream => 1..=NAME_BYTES_MAX,
            Self::Chunk => CHUNK_HEAD_LEN + 1..=CHUNK_HEAD_LEN + CHUNK_BYTES,
            Self::Repeat | Self::Zeros => 4..=4,
            Self::StreamEnd | Self::End => 8..=8,
        }
    }
}

/// Position of a reader or writer in the chain of frames.
struct Chain {
    check: u64,
    number: u64,
}

impl Chain {
    fn advance(&mut self, head: &[u8], payload: &[u8]) -> u64 {
        let mut hasher = Xxh3::with_seed(self.check);
        hasher.update(head);
        hasher.update(payload);
        self.check = hasher.digest();
        self.number += 1;
        self.check
    }

    /// Returns the data to which the next sealed payload is bound.
    fn about(&self, head: [u8; CHECKED_LEN]) -> [u8; 2 * CHECKED_LEN] {
        let mut about = [0; 2 * CHECKED_LEN];
        about[..CHECKED_LEN].copy_from_slice(&self.number.to_le_bytes());
        about[CHECKED_LEN..].copy_from_slice(&head);
        about
    }
}

fn head_of(kind: Kind, len: usize) -> [u8; CHECKED_LEN] {
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    let mut head = [0; CHECKED_LEN];
    head[0] = kind as u8;
    head[4..].copy_from_slice(&len.to_le_bytes());
    head
}

/// A writer of frames.
pub(super) struct FrameWriter<W> {
    sink: W,
    chain: Chain,
    cipher: Option<Cipher>,
    sealed: Vec<u8>,
    /// Bytes written so far, including the header.
    pub(super) bytes: u64,
}

impl<W: Write> FrameWriter<W> {
    /// Makes a writer. `check` is the check of the header, which has `header_len` bytes and is already in the sink.
    pub(super) fn new(sink: W, check: u64, header_len: usize, cipher: Option<Cipher>) -> Self {
        Self {
            sink,
            chain: Chain { check, number: 0 },
            cipher,
            sealed: Vec::new(),
            bytes: header_len as u64,
        }
    }

    /// Writes a frame whose payload is made of `parts`.
    pub(super) fn write(&mut self, kind: Kind, parts: &[&[u8]]) -> Result<(), ExportError> {
        let plain = parts.concat();
        let head = head_of(kind, plain.len() + self.overhead());
        let payload = match &self.cipher {
            None => &plain,
            Some(cipher) => {
                self.sealed.resize(plain.len() + OVERHEAD_BYTES, 0);
                cipher
                    .seal(&self.chain.about(head), &plain, &mut self.sealed)
                    .map_err(ExportError::Seal)?;
                &self.sealed
            }
        };
        let check = self.chain.advance(&head, payload).to_le_bytes();
        for part in [&head[..], &check, payload] {
            self.sink.write_all(part).map_err(ExportError::Write)?;
            self.bytes += part.len() as u64;
        }
        Ok(())
    }

    pub(super) fn flush(&mut self) -> Result<(), ExportError> {
        self.sink.flush().map_err(ExportError::Write)
    }

    fn overhead(&self) -> usize {
        self.cipher.as_ref().map_or(0, |_| OVERHEAD_BYTES)
    }
}

/// A reader of frames. Returns only frames that are as they were written.
pub(super) struct FrameReader<R> {
    source: R,
    chain: Chain,
    cipher: Option<Cipher>,
    payload: Vec<u8>,
    plain: Vec<u8>,
    /// Offset of the latest frame.
    at: u64,
    /// Offset of the next frame.
    next: u64,
}

impl<R: Read> FrameReader<R> {
    /// Makes a reader of the source's frames; the arguments are those of a writer.
    pub(super) fn new(source: R, check: u64, header_len: usize, cipher: Option<Cipher>) -> Self {
        Self {
            source,
            chain: Chain { check, number: 0 },
            cipher,
            payload: Vec::new(),
            plain: Vec::new(),
            at: 0,
            next: header_len as u64,
        }
    }

    /// Reads the next frame.
    pub(super) fn read(&mut self) -> Result<(Kind, &[u8]), ImportError> {
        self.at = self.next;
        let mut head = [0; HEAD_LEN];
        self.fill(&mut head)?;
        let (checked, check) = head.split_at(CHECKED_LEN);
        let mut len = [0; 4];
        len.copy_from_slice(&checked[4..]);
        let len = u32::from_le_bytes(len) as usize;
        let overhead = self.cipher.as_ref().map_or(0, |_| OVERHEAD_BYTES);
        let kind = Kind::from_file(checked[0])
            .filter(|kind| {
                len.checked_sub(overhead)
                    .is_some_and(|plain| kind.lens().contains(&plain))
            })
            .ok_or_else(|| self.senseless("a part has an impossible kind or length"))?;
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(len, 0);
        let filled = self.fill(&mut payload);
        self.payload = payload;
        filled?;
        let sealed_head = head_of(kind, len);
        let about = self.chain.about(sealed_head);
        // Computed from the bytes read, so that the zeros in the head are checked, too.
        if self.chain.advance(checked, &self.payload).to_le_bytes() != check {
            return Err(self.damaged(FileDamage::Check));
        }
        self.next += (HEAD_LEN + len) as u64;
        let Some(cipher) = &self.cipher else {
            return Ok((kind, &self.payload));
        };
        self.plain.resize(len - overhead, 0);
        match cipher.open(&about, &self.payload, &mut self.plain) {
            Ok(()) => Ok((kind, &self.plain)),
            Err(_) => Err(self.damaged(FileDamage::Unsealed)),
        }
    }

    /// Returns the payload of the latest frame.
    pub(super) fn payload(&self) -> &[u8] {
        match self.cipher {
            Some(_) => &self.plain,
            None => &self.payload,
        }
    }

    /// Returns an error unless the source is at its end.
    pub(super) fn end(mut self) -> Result<(), ImportError> {
        self.at = self.next;
        match read_some(&mut self.source, &mut [0]).map_err(ImportError::Read)? {
            0 => Ok(()),
            _ => Err(self.damaged(FileDamage::Long)),
        }
    }

    /// Makes an error from the damage of the latest frame.
    pub(super) fn damaged(&self, damage: FileDamage) -> ImportError {
        ImportError::Damaged {
            at: self.at,
            damage,
        }
    }

    pub(super) fn senseless(&self, what: &'static str) -> ImportError {
        self.damaged(FileDamage::Senseless(what))
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), ImportError> {
        self.source
            .read_exact(bytes)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => self.damaged(FileDamage::Short),
                _ => ImportError::Read(error),
            })
    }
}

fn read_some(source: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}
