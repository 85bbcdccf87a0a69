//! Import of a file as an image: each chunk is opened, decompressed and hashed before it is stored, and the image gets
//! its name only after the correct end of the file.

use std::io::{Chain, Cursor, Read};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::super::error::ReadError;
use super::super::format::FORMAT;
use super::super::format::chunk::{self, CHUNK_BYTES, Hash};
use super::super::format::cipher::{OVERHEAD_BYTES, Secrets};
use super::super::format::codec::Decoder;
use super::super::format::manifest::{Content, Manifest, Stored};
use super::super::format::manifest_file::{self, FILE_BYTES_MAX, ManifestError};
use super::super::format::pack::HEADER_LEN;
use super::super::format::store_folder::{
    FORMAT_FILE, FORMAT_FILE_BYTES_MAX, Store, format_line, parse_format,
};
use super::super::format::store_key::{KEY_FILE, KEY_FILE_BYTES_MAX, Key, KeyCheck};
use super::super::fs::lock::StoreLock;
use super::super::write::image_writer::{ImageWriter, WriteOptions};
use super::super::write::prechunked_stream::PrechunkedStream;
use super::archive::{ArchiveReader, BLOCK, header};
use super::error::{FileDamage, ImportError};
use super::{IMAGE, MANIFEST_ENTRY, PACK, PACK_ENTRY};

/// Options of the writer, whose buffer and workers are not used: chunks arrive encoded.
const OPTIONS: WriteOptions = WriteOptions {
    buffer: CHUNK_BYTES as u64,
    workers: 1,
    level: 1,
};
/// The beginning of the files of versions before the first release.
const OLDER: &[u8] = b"CKPTFILE";

/// A portable file with a valid beginning.
pub struct PortableReader<R> {
    archive: ArchiveReader<Chain<Cursor<Vec<u8>>, R>>,
    /// Secrets that name its chunks; `None` if they are named by their hash without a key.
    secrets: Option<Secrets>,
    manifest: Manifest,
}

impl<R: Read> PortableReader<R> {
    /// Reads the beginning of a file. `key` is the key of the store that the file was exported from, if it was
    /// encrypted.
    ///
    /// # Errors
    /// [`ImportError`]: the file is not a portable image, or cannot be read with this key.
    pub fn open(mut source: R, key: Option<&Key>) -> Result<Self, ImportError> {
        let mut begin = Vec::new();
        let read = (&mut source).take(BLOCK as u64).read_to_end(&mut begin);
        read.map_err(ImportError::Read)?;
        if begin.starts_with(OLDER) {
            return Err(ImportError::Older);
        }
        // The length of a format's line is that of the number of the format.
        let is_ours = |len| begin == header(FORMAT_FILE, len);
        if !(0..=FORMAT_FILE_BYTES_MAX).any(is_ours) {
            return Err(ImportError::NotOurs);
        }
        let mut archive = ArchiveReader::new(Cursor::new(begin).chain(source));
        let (_, len) = archive.begin(&[FORMAT_FILE])?;
        let line = archive.content(len, FORMAT_FILE_BYTES_MAX)?;
        match parse_format(&line) {
            Some(format) if format > FORMAT => return Err(ImportError::Newer { format }),
            Some(_) if line == format_line().as_bytes() => {}
            Some(_) | None => {
                return Err(archive.damaged(FileDamage::Senseless("its format is unknown")));
            }
        }
        let (name, mut len) = archive.begin(&[MANIFEST_ENTRY, KEY_FILE])?;
        let secrets = if name == KEY_FILE {
            let text = archive.content(len, KEY_FILE_BYTES_MAX)?;
            let check = KeyCheck::parse(&text).filter(|check| check.to_text().as_bytes() == text);
            let check = check.ok_or_else(|| {
                archive.damaged(FileDamage::Senseless("its key check is not valid"))
            })?;
            let key = key.ok_or(ImportError::KeyMissing)?;
            if !check.fits(key) {
                return Err(ImportError::KeyWrong);
            }
            (_, len) = archive.begin(&[MANIFEST_ENTRY])?;
            Some(Secrets::new(key))
        } else {
            None
        };
        let bytes = archive.content(len, FILE_BYTES_MAX)?;
        let manifest =
            manifest_file::decode(&bytes, IMAGE, secrets.as_ref()).map_err(
                |error| match error {
                    ManifestError::Newer { format } => ImportError::Newer { format },
                    error => archive.damaged(FileDamage::Manifest(error)),
                },
            )?;
        Ok(Self {
            archive,
            secrets,
            manifest,
        })
    }

    /// Returns the caller's data of the image.
    #[must_use]
    pub fn meta(&self) -> &[u8] {
        &self.manifest.meta
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
        writer.set_created(self.manifest.created_unix_ms);
        let decoder =
            Decoder::new().map_err(|error| ImportError::Write(ReadError::Worker(error).into()))?;
        let importer = Importer {
            archive: self.archive,
            secrets: self.secrets.as_ref(),
            names: vec![None; self.manifest.chunks.len()],
            offset: HEADER_LEN as u64,
            stored: Vec::new(),
            opened: Vec::new(),
            raw: vec![0; CHUNK_BYTES],
            decoder,
            store,
        };
        importer.streams(&self.manifest, &writer, progress)?;
        Ok(Arc::unwrap_or_clone(writer.commit(&self.manifest.meta)?))
    }
}

struct Importer<'a, R> {
    archive: ArchiveReader<R>,
    secrets: Option<&'a Secrets>,
    /// Names in the store of the chunks so far.
    names: Vec<Option<Hash>>,
    /// Offset in the pack.
    offset: u64,
    stored: Vec<u8>,
    opened: Vec<u8>,
    raw: Vec<u8>,
    decoder: Decoder,
    store: &'a Store,
}

impl<R: Read> Importer<'_, R> {
    fn streams(
        mut self,
        manifest: &Manifest,
        writer: &ImageWriter,
        progress: &dyn Fn(u64, u64),
    ) -> Result<(), ImportError> {
        let (_, pack_len) = self.archive.begin(&[PACK_ENTRY])?;
        let mut header = [0; HEADER_LEN];
        self.archive.fill(&mut header)?;
        if header != PACK.header() {
            return Err(self.senseless("a pack has no valid header"));
        }
        let mut done = 0;
        for stream in &manifest.streams {
            let mut target = writer.inserted(&stream.name)?;
            for index in &stream.chunks {
                let chunk = manifest.chunks[*index as usize];
                match (chunk.content, self.names[*index as usize]) {
                    (Content::Zero, _) => target.zeros(chunk.raw_len)?,
                    (Content::Stored(_), Some(name)) => target.again(chunk.raw_len, name)?,
                    (Content::Stored(stored), None) => {
                        let name = self.chunk(&stored, chunk.raw_len, &mut target)?;
                        self.names[*index as usize] = Some(name);
                    }
                }
                done += u64::from(chunk.raw_len);
                progress(done, manifest.raw_bytes);
            }
            target.finish();
        }
        if self.offset != pack_len {
            return Err(self.senseless("the length of a pack differs from that of its chunks"));
        }
        self.archive.skip_padding(pack_len)?;
        self.archive.end()
    }

    /// Reads, checks and stores the next chunk; returns its name in the store.
    fn chunk(
        &mut self,
        stored: &Stored,
        raw_len: u32,
        stream: &mut PrechunkedStream,
    ) -> Result<Hash, ImportError> {
        if stored.offset != self.offset {
            return Err(self.senseless("a chunk does not begin where the previous one ends"));
        }
        self.offset += u64::from(stored.len);
        self.stored.resize(stored.len as usize, 0);
        self.archive.fill(&mut self.stored)?;
        let is_intact = stored.check == Some(xxh3_64(&self.stored));
        let encoded = match self.secrets {
            None => Some(&self.stored),
            Some(secrets) => {
                // A valid manifest has no sealed chunk that is shorter.
                self.opened.resize(self.stored.len() - OVERHEAD_BYTES, 0);
                let opened = secrets
                    .chunks
                    .open(&stored.hash, &self.stored, &mut self.opened);
                opened.is_ok().then_some(&self.opened)
            }
        };
        let raw = &mut self.raw[..raw_len as usize];
        let decoded = encoded
            .filter(|encoded| is_intact && self.decoder.decode(stored.codec, encoded, raw).is_ok());
        let Some(encoded) = decoded else {
            return Err(self.archive.damaged(FileDamage::Chunk));
        };
        let name = self.store.name_of(raw);
        // If the store and the file use the same names, one hash is enough.
        let is_right = name == stored.hash || {
            let named = self
                .secrets
                .map_or_else(|| chunk::hash(raw), |secrets| secrets.name(raw));
            named == stored.hash
        };
        if !is_right {
            return Err(self.archive.damaged(FileDamage::Chunk));
        }
        stream.chunk(raw_len, name, stored.codec, encoded)?;
        Ok(name)
    }

    fn senseless(&self, what: &'static str) -> ImportError {
        self.archive.damaged(FileDamage::Senseless(what))
    }
}
