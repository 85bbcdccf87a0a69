//! Report of a verification, image by image.
//!
//! Plain data. `verification` fills it in; `store_repair` and the caller's messages use it.

use std::fmt;
use std::ops::Range;

use crate::store::error::ReadError;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest_file::ManifestError;
use crate::store::format::pack::{PackError, PackName};

/// Everything that was verified, and its defects.
#[derive(Debug, Default)]
pub struct Report {
    /// The images, in the order asked for, oldest first if all were.
    pub images: Vec<ImageReport>,
    /// Images that were removed by others while they were being read.
    pub gone: Vec<ImageId>,
    /// Distinct chunks that lie in packs; each was read once.
    pub chunks: u64,
    /// Their uncompressed bytes.
    pub chunk_bytes: u64,
}

/// Defects of an image; none if it is whole.
#[derive(Debug)]
pub struct ImageReport {
    /// Its number.
    pub id: ImageId,
    /// Length of all its streams together; 0 if the manifest cannot be read.
    pub raw_bytes: u64,
    /// The reason why the image was set aside, which does not concern its bytes.
    pub set_aside: Option<String>,
    /// Why its manifest cannot be read. Then nothing else is known of it.
    pub manifest: Option<ManifestError>,
    /// Its packs that are lost, or are not what they were.
    pub packs: Vec<PackError>,
    /// Its streams that lack bytes.
    pub streams: Vec<BadStream>,
}

/// Verdict on an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is what it was.
    Whole,
    /// The image cannot be restored as it is.
    Damaged,
    /// A file cannot be read for now or by this version; what could be read is right.
    Unknown,
}

/// A stream that lacks bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadStream {
    /// Its name.
    pub name: String,
    /// Its missing parts, in order.
    pub runs: Vec<BadRun>,
}

/// Chunks of a stream that follow each other, lie in the same pack and are bad in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRun {
    /// Their positions in the stream.
    pub chunks: Range<usize>,
    /// Their bytes in the stream.
    pub bytes: Range<u64>,
    /// The pack that should hold them.
    pub pack: PackName,
    /// The defect.
    pub fault: ChunkFault,
}

/// Defect of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkFault {
    /// The pack is missing or too short, or the disk fails there.
    #[error("it is lost")]
    Lost,
    /// The stored bytes were changed.
    #[error("its stored bytes have changed")]
    Check,
    /// The stored bytes do not have the form in which they were stored.
    #[error("it cannot be decompressed")]
    Form,
    /// The stored bytes are intact, but are another chunk.
    #[error("its hash is wrong")]
    Content,
    /// The pack cannot be read for now.
    #[error("its pack cannot be read for now")]
    OutOfReach,
}

impl Report {
    /// Returns true if every image is whole.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let whole = |image: &ImageReport| image.verdict() == Verdict::Whole;
        self.images.iter().all(whole)
    }
}

impl ImageReport {
    /// Returns the verdict on all defects together.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let manifest = self.manifest.iter().map(is_manifest_lost);
        let packs = self.packs.iter().map(PackError::is_damage);
        let runs = self.streams.iter().flat_map(|stream| &stream.runs);
        let chunks = runs.map(|run| run.fault != ChunkFault::OutOfReach);
        let mut verdict = Verdict::Whole;
        for is_damage in manifest.chain(packs).chain(chunks) {
            if is_damage {
                return Verdict::Damaged;
            }
            verdict = Verdict::Unknown;
        }
        verdict
    }

    /// The first fault as the error that reading the image would give.
    pub(crate) fn into_error(self) -> Option<ReadError> {
        let image = self.id;
        if let Some(source) = self.manifest {
            return Some(ReadError::Manifest { image, source });
        }
        if let Some(source) = self.packs.into_iter().next() {
            return Some(ReadError::Pack { image, source });
        }
        let stream = self.streams.into_iter().next()?;
        let run = stream.runs.first()?;
        Some(ReadError::Corrupt {
            image,
            stream: stream.name,
            chunk: run.chunks.start,
            reason: run.fault.to_string(),
        })
    }
}

impl fmt::Display for BadRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (chunks, bytes) = (&self.chunks, &self.bytes);
        if chunks.len() == 1 {
            write!(f, "chunk {}", chunks.start)?;
        } else {
            write!(f, "chunks {} to {}", chunks.start, chunks.end - 1)?;
        }
        let last = bytes.end.saturating_sub(1);
        write!(f, " (bytes {} to {last}) in {}", bytes.start, self.pack)?;
        write!(f, ": {}", self.fault)
    }
}

/// Returns true if no version can read the manifest, as far as this one can tell.
pub(crate) fn is_manifest_lost(error: &ManifestError) -> bool {
    match error {
        ManifestError::Newer { .. } | ManifestError::OtherKey => false,
        ManifestError::Read(_)
        | ManifestError::Damaged(_)
        | ManifestError::Invalid(_)
        | ManifestError::Encrypted
        | ManifestError::NotEncrypted
        | ManifestError::Seal(_)
        | ManifestError::TooLarge
        | ManifestError::Compress(_) => error.is_damage(),
    }
}
