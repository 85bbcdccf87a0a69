//! Export of an image to a file: threads fetch and check its chunks, which are written in order.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::super::error::ReadError;
use super::super::format::chunk::{self, CHUNK_BYTES, Hash};
use super::super::format::image_id::ImageId;
use super::super::format::manifest::{Content, Manifest, Stored, Stream};
use super::super::format::pack::PackFiles;
use super::super::format::store_folder::Store;
use super::super::fs::durable;
use super::super::maintain::image_copy::is_gone;
use super::super::read::chunk_fetcher::{ChunkFetcher, Fault};
use super::super::read::read_ahead::{self, Extent};
use super::companion;
use super::error::ExportError;
use super::frame::{FrameWriter, Kind};
use super::{FORMAT, HEADER_LEN, MAGIC, NOT_SEALED, SEALED};
use crate::clock;

/// Threads that read, open, decompress and hash chunks: enough to keep up with any disk or network.
const WORKERS_MAX: usize = 8;
/// Chunks that wait to be written: eight for each thread, together 16 MiB, or 32 MiB with both the raw and the encoded
/// form.
const WINDOW_MAX: usize = 8 * WORKERS_MAX;

/// The form in which an image leaves its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Sealed if the store is encrypted, plain otherwise.
    AsStored,
    /// Plain even if the store is encrypted.
    Plain,
}

/// A file that accompanies an image as a separate stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Companion {
    /// Name of the stream. If the image has a stream of this name, the file is left out.
    pub stream: String,
    /// The file, which must not change.
    pub path: PathBuf,
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
    let manifest = store.manifest(id).map_err(ExportError::Read)?;
    let companions = companion::open(&manifest, companions)?;
    let companion_bytes: u64 = companions.iter().map(|one| one.len).sum();
    let raw_bytes = manifest.raw_bytes.saturating_add(companion_bytes);
    let packs = PackFiles::new(store, manifest.packs.clone())
        .map_err(|source| ExportError::Read(ReadError::Pack { image: id, source }))?;
    let sealing = store.secrets().filter(|_| form == Form::AsStored);
    let salt = clock::random().map_err(ExportError::Seal)?;
    let check = sealing.map_or([0; 32], |secrets| secrets.file_check(&salt));
    let header = header(sealing.is_some(), &salt, &check);
    sink.write_all(&header).map_err(ExportError::Write)?;
    let mut frames = FrameWriter::new(
        sink,
        xxh3_64(&header),
        HEADER_LEN,
        sealing.map(|secrets| secrets.file(&salt)),
    );
    let created = manifest.created_unix_ms.to_le_bytes();
    let total = raw_bytes.to_le_bytes();
    frames.write(Kind::Image, &[&created, &total, &manifest.meta])?;
    Exporter {
        naming: match form {
            Form::Plain if store.is_encrypted() => Naming::Plain,
            Form::Plain | Form::AsStored => Naming::OfTheStore,
        },
        places: first_places(&manifest),
        numbers: vec![0; manifest.chunks.len()],
        next_number: 0,
        done: 0,
        progress: &|done| progress(done, raw_bytes),
        packs: &packs,
        manifest: &manifest,
        frames: &mut frames,
    }
    .streams()?;
    let name = |raw: &[u8]| sealing.map_or_else(|| chunk::hash(raw), |secrets| secrets.name(raw));
    for companion in companions {
        companion.write(&mut frames, name)?;
    }
    frames.write(Kind::End, &[&total])?;
    frames.flush()?;
    Ok(Exported {
        id,
        raw_bytes,
        file_bytes: frames.bytes,
        sealed: sealing.is_some(),
    })
}

fn header(sealed: bool, salt: &[u8; 32], check: &[u8; 32]) -> [u8; HEADER_LEN] {
    let sealing = if sealed { SEALED } else { NOT_SEALED };
    let mut header = [0; HEADER_LEN];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    header[12..16].copy_from_slice(&sealing.to_le_bytes());
    header[16..48].copy_from_slice(salt);
    header[48..80].copy_from_slice(check);
    let check = xxh3_64(&header[..80]).to_le_bytes();
    header[80..].copy_from_slice(&check);
    header
}

/// Rule for the names of chunks in the file.
#[derive(Clone, Copy)]
enum Naming {
    /// The name that the chunk has in the store.
    OfTheStore,
    /// The chunk's hash without a key.
    Plain,
}

/// Returns the first occurrence of each chunk: stream, and position in it.
fn first_places(manifest: &Manifest) -> Vec<Option<(usize, usize)>> {
    let mut places = vec![None; manifest.chunks.len()];
    for (stream, chunks) in manifest.streams.iter().map(|one| &one.chunks).enumerate() {
        for (position, chunk) in chunks.iter().enumerate() {
            places[*chunk as usize].get_or_insert((stream, position));
        }
    }
    places
}

struct Exporter<'a, W> {
    naming: Naming,
    places: Vec<Option<(usize, usize)>>,
    /// Numbers in the file of the chunks already written, by position in the manifest.
    numbers: Vec<u32>,
    next_number: u32,
    done: u64,
    progress: &'a dyn Fn(u64),
    packs: &'a PackFiles,
    manifest: &'a Manifest,
    frames: &'a mut FrameWriter<W>,
}

/// A chunk that is being prepared for the file.
#[derive(Default)]
struct Prepared {
    position: usize,
    raw: Vec<u8>,
    encoded: Vec<u8>,
    outcome: Outcome,
}

#[derive(Default)]
enum Outcome {
    #[default]
    Zeros,
    Repeat,
    Chunk(Hash, u8),
    Fault(Fault),
}

impl<W: Write> Exporter<'_, W> {
    fn streams(mut self) -> Result<(), ExportError> {
        let manifest = self.manifest;
        for (number, stream) in manifest.streams.iter().enumerate() {
            self.frames.write(Kind::Stream, &[stream.name.as_bytes()])?;
            self.stream(number, stream)?;
            let len = stream.raw_len.to_le_bytes();
            self.frames.write(Kind::StreamEnd, &[&len])?;
        }
        Ok(())
    }

    fn stream(&mut self, number: usize, stream: &Stream) -> Result<(), ExportError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let extent = Extent {
            workers: cores.min(WORKERS_MAX),
            window: WINDOW_MAX,
        };
        let (packs, manifest, naming) = (self.packs, self.manifest, self.naming);
        let places = std::mem::take(&mut self.places);
        let result = read_ahead::in_order(
            stream.chunks.len(),
            extent,
            || {
                let fetcher = ChunkFetcher::new(packs);
                fetcher.map_err(|error| ExportError::Read(ReadError::Worker(error)))
            },
            |fetcher, position| {
                let index = stream.chunks[position] as usize;
                let is_first = places[index] == Some((number, position));
                let mut prepared = Prepared {
                    position,
                    ..Prepared::default()
                };
                let chunk = manifest.chunks[index];
                prepared.outcome = match chunk.content {
                    Content::Zero => Outcome::Zeros,
                    Content::Stored(_) if !is_first => Outcome::Repeat,
                    Content::Stored(stored) => {
                        prepared.raw.resize(chunk.raw_len as usize, 0);
                        prepared.fetch(fetcher, &stored, naming)
                    }
                };
                prepared
            },
            |prepared| self.put(stream, &prepared),
        );
        self.places = places;
        result
    }

    fn put(&mut self, stream: &Stream, prepared: &Prepared) -> Result<(), ExportError> {
        let index = stream.chunks[prepared.position] as usize;
        let raw_len = self.manifest.chunks[index].raw_len;
        let raw_len_bytes = raw_len.to_le_bytes();
        match &prepared.outcome {
            Outcome::Zeros => self.frames.write(Kind::Zeros, &[&raw_len_bytes])?,
            Outcome::Repeat => {
                let number = self.numbers[index].to_le_bytes();
                self.frames.write(Kind::Repeat, &[&number])?;
            }
            Outcome::Chunk(name, codec) => {
                self.numbers[index] = self.next_number;
                self.next_number += 1;
                let parts = [&raw_len_bytes[..], &[*codec], name, &prepared.encoded];
                self.frames.write(Kind::Chunk, &parts)?;
            }
            Outcome::Fault(fault) => return Err(self.damage(stream, prepared.position, fault)),
        }
        self.done += u64::from(raw_len);
        (self.progress)(self.done);
        Ok(())
    }

    fn damage(&self, stream: &Stream, chunk: usize, fault: &Fault) -> ExportError {
        ExportError::Read(ReadError::Corrupt {
            image: self.manifest.id,
            stream: stream.name.clone(),
            chunk,
            reason: fault.to_string(),
        })
    }
}

impl Prepared {
    fn fetch(
        &mut self,
        fetcher: &mut ChunkFetcher<'_>,
        stored: &Stored,
        naming: Naming,
    ) -> Outcome {
        debug_assert!(self.raw.len() <= CHUNK_BYTES, "a valid manifest");
        if let Err(fault) = fetcher.fetch_encoded(stored, &mut self.raw, &mut self.encoded) {
            return Outcome::Fault(fault);
        }
        let name = match naming {
            Naming::OfTheStore => stored.hash,
            Naming::Plain => chunk::hash(&self.raw),
        };
        Outcome::Chunk(name, stored.codec as u8)
    }
}
