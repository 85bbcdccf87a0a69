//! Files that accompany an image: they become streams of the portable file, and so of the imported image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::format::chunk::CHUNK_BYTES;
use super::super::format::codec::{Codec, Encoder};
use super::super::format::manifest::Manifest;
use super::export::Companion;

/// Compression level of zstd, as for images.
const LEVEL: i32 = 1;

/// A companion that was opened.
pub(crate) struct Opened {
    pub stream: String,
    pub path: PathBuf,
    pub file: Arc<File>,
    pub len: u64,
}

/// An error of a companion that cannot be read, or that changed meanwhile.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path}, which goes with the image")]
pub struct CompanionError {
    /// The file.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

/// Opens the companions that the image does not contain.
pub(crate) fn open(
    manifest: &Manifest,
    companions: &[Companion],
) -> Result<Vec<Opened>, CompanionError> {
    let missing = companions.iter().filter(|companion| {
        let mut streams = manifest.streams.iter();
        !streams.any(|stream| stream.name == companion.stream)
    });
    let opened = missing.map(|companion| {
        let (stream, path) = (companion.stream.clone(), companion.path.clone());
        let file = match &companion.opened {
            Some((file, len)) => Ok((*len, Arc::clone(file))),
            None => File::open(&path).and_then(|file| Ok((file.metadata()?.len(), Arc::new(file)))),
        };
        match file {
            Ok((len, file)) => Ok(Opened {
                stream,
                path,
                file,
                len,
            }),
            Err(source) => Err(CompanionError { path, source }),
        }
    });
    opened.collect()
}

impl Opened {
    pub(crate) fn failed(&self, source: io::Error) -> CompanionError {
        let path = self.path.clone();
        CompanionError { path, source }
    }

    /// Cuts the file into chunks and passes each with its encoded form.
    pub(crate) fn chunks<E: From<CompanionError>>(
        &self,
        mut add: impl FnMut(&[u8], Codec, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let failed = |source| self.failed(source);
        let mut encoder = Encoder::new(LEVEL).map_err(failed)?;
        let mut raw = Vec::new();
        let mut left = self.len;
        while left > 0 {
            let wanted = left.min(CHUNK_BYTES as u64);
            raw.resize(usize::try_from(wanted).unwrap_or(CHUNK_BYTES), 0);
            let read = self.file.read_exact_at(&mut raw, self.len - left);
            read.map_err(failed)?;
            left -= wanted;
            let (codec, encoded) = encoder.encode(&raw).map_err(failed)?;
            add(&raw, codec, encoded)?;
        }
        Ok(())
    }
}
