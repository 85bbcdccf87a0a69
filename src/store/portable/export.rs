//! Export of an image to a file. The manifest comes first, with the place of every chunk in a new pack; then threads
//! fetch and check the chunks, which are written in order.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::super::error::ReadError;
use super::super::format::FORMAT;
use super::super::format::chunk;
use super::super::format::cipher::{OVERHEAD_BYTES, Secrets};
use super::super::format::image_id::ImageId;
use super::super::format::manifest::{Chunk, Content, Manifest, Stored, Stream};
use super::super::format::manifest_file::{self, ManifestError};
use super::super::format::pack::{HEADER_LEN, Pack, PackFiles};
use super::super::format::store_folder::{FORMAT_FILE, Store, format_line};
use super::super::format::store_key::{KEY_FILE, KeyCheck};
use super::super::fs::durable;
use super::super::maintain::image_copy::is_gone;
use super::super::read::checked_chunks::CheckedChunks;
use super::archive::{ArchiveWriter, header};
use super::companion::{self, Opened};
use super::error::ExportError;
use super::{IMAGE, MANIFEST_ENTRY, PACK, PACK_ENTRY};

/// The form in which an image leaves its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Sealed if the store is encrypted, plain otherwise.
    AsStored,
    /// Plain even if the store is encrypted.
    Plain,
}

/// A file that accompanies an image as a separate stream.
#[derive(Clone, Debug)]
pub struct Companion {
    /// Name of the stream. If the image has a stream of this name, the file is left out.
    pub stream: String,
    /// The file, which must not change.
    pub path: PathBuf,
    /// The open file and the length of its part, if the caller has opened it.
    pub opened: Option<(Arc<File>, u64)>,
}

/// Result of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The image.
    pub id: ImageId,
    /// Total length of its streams.
    pub raw_bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// True if the store's key is needed to read the file.
    pub sealed: bool,
}

impl Store {
    /// Writes an image as a portable file. Needs no lock. Every byte is checked as it is read. `progress` receives the
    /// bytes done and in total.
    ///
    /// # Errors
    /// [`ExportError`]; the data that the sink has received by then is an incomplete file.
    pub fn export_image(
        &self,
        id: ImageId,
        form: Form,
        companions: &[Companion],
        sink: &mut impl Write,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Exported, ExportError> {
        if let Some(reason) = self.damage_mark(id) {
            return Err(ExportError::SetAside { image: id, reason });
        }
        export(self, id, form, companions, sink, progress).map_err(|error| match error {
            ExportError::Read(read) if is_gone(self, id, &read) => ExportError::Gone { image: id },
            error => error,
        })
    }
}

/// Bytes per write: a good size for a pipe or a disk.
const SINK_BYTES: usize = 1 << 20;

impl Store {
    /// Exports as [`export_image`](Self::export_image) does, into a new file (mode 0600) that is durable afterwards. An
    /// existing file of this name is left unchanged.
    ///
    /// # Errors
    /// The same as there, and [`ExportError::Durable`]; then neither the file nor a part of it exists.
    pub fn export_to_file(
        &self,
        id: ImageId,
        form: Form,
        companions: &[Companion],
        path: &Path,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Exported, ExportError> {
        durable::create_with(path, |file| {
            let mut sink = BufWriter::with_capacity(SINK_BYTES, file);
            self.export_image(id, form, companions, &mut sink, progress)
        })
    }
}

fn export(
    store: &Store,
    id: ImageId,
    form: Form,
    companions: &[Companion],
    sink: &mut impl Write,
    progress: &dyn Fn(u64, u64),
) -> Result<Exported, ExportError> {
    let source = store.manifest(id).map_err(ExportError::Read)?;
    let companions = companion::open(&source, companions)?;
    let packs = PackFiles::new(store, source.packs.clone())
        .map_err(|source| ExportError::Read(ReadError::Pack { image: id, source }))?;
    let secrets = store.secrets().filter(|_| form == Form::AsStored);
    let chunks = CheckedChunks {
        order: source.first_uses(),
        source: &source,
        packs: &packs,
        is_sealed: secrets.is_some(),
    };
    let mut file = OneImage::of(&chunks)?;
    for companion in &companions {
        file.add(companion, secrets)?;
    }
    let (manifest, added) = file.finish();
    manifest.validate().map_err(ManifestError::Invalid)?;
    let (pack_len, total) = (manifest.packs[0].len, manifest.raw_bytes);
    let mut archive = ArchiveWriter::new(sink);
    archive.entry(FORMAT_FILE, format_line().as_bytes())?;
    if secrets.is_some() {
        let path = store.path().join(KEY_FILE);
        let check = KeyCheck::read(&path).ok().flatten();
        let check = check.ok_or(ExportError::KeyCheck { path })?;
        archive.entry(KEY_FILE, check.to_text().as_bytes())?;
    }
    archive.entry(MANIFEST_ENTRY, &manifest_file::encode(&manifest, secrets)?)?;
    archive.write(&header(PACK_ENTRY, pack_len))?;
    archive.write(&PACK.header())?;
    let mut done = 0;
    chunks.read(|chunk| -> Result<(), ExportError> {
        done += chunk.raw.len() as u64;
        progress(done, total);
        archive.write(&chunk.stored)
    })?;
    archive.write(&added)?;
    archive.pad(pack_len)?;
    progress(total, total);
    Ok(Exported {
        id,
        raw_bytes: total,
        file_bytes: archive.end()?,
        sealed: secrets.is_some(),
    })
}

/// The image as it is in the file.
struct OneImage {
    manifest: Manifest,
    pack_len: u64,
    /// The stored form of the companions' chunks, which end the pack.
    added: Vec<u8>,
}

impl OneImage {
    /// Returns the image with the places of its chunks in the new pack. Chunks that are stored in another form than in
    /// the file, or without a check, are read for it.
    fn of(chunks: &CheckedChunks<'_>) -> Result<Self, ExportError> {
        let mut order = chunks.order.clone();
        let source = chunks.source;
        let lacks_check = order.iter().any(|(_, stored)| stored.check.is_none());
        if source.encrypted != chunks.is_sealed || lacks_check {
            chunks.read(|prepared| -> Result<(), ExportError> {
                let (_, stored) = &mut order[prepared.position];
                stored.hash = chunk::hash(&prepared.raw);
                stored.len = u32::try_from(prepared.stored.len()).unwrap_or(u32::MAX);
                stored.check = Some(xxh3_64(&prepared.stored));
                Ok(())
            })?;
        }
        let mut image = Self {
            manifest: Manifest {
                format: FORMAT,
                id: IMAGE,
                encrypted: chunks.is_sealed,
                ..source.clone()
            },
            pack_len: HEADER_LEN as u64,
            added: Vec::new(),
        };
        for chunk in &mut image.manifest.chunks {
            // A chunk that no stream uses stays nothing.
            chunk.content = Content::Zero;
        }
        for (index, stored) in order {
            let content = image.place(stored);
            image.manifest.chunks[index as usize].content = content;
        }
        Ok(image)
    }

    /// Gives a chunk the next place.
    fn place(&mut self, stored: Stored) -> Content {
        let offset = self.pack_len;
        self.pack_len += u64::from(stored.len);
        Content::Stored(Stored {
            pack: 0,
            offset,
            ..stored
        })
    }

    /// Adds a file as a stream.
    fn add(&mut self, companion: &Opened, secrets: Option<&Secrets>) -> Result<(), ExportError> {
        let mut chunks = Vec::new();
        companion.chunks(|raw, codec, encoded| -> Result<(), ExportError> {
            let hash = secrets.map_or_else(|| chunk::hash(raw), |secrets| secrets.name(raw));
            let begin = self.added.len();
            match secrets {
                None => self.added.extend_from_slice(encoded),
                Some(secrets) => {
                    self.added.resize(begin + encoded.len() + OVERHEAD_BYTES, 0);
                    let sealed = secrets
                        .chunks
                        .seal(&hash, encoded, &mut self.added[begin..]);
                    sealed.map_err(ExportError::Seal)?;
                }
            }
            let bytes = &self.added[begin..];
            let stored = Stored {
                hash,
                pack: 0,
                offset: 0,
                len: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
                codec,
                check: Some(xxh3_64(bytes)),
            };
            let index = u32::try_from(self.manifest.chunks.len());
            chunks.push(index.map_err(|_| ManifestError::TooLarge)?);
            let content = self.place(stored);
            self.manifest.chunks.push(Chunk {
                raw_len: u32::try_from(raw.len()).unwrap_or(u32::MAX),
                content,
            });
            Ok(())
        })?;
        self.manifest.raw_bytes = self.manifest.raw_bytes.saturating_add(companion.len);
        self.manifest.streams.push(Stream {
            name: companion.stream.clone(),
            raw_len: companion.len,
            chunks,
        });
        Ok(())
    }

    /// Returns the manifest, and the end of the pack.
    fn finish(mut self) -> (Manifest, Vec<u8>) {
        self.manifest.stored_bytes = self.pack_len;
        self.manifest.packs = vec![Pack {
            name: PACK,
            len: self.pack_len,
        }];
        (self.manifest, self.added)
    }
}
