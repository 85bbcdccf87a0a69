//! Form of a manifest on disk: header, summary, body.
//!
//! ```text
//! 0    magic "CKPTMANI"                         8 bytes
//! 8    format of the file                       u32, little endian like all numbers
//! 12   lowest format that a reader must support u32
//! 16   image                                    u64
//! 24   length of the summary                    u32
//! 28   0, or 1 if summary and body are sealed   u32
//! 32   length of the body                       u64
//! 40   length of the body, uncompressed         u64
//! 48   BLAKE3 of bytes 0..48 and the summary    32 bytes
//! 80   BLAKE3 of bytes 0..48 and the body       32 bytes
//! 112  summary                                  protobuf
//!      body                                     protobuf, one zstd frame
//! ```
//! The summary is sufficient for listing and pruning. The body holds streams and chunks as packed columns, about 55
//! bytes per chunk. Lengths and checksums come first and are checked before any memory is allocated or any byte is
//! parsed.
//!
//! In an encrypted store summary and body are [sealed](super::cipher), each bound to bytes 0..48 and to its role.
//! Lengths and checksums refer to the sealed forms, so damage is detected without the key.
//!
//! Format 1 had a single checksum over bytes 0..48, summary and body, and the summary at offset 80.

#[cfg(any(fuzzing, test))]
pub(in crate::store) mod fuzz_manifest;
pub(in crate::store) mod manifest_columns;
mod manifest_header;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use prost::Message;

use super::cipher::{Cipher, OVERHEAD_BYTES, Secrets};
use super::image_id::ImageId;
use super::manifest::{InvalidManifest, Manifest};
use super::pack::Pack;
use crate::known_errors::is_loss;
use crate::store::format::FORMAT;
use manifest_columns::{
    BodyMessage, SummaryMessage, body_message, chunks_of, packs_of, streams_of, summary_message,
};
pub(crate) use manifest_header::FILE_BYTES_MAX;
use manifest_header::{CHECKED_LEN, FORMAT_OF_ONE_SUM, Header, NOT_SEALED, SEALED};

const SUM_LEN: usize = 32;
/// Maximum length of the caller's data: JSON that is in memory whenever images are listed. Sufficient for a job with
/// 100,000 files.
pub(crate) const META_BYTES_MAX: usize = 32 << 20;
/// Compression level of bodies. They consist mostly of hashes, which do not compress, so a higher level gains nothing.
const BODY_LEVEL: i32 = 1;
/// Maximum window of a body's zstd frame. Level 1 uses 2^19 bytes; a reader accepts some more, but not any size that a
/// frame requests.
const BODY_WINDOW_LOG_MAX: u32 = 23;

/// Error for a file that is not a readable manifest.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The file cannot be read.
    #[error("cannot read the manifest")]
    Read(#[source] io::Error),
    /// A newer version wrote the image in an unsupported format.
    #[error(
        "the image needs a newer ckpt-run: its format is {format}, this version reads {FORMAT}"
    )]
    Newer {
        /// Lowest format that a reader must support.
        format: u32,
    },
    /// The image is encrypted and the store is not: the store lost its key check, or the image belongs to another
    /// store.
    #[error("the image is encrypted, but the store is not")]
    Encrypted,
    /// The store is encrypted and the image is not: the image belongs to another store, or was made without the key.
    #[error("the image is not encrypted, but the store is")]
    NotEncrypted,
    /// The manifest is intact, but the key does not open it.
    #[error("the manifest was sealed with another key")]
    OtherKey,
    /// The kernel has no random bytes.
    #[error("cannot encrypt the manifest")]
    Seal(#[source] io::Error),
    /// A length, the magic or a checksum is wrong.
    #[error("the manifest is damaged: {0}")]
    Damaged(&'static str),
    /// The checksum is right, but the content is not valid.
    #[error("the manifest is not valid")]
    Invalid(#[from] InvalidManifest),
    /// The image has more chunks than a manifest can hold.
    #[error("the image has too many chunks or packs for one manifest")]
    TooLarge,
    /// zstd failed, for lack of memory.
    #[error("cannot compress the manifest")]
    Compress(#[source] io::Error),
}

impl ManifestError {
    /// Returns true if this version can never read the image. Returns false if the cause may be temporary.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            Self::Read(error) => is_loss(error),
            Self::Newer { .. } | Self::Damaged(_) | Self::Invalid(_) | Self::OtherKey => true,
            // An encrypted image in a store that is not encrypted may be readable with its key.
            Self::Encrypted
            | Self::NotEncrypted
            | Self::TooLarge
            | Self::Compress(_)
            | Self::Seal(_) => false,
        }
    }
}

/// Part of a manifest that is readable without its body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) created_unix_ms: u64,
    pub(crate) raw_bytes: u64,
    pub(crate) stored_bytes: u64,
    pub(crate) meta: Vec<u8>,
    pub(crate) packs: Vec<Pack>,
}

impl Summary {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        Self {
            created_unix_ms: manifest.created_unix_ms,
            raw_bytes: manifest.raw_bytes,
            stored_bytes: manifest.stored_bytes,
            meta: manifest.meta.clone(),
            packs: manifest.packs.clone(),
        }
    }
}

/// Parts of a manifest's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Summary,
    Body,
}

/// Encodes a manifest as a file of a store with these secrets.
pub(crate) fn encode(
    manifest: &Manifest,
    secrets: Option<&Secrets>,
) -> Result<Vec<u8>, ManifestError> {
    assert_eq!(
        manifest.encrypted,
        secrets.is_some(),
        "a manifest of another store"
    );
    let summary = summary_message(manifest).encode_to_vec();
    let raw_body = body_message(manifest)?.encode_to_vec();
    let body = zstd::bulk::compress(&raw_body, BODY_LEVEL).map_err(ManifestError::Compress)?;
    let overhead = secrets.map_or(0, |_| OVERHEAD_BYTES);
    let summary_len = summary.len() + overhead;
    let header = Header {
        format: manifest.format,
        needs: manifest.format,
        image: manifest.id.number(),
        summary_len: u32::try_from(summary_len).map_err(|_| ManifestError::TooLarge)?,
        sealing: if manifest.encrypted {
            SEALED
        } else {
            NOT_SEALED
        },
        body_len: (body.len() + overhead) as u64,
        raw_body_len: raw_body.len() as u64,
    };
    if header.is_too_large() {
        return Err(ManifestError::TooLarge);
    }
    let head = header.to_bytes();
    let (summary, body) = match secrets {
        None => (summary, body),
        Some(secrets) => (
            seal(&secrets.manifests, &head, Part::Summary, &summary)?,
            seal(&secrets.manifests, &head, Part::Body, &body)?,
        ),
    };
    Ok([
        &head[..],
        &checksum(&head, &[&summary]),
        &checksum(&head, &[&body]),
        &summary,
        &body,
    ]
    .concat())
}

/// Reads the summary of image `id`'s manifest, for listing and pruning.
pub(crate) fn read_summary(
    path: &Path,
    id: ImageId,
    secrets: Option<&Secrets>,
) -> Result<Summary, ManifestError> {
    let (file, len) = open_file(path)?;
    Sections::read(file, len, id, Extent::Summary, secrets)?.summary()
}

/// The manifest of image `id` from the bytes of its file.
pub(crate) fn decode(
    bytes: &[u8],
    id: ImageId,
    secrets: Option<&Secrets>,
) -> Result<Manifest, ManifestError> {
    let len = bytes.len() as u64;
    Sections::read(bytes, len, id, Extent::Whole, secrets)?.manifest(id)
}

/// Reads the manifest of image `id`.
pub(crate) fn read_manifest(
    path: &Path,
    id: ImageId,
    secrets: Option<&Secrets>,
) -> Result<Manifest, ManifestError> {
    let (file, len) = open_file(path)?;
    Sections::read(file, len, id, Extent::Whole, secrets)?.manifest(id)
}

fn open_file(path: &Path) -> Result<(File, u64), ManifestError> {
    let file = File::open(path).map_err(ManifestError::Read)?;
    let len = file.metadata().map_err(ManifestError::Read)?.len();
    Ok((file, len))
}

/// Extent of a read of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    Summary,
    Whole,
}

/// Parts of a manifest after the checks of lengths, image number and checksums.
struct Sections {
    header: Header,
    summary: Vec<u8>,
    /// Body; empty if it was not read.
    body: Vec<u8>,
}

impl Sections {
    /// Reads from a file of `len` bytes.
    fn read(
        mut file: impl Read,
        len: u64,
        id: ImageId,
        extent: Extent,
        secrets: Option<&Secrets>,
    ) -> Result<Self, ManifestError> {
        if len < (CHECKED_LEN + SUM_LEN) as u64 {
            return Err(ManifestError::Damaged("it is too short"));
        }
        let head: [u8; CHECKED_LEN] = read_array(&mut file)?;
        let header = Header::parse(&head, id)?;
        let cipher = header.cipher(secrets)?;
        if len != header.file_len() {
            return Err(ManifestError::Damaged("its length is wrong"));
        }
        if header.format == FORMAT_OF_ONE_SUM {
            let sum: [u8; SUM_LEN] = read_array(&mut file)?;
            let summary = read_vec(&mut file, header.summary_len.into())?;
            let body = read_vec(&mut file, header.body_len)?;
            check(sum, &head, &[&summary, &body])?;
            return Ok(Self {
                header,
                summary,
                body,
            });
        }
        let summary_sum: [u8; SUM_LEN] = read_array(&mut file)?;
        let body_sum: [u8; SUM_LEN] = read_array(&mut file)?;
        let summary = read_vec(&mut file, header.summary_len.into())?;
        check(summary_sum, &head, &[&summary])?;
        let summary = open(cipher, &head, Part::Summary, summary)?;
        let body = match extent {
            Extent::Summary => Vec::new(),
            Extent::Whole => {
                let body = read_vec(&mut file, header.body_len)?;
                check(body_sum, &head, &[&body])?;
                open(cipher, &head, Part::Body, body)?
            }
        };
        Ok(Self {
            header,
            summary,
            body,
        })
    }

    fn summary(&self) -> Result<Summary, ManifestError> {
        let message = SummaryMessage::decode(&self.summary[..])
            .map_err(|_| ManifestError::Damaged("its summary cannot be decoded"))?;
        Ok(Summary {
            packs: packs_of(&message).ok_or(ManifestError::Damaged("its pack table is broken"))?,
            created_unix_ms: message.created_unix_ms,
            raw_bytes: message.raw_bytes,
            stored_bytes: message.stored_bytes,
            meta: message.meta,
        })
    }

    fn manifest(&self, id: ImageId) -> Result<Manifest, ManifestError> {
        let summary = self.summary()?;
        let raw = decompress(&self.body, self.header.raw_body_len)
            .ok()
            .filter(|raw| raw.len() as u64 == self.header.raw_body_len)
            .ok_or(ManifestError::Damaged("its body cannot be decompressed"))?;
        let body = BodyMessage::decode(&raw[..])
            .map_err(|_| ManifestError::Damaged("its body cannot be decoded"))?;
        let columns = ManifestError::Damaged("its columns differ in length");
        let (streams, chunks) = streams_of(&body).zip(chunks_of(&body)).ok_or(columns)?;
        let manifest = Manifest {
            format: self.header.format,
            id,
            created_unix_ms: summary.created_unix_ms,
            streams,
            chunks,
            packs: summary.packs,
            raw_bytes: summary.raw_bytes,
            encrypted: self.header.sealing == SEALED,
            stored_bytes: summary.stored_bytes,
            meta: summary.meta,
        };
        manifest.validate()?;
        Ok(manifest)
    }
}

impl Part {
    /// Returns the associated data of a sealed part.
    fn about(self, head: &[u8; CHECKED_LEN]) -> [u8; CHECKED_LEN + 1] {
        let mut about = [0; CHECKED_LEN + 1];
        about[..CHECKED_LEN].copy_from_slice(head);
        about[CHECKED_LEN] = match self {
            Self::Summary => 0,
            Self::Body => 1,
        };
        about
    }
}

fn seal(
    cipher: &Cipher,
    head: &[u8; CHECKED_LEN],
    part: Part,
    plain: &[u8],
) -> Result<Vec<u8>, ManifestError> {
    let mut sealed = vec![0; plain.len() + OVERHEAD_BYTES];
    cipher
        .seal(&part.about(head), plain, &mut sealed)
        .map_err(ManifestError::Seal)?;
    Ok(sealed)
}

fn open(
    cipher: Option<&Cipher>,
    head: &[u8; CHECKED_LEN],
    part: Part,
    bytes: Vec<u8>,
) -> Result<Vec<u8>, ManifestError> {
    let Some(cipher) = cipher else {
        return Ok(bytes);
    };
    let mut plain = vec![0; bytes.len().saturating_sub(OVERHEAD_BYTES)];
    cipher
        .open(&part.about(head), &bytes, &mut plain)
        .map_err(|_| ManifestError::OtherKey)?;
    Ok(plain)
}

fn read_array<const LEN: usize>(file: &mut impl Read) -> Result<[u8; LEN], ManifestError> {
    let mut bytes = [0; LEN];
    file.read_exact(&mut bytes).map_err(ManifestError::Read)?;
    Ok(bytes)
}

/// `len` was compared with the length of the file.
fn read_vec(file: &mut impl Read, len: u64) -> Result<Vec<u8>, ManifestError> {
    let len = usize::try_from(len).map_err(|_| ManifestError::TooLarge)?;
    let mut bytes = vec![0; len];
    file.read_exact(&mut bytes).map_err(ManifestError::Read)?;
    Ok(bytes)
}

/// Decompresses a body. Memory grows with the decompressed bytes, whatever length the frame declares.
fn decompress(body: &[u8], raw_len: u64) -> io::Result<Vec<u8>> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(body)?;
    decoder.window_log_max(BODY_WINDOW_LOG_MAX)?;
    let mut raw = Vec::new();
    // A byte beyond the limit shows that the body is too long.
    decoder.take(raw_len + 1).read_to_end(&mut raw)?;
    Ok(raw)
}

fn check(
    expected: [u8; SUM_LEN],
    head: &[u8; CHECKED_LEN],
    parts: &[&[u8]],
) -> Result<(), ManifestError> {
    if checksum(head, parts) == expected {
        Ok(())
    } else {
        Err(ManifestError::Damaged("its checksum is wrong"))
    }
}

fn checksum(head: &[u8], parts: &[&[u8]]) -> [u8; SUM_LEN] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(head);
    for part in parts {
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
pub(crate) mod tests;
