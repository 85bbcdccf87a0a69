//! Import of a file as an image: each chunk is opened, decompressed and hashed before it is stored, and the image gets
//! its name only after the correct end of the file.

use std::io::Read;

use xxhash_rust::xxh3::xxh3_64;

use super::super::error::{ReadError, WriteError};
use super::super::format::chunk::{self, CHUNK_BYTES, CHUNK_LEN_MAX, Hash};
use super::super::format::cipher::Secrets;
use super::super::format::codec::{Codec, Decoder};
use super::super::format::manifest::Manifest;
use super::super::format::store_folder::Store;
use super::super::format::store_key::Key;
use super::super::fs::lock::StoreLock;
use super::super::write::image_writer::{ImageWriter, WriteOptions};
use super::super::write::prechunked_stream::PrechunkedStream;
use super::error::{FileDamage, ImportError};
use super::frame::{CHUNK_HEAD_LEN, FrameReader, IMAGE_HEAD_LEN, Kind};
use super::{FORMAT, HEADER_LEN, MAGIC, NOT_SEALED, SEALED};

/// Options of the writer, whose buffer and workers are not used: chunks arrive encoded.
const OPTIONS: WriteOptions = WriteOptions {
    buffer: CHUNK_BYTES as u64,
    workers: 1,
    level: 1,
};

/// A portable file with a valid beginning.
pub struct PortableReader<R> {
    frames: FrameReader<R>,
    /// Secrets that name its chunks; `None` if they are named by their hash without a key.
    secrets: Option<Secrets>,
    created_unix_ms: u64,
    raw_bytes: u64,
    meta: Vec<u8>,
}

impl<R: Read> PortableReader<R> {
    /// Reads the beginning of a file. `key` is the key of the store that the file was exported from, if it was
    /// encrypted.
    ///
    /// # Errors
    /// [`ImportError`]: the file is not a portable image, or cannot be read with this key.
    pub fn open(mut source: R, key: Option<&Key>) -> Result<Self, ImportError> {
        let header = read_header(&mut source)?;
        let mut salt = [0; 32];
        salt.copy_from_slice(&header[16..48]);
        let secrets = match (u32_at(&header, 12), key) {
            (NOT_SEALED, _) => None,
            (SEALED, None) => return Err(ImportError::KeyMissing),
            (SEALED, Some(key)) => Some(Secrets::new(key)),
            (_, _) => {
                return Err(damaged_header(FileDamage::Senseless(
                    "its sealing is unknown",
                )));
            }
        };
        let check = secrets.as_ref().map(|secrets| secrets.file_check(&salt));
        match check {
            None if header[48..80] != [0; 32] => {
                return Err(damaged_header(FileDamage::Senseless(
                    "it has a key for nothing",
                )));
            }
            Some(check) if header[48..80] != check => return Err(ImportError::KeyWrong),
            None | Some(_) => {}
        }
        let cipher = secrets.as_ref().map(|secrets| secrets.file(&salt));
        let mut frames = FrameReader::new(source, xxh3_64(&header), HEADER_LEN, cipher);
        let (created_unix_ms, raw_bytes, meta) = match frames.read()? {
            (Kind::Image, image) => (
                u64_at(image, 0),
                u64_at(image, 8),
                image[IMAGE_HEAD_LEN..].to_vec(),
            ),
            (_, _) => return Err(frames.senseless("it does not begin with the image")),
        };
        Ok(Self {
            frames,
            secrets,
            created_unix_ms,
            raw_bytes,
            meta,
        })
    }

    /// Returns the caller's data of the image.
    #[must_use]
    pub fn meta(&self) -> &[u8] {
        &self.meta
    }

    /// Imports the file as an image of `store`, where it gets the next number; its meta data and its time are kept.
    /// `progress` receives the bytes done and in total.
    ///
    /// # Errors
    /// [`ImportError`]; then neither the image nor a part of it exists.
    ///
    /// # Panics
    /// If the lock belongs to another store.
    pub fn import_into(
        self,
        store: &Store,
        lock: &StoreLock,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Manifest, ImportError> {
        let mut writer = store.begin(lock, OPTIONS)?;
        writer.set_created(self.created_unix_ms);
        let decoder =
            Decoder::new().map_err(|error| ImportError::Write(ReadError::Worker(error).into()))?;
        let importer = Importer {
            frames: self.frames,
            secrets: self.secrets.as_ref(),
            raw_bytes: self.raw_bytes,
            names: Vec::new(),
            raw: vec![0; CHUNK_BYTES],
            done: 0,
            decoder,
            store,
            progress,
        };
        importer.streams(&writer)?;
        Ok(writer.commit(&self.meta)?)
    }
}

fn read_header(source: &mut impl Read) -> Result<[u8; HEADER_LEN], ImportError> {
    let mut header = [0; HEADER_LEN];
    let mut filled = 0;
    while filled < HEADER_LEN {
        match source.read(&mut header[filled..]) {
            Ok(0) => break,
            Ok(len) => filled += len,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ImportError::Read(error)),
        }
    }
    let begin = filled.min(MAGIC.len());
    if begin == 0 || header[..begin] != MAGIC[..begin] {
        return Err(ImportError::NotOurs);
    }
    if filled < HEADER_LEN {
        return Err(damaged_header(FileDamage::Short));
    }
    // This comes before the checksum, which may be elsewhere in a newer format.
    let format = u32_at(&header, 8);
    if format != FORMAT && format != 0 {
        return Err(ImportError::Newer { format });
    }
    if u64_at(&header, 80) != xxh3_64(&header[..80]) {
        return Err(damaged_header(FileDamage::Check));
    }
    if format == 0 {
        return Err(damaged_header(FileDamage::Senseless("its format is 0")));
    }
    Ok(header)
}

fn damaged_header(damage: FileDamage) -> ImportError {
    ImportError::Damaged { at: 0, damage }
}

struct Importer<'a, R> {
    frames: FrameReader<R>,
    secrets: Option<&'a Secrets>,
    /// Size of all streams together.
    raw_bytes: u64,
    /// Lengths of the chunks so far, and their names in the store.
    names: Vec<(u32, Hash)>,
    raw: Vec<u8>,
    done: u64,
    decoder: Decoder,
    store: &'a Store,
    progress: &'a dyn Fn(u64, u64),
}

impl<R: Read> Importer<'_, R> {
    fn streams(mut self, writer: &ImageWriter) -> Result<(), ImportError> {
        loop {
            match self.frames.read()? {
                (Kind::Stream, name) => {
                    let name = String::from_utf8_lossy(name).into_owned();
                    let stream = writer.inserted(&name).map_err(|error| match error {
                        WriteError::StreamName { .. } | WriteError::StreamTwice { .. } => {
                            self.frames.senseless("a stream has an impossible name")
                        }
                        error => error.into(),
                    })?;
                    self.stream(stream)?;
                }
                (Kind::End, total) => {
                    let total = u64_at(total, 0);
                    if total != self.done || self.raw_bytes != self.done {
                        return Err(self.frames.senseless("its streams have another length"));
                    }
                    return self.frames.end();
                }
                (Kind::Image | Kind::Chunk | Kind::Repeat | Kind::Zeros | Kind::StreamEnd, _) => {
                    return Err(self.frames.senseless("a part is where it cannot be"));
                }
            }
        }
    }

    fn stream(&mut self, mut stream: PrechunkedStream) -> Result<(), ImportError> {
        loop {
            let raw_len = match self.frames.read()? {
                (Kind::Chunk, _) => self.chunk(&mut stream)?,
                (Kind::Repeat, number) => {
                    let number = u32_at(number, 0) as usize;
                    let known = self.names.get(number).copied();
                    let known = known
                        .ok_or_else(|| self.frames.senseless("it repeats what did not come"))?;
                    stream.again(known.0, known.1)?;
                    known.0
                }
                (Kind::Zeros, len) => {
                    let raw_len = u32_at(len, 0);
                    if !(1..=CHUNK_LEN_MAX).contains(&raw_len) {
                        return Err(self.frames.senseless("a chunk has an impossible length"));
                    }
                    stream.zeros(raw_len)?;
                    raw_len
                }
                (Kind::StreamEnd, len) => {
                    let len = u64_at(len, 0);
                    if stream.finish() == len {
                        return Ok(());
                    }
                    return Err(self.frames.senseless("a stream has another length"));
                }
                (Kind::Image | Kind::Stream | Kind::End, _) => {
                    return Err(self.frames.senseless("a part is where it cannot be"));
                }
            };
            self.done += u64::from(raw_len);
            (self.progress)(self.done, self.raw_bytes);
        }
    }

    /// Checks and stores the chunk in the latest frame; returns its length.
    fn chunk(&mut self, stream: &mut PrechunkedStream) -> Result<u32, ImportError> {
        let payload = self.frames.payload();
        let raw_len = u32_at(payload, 0);
        let mut expected: Hash = [0; 32];
        expected.copy_from_slice(&payload[5..CHUNK_HEAD_LEN]);
        let encoded = &payload[CHUNK_HEAD_LEN..];
        let encoded_len = u32::try_from(encoded.len()).unwrap_or(u32::MAX);
        let codec = Codec::from_disk(payload[4]).filter(|codec| {
            (1..=CHUNK_LEN_MAX).contains(&raw_len) && codec.fits(encoded_len, raw_len)
        });
        let codec =
            codec.ok_or_else(|| self.frames.senseless("a chunk has an impossible length"))?;
        let raw = &mut self.raw[..raw_len as usize];
        let decoded = self.decoder.decode(codec, encoded, raw);
        let name = self.store.name_of(raw);
        // If the store and the file use the same names, one hash is enough.
        let is_right = name == expected || {
            let named = self
                .secrets
                .map_or_else(|| chunk::hash(raw), |secrets| secrets.name(raw));
            named == expected
        };
        if decoded.is_err() || !is_right {
            return Err(self.frames.damaged(FileDamage::Chunk));
        }
        stream.chunk(raw_len, name, codec, encoded)?;
        self.names.push((raw_len, name));
        Ok(raw_len)
    }
}

/// Reads a number of a payload whose kind has room for it.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}
