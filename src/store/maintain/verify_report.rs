//! Result of a verification, image by image.
//!
//! Plain data. `verification` fills it in; `store_repair` and the caller's messages are based on it.

use std::fmt;
use std::ops::Range;

use crate::store::error::ReadError;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest_file::ManifestError;
use crate::store::format::pack::PackError;

/// The images that were checked, and all faults found.
#[derive(Debug, Default)]
pub struct Report {
    /// The images, in the order requested; oldest first if all were requested.
    pub images: Vec<ImageReport>,
    /// Images that other processes removed during the verification.
    pub gone: Vec<ImageId>,
    /// Distinct chunks in packs; each was read once.
    pub chunks: u64,
    /// Uncompressed bytes of these chunks.
    pub chunk_bytes: u64,
}

/// The faults of an image; none if it is whole.
#[derive(Debug)]
pub struct ImageReport {
    /// Its number.
    pub id: ImageId,
    /// Total length of all its streams; 0 if the manifest cannot be read.
    pub raw_bytes: u64,
    /// Reason why the image was set aside. It is independent of the image's bytes.
    pub set_aside: Option<String>,
    /// Reason why the manifest cannot be read. Nothing else is known of the image then.
    pub manifest: Option<ManifestError>,
    /// Packs of the image that are lost or have changed.
    pub packs: Vec<PackError>,
    /// Streams of the image with missing bytes.
    pub streams: Vec<BadStream>,
}

/// Overall result for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is as it was written.
    Whole,
    /// The image cannot be restored in its present state.
    Damaged,
    /// A file cannot be read at present or by this version; everything that could be read is correct.
    Unknown,
}

/// A stream with missing bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadStream {
    /// Its name.
    pub name: String,
    /// The missing parts, in the order of the stream.
    pub runs: Vec<BadRun>,
}

/// Consecutive chunks of a stream that lie in the same pack and have the same fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRun {
    /// Positions of the chunks in the stream.
    pub chunks: Range<usize>,
    /// Byte range of the chunks in the stream.
    pub bytes: Range<u64>,
    /// Name of the pack that should hold the chunks.
    pub pack: String,
    /// The fault.
    pub fault: ChunkFault,
}

/// The fault of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkFault {
    /// The pack is missing or too short, or the disk fails there.
    #[error("it is lost")]
    Lost,
    /// The stored bytes differ from those written.
    #[error("its stored bytes have changed")]
    Check,
    /// The stored bytes do not have the form they were stored in.
    #[error("it cannot be decompressed")]
    Form,
    /// The stored bytes are intact, but they are another chunk.
    #[error("its hash is wrong")]
    Content,
    /// The pack cannot be read at present.
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
    /// Combines all faults into one verdict.
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

    /// Converts the first fault into the error that reading the image would return.
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

/// Returns true if, as far as this version can determine, no version can read the manifest.
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
