//! Copies of an image in another store.
//!
//! ```text
//! read, check hash ─▶ write as any image: hash, look up, compress, pack ─▶ commit
//! ```
//! The copy is an ordinary image of the other store: deduplicated against the images there, durable before it gets its
//! name, and discarded if any step fails. The source needs no lock: a supervisor may continue to write and rotate
//! images there.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::store::error::{ReadError, WriteError};
use crate::store::format::chunk::CHUNK_BYTES;
use crate::store::format::file_names::ListError;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::Manifest;
use crate::store::format::store_folder::Store;
use crate::store::fs::lock::StoreLock;
use crate::store::portable::companion::{self, Opened};
use crate::store::portable::{Companion, CompanionError};
use crate::store::read::image_reader::ImageReader;
use crate::store::write::image_writer::{ImageWriter, WriteOptions};
use crate::store::write::stream_writer::StreamWriter;

/// An error that prevented the copy. The images of the other store are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The image would be copied to the store that it is in.
    #[error("cannot copy into {path}: the image is already in this store")]
    SameStore {
        /// The store.
        path: PathBuf,
    },
    /// The image must not be restored, and its copy would not carry the mark.
    #[error("image {image} was set aside: {reason}")]
    SetAside {
        /// The image.
        image: ImageId,
        /// The reason of the mark.
        reason: String,
    },
    /// Another process removed the image while it was being read.
    #[error("image {image} was removed while it was being copied; copy a newer one")]
    Gone {
        /// The image.
        image: ImageId,
    },
    /// The image cannot be read.
    #[error(transparent)]
    Read(ReadError),
    /// A file that goes with the image cannot be read.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// The copy cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

impl Store {
    /// Copies an image into the store `to`, where it gets the next number. The copy has the meta data and the time of
    /// the image, and `companions` become streams of it. Every byte is checked as it is read. `progress` receives the
    /// bytes copied and in total. Returns the manifest of the copy.
    ///
    /// # Errors
    /// [`CopyError`]; then neither a copy nor a part of one exists.
    ///
    /// # Panics
    /// If the lock does not belong to `to`.
    pub fn copy_image(
        &self,
        id: ImageId,
        companions: &[Companion],
        to: &Store,
        to_lock: &StoreLock,
        options: WriteOptions,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Manifest, CopyError> {
        if self.is_same(to)? {
            let path = to.path().to_owned();
            return Err(CopyError::SameStore { path });
        }
        if let Some(reason) = self.damage_mark(id) {
            return Err(CopyError::SetAside { image: id, reason });
        }
        let copied = self
            .read(id)
            .map_err(CopyError::Read)
            .and_then(|reader| copy(&reader, companions, to.begin(to_lock, options)?, progress));
        copied.map_err(|error| match error {
            // The manifest is removed before its packs.
            CopyError::Read(read) if is_gone(self, id, &read) => CopyError::Gone { image: id },
            error => error,
        })
    }

    fn is_same(&self, other: &Store) -> Result<bool, CopyError> {
        let identity = |store: &Store| match fs::metadata(store.path()) {
            Ok(found) => Ok((found.dev(), found.ino())),
            Err(source) => Err(CopyError::Read(ReadError::List(ListError {
                path: store.path().to_owned(),
                source,
            }))),
        };
        Ok(identity(self)? == identity(other)?)
    }
}

pub(crate) fn is_gone(store: &Store, id: ImageId, error: &ReadError) -> bool {
    let is_missing = matches!(error, ReadError::Missing { .. });
    error.is_damage() && !is_missing && !store.manifest_file(id).exists()
}

fn copy(
    reader: &ImageReader,
    companions: &[Companion],
    mut writer: ImageWriter,
    progress: &dyn Fn(u64, u64),
) -> Result<Manifest, CopyError> {
    let manifest = reader.manifest();
    let companions = companion::open(manifest, companions)?;
    let bytes: u64 = companions.iter().map(|one| one.len).sum();
    let total = manifest.raw_bytes.saturating_add(bytes);
    writer.set_created(manifest.created_unix_ms);
    writer.start_workers(); // nothing is frozen here
    let mut done = 0;
    for source in &manifest.streams {
        let mut sink = Sink {
            stream: writer.stream(&source.name)?,
            failure: None,
            passed: &mut |len| {
                done += len;
                progress(done, total);
            },
        };
        match (reader.copy_to(&source.name, &mut sink), sink.failure) {
            (_, Some(failure)) => return Err(failure.into()),
            (Err(error), None) => return Err(CopyError::Read(error)),
            (Ok(_), None) => sink.stream.finish()?,
        };
    }
    for companion in companions {
        add(&companion, &writer)?;
        done += companion.len;
        progress(done, total);
    }
    Ok(Arc::unwrap_or_clone(writer.commit(&manifest.meta)?))
}

/// Adds the file as a stream.
fn add(companion: &Opened, writer: &ImageWriter) -> Result<(), CopyError> {
    let mut stream = writer.stream(&companion.stream)?;
    let mut piece = vec![0; CHUNK_BYTES];
    let mut left = companion.len;
    while left > 0 {
        let wanted = left.min(CHUNK_BYTES as u64);
        // Never longer than the piece.
        let part = &mut piece[..usize::try_from(wanted).unwrap_or(CHUNK_BYTES)];
        let read = companion.file.read_exact_at(part, companion.len - left);
        read.map_err(|source| companion.failed(source))?;
        stream.write_all(part)?;
        left -= wanted;
    }
    stream.finish()?;
    Ok(())
}

/// A stream as the target of a reader; stores the error that `io::Error` cannot carry.
struct Sink<'a> {
    stream: StreamWriter,
    failure: Option<WriteError>,
    passed: &'a mut dyn FnMut(u64),
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(failure) = self.stream.write_all(bytes) {
            self.failure = Some(failure);
            return Err(io::ErrorKind::Other.into());
        }
        (self.passed)(bytes.len() as u64);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::store::format::codec::tests::noise;
    use crate::store::tests::support::{
        OPTIONS, image_files, never, packs, read_stream, temporary_store, write_image,
    };

    fn nobody(_: u64, _: u64) {}

    #[test]
    fn a_copy_has_the_bytes_the_meta_data_and_the_time_of_the_image() {
        let (_folder, store) = temporary_store();
        let (_other_folder, other) = temporary_store();
        let (lock, other_lock) = (store.lock().unwrap(), other.lock().unwrap());
        let pages = [
            noise(1, 3 * CHUNK_BYTES),
            vec![0; 2 * CHUNK_BYTES],
            noise(2, 7),
        ]
        .concat();
        write_image(&store, &lock, &[("a", b"older")]);
        let streams: [(&str, &[u8]); 3] = [("pages", &pages), ("empty", b""), ("core", b"core")];
        let source = write_image(&store, &lock, &streams);
        let last = Cell::new((0, 0));
        let progress = |done, total| last.set((done, total));
        let copy = store
            .copy_image(source.id, &[], &other, &other_lock, OPTIONS, &progress)
            .unwrap();
        assert_eq!(last.get(), (source.raw_bytes, source.raw_bytes));
        assert_eq!(copy.id.number(), 1, "the next number there");
        assert_eq!(copy.created_unix_ms, source.created_unix_ms);
        assert_eq!(copy.meta, b"meta");
        other.verify(copy.id, &never).unwrap();
        for (name, bytes) in streams {
            assert!(read_stream(&other, copy.id, name) == bytes, "{name}");
        }
        let again = store
            .copy_image(source.id, &[], &other, &other_lock, OPTIONS, &nobody)
            .unwrap();
        assert_eq!(
            (again.id.number(), again.stored_bytes),
            (2, 0),
            "all of it is there"
        );
    }

    #[test]
    fn a_damaged_image_is_not_copied_nor_a_part_of_it() {
        let (_folder, store) = temporary_store();
        let (_other_folder, other) = temporary_store();
        let (lock, other_lock) = (store.lock().unwrap(), other.lock().unwrap());
        let source = write_image(
            &store,
            &lock,
            &[("a", b"good"), ("b", &noise(1, 40 * CHUNK_BYTES))],
        );
        let path = store.pack_file(source.packs[0].name);
        let mut bytes = fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&path, bytes).unwrap();
        let copy = || store.copy_image(source.id, &[], &other, &other_lock, OPTIONS, &nobody);
        let error = copy().unwrap_err();
        assert!(
            matches!(error, CopyError::Read(ReadError::Corrupt { .. })),
            "{error}"
        );
        store
            .set_aside(&lock, source.id, "its hash is wrong")
            .unwrap();
        let error = copy().unwrap_err();
        assert!(matches!(error, CopyError::SetAside { .. }), "{error}");
        assert_eq!((packs(&other).len(), image_files(&other).len()), (0, 0));
    }

    #[test]
    fn image_rotated_away_meanwhile_is_reported() {
        let (_folder, store) = temporary_store();
        let (_other_folder, other) = temporary_store();
        let (lock, other_lock) = (store.lock().unwrap(), other.lock().unwrap());
        // More packs than a reader keeps open.
        let first = write_image(
            &store,
            &lock,
            &[("a", b"a"), ("b", &noise(1, 40 * CHUNK_BYTES))],
        );
        let rotate = |_, _| {
            if store.manifest_file(first.id).exists() {
                write_image(&store, &lock, &[("a", b"new")]);
                assert_eq!(store.rotate(&lock, 1).unwrap(), [first.id]);
            }
        };
        let error = store
            .copy_image(first.id, &[], &other, &other_lock, OPTIONS, &rotate)
            .unwrap_err();
        assert!(matches!(error, CopyError::Gone { .. }), "{error}");
        assert_eq!((packs(&other).len(), image_files(&other).len()), (0, 0));
        let error = store
            .copy_image(first.id, &[], &other, &other_lock, OPTIONS, &nobody)
            .unwrap_err();
        assert!(
            matches!(error, CopyError::Read(ReadError::Missing { .. })),
            "{error}"
        );
    }

    #[test]
    fn an_image_is_not_copied_to_where_it_is() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let source = write_image(&store, &lock, &[("a", b"a")]);
        let error = store
            .copy_image(source.id, &[], &store, &lock, OPTIONS, &nobody)
            .unwrap_err();
        assert!(matches!(error, CopyError::SameStore { .. }), "{error}");
    }
}
