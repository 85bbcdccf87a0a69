//! Files that accompany an image: they become streams of the portable file, and so of the imported image.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

use super::super::format::chunk::CHUNK_BYTES;
use super::super::format::codec::{Codec, Encoder};
use super::super::format::manifest::Manifest;
use super::error::ExportError;
use super::export::Companion;

/// Compression level of zstd, as for images.
const LEVEL: i32 = 1;

/// A companion that was opened.
pub(in super::super) struct Opened {
    pub stream: String,
    pub path: PathBuf,
    pub file: File,
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
pub(in super::super) fn open(
    manifest: &Manifest,
    companions: &[Companion],
) -> Result<Vec<Opened>, CompanionError> {
    let missing = companions.iter().filter(|companion| {
        let mut streams = manifest.streams.iter();
        !streams.any(|stream| stream.name == companion.stream)
    });
    let opened = missing.map(|Companion { stream, path }| {
        let file = File::open(path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (stream, path) = (stream.clone(), path.clone());
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
    pub(in super::super) fn failed(&self, source: io::Error) -> CompanionError {
        let path = self.path.clone();
        CompanionError { path, source }
    }

    /// Cuts the file into chunks and passes each with its encoded form.
    pub(super) fn chunks(
        &self,
        mut add: impl FnMut(&[u8], Codec, &[u8]) -> Result<(), ExportError>,
    ) -> Result<(), ExportError> {
        let failed = |source| self.failed(source);
        let mut encoder = Encoder::new(LEVEL).map_err(failed)?;
        let mut raw = Vec::with_capacity(CHUNK_BYTES);
        let mut left = self.len;
        while left > 0 {
            raw.clear();
            let wanted = left.min(CHUNK_BYTES as u64);
            let read = (&self.file).take(wanted).read_to_end(&mut raw);
            if read.map_err(failed)? as u64 != wanted {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()).into());
            }
            left -= wanted;
            let (codec, encoded) = encoder.encode(&raw).map_err(failed)?;
            add(&raw, codec, encoded)?;
        }
        Ok(())
    }
}
