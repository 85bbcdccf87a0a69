//! The object that makes an image whole: the names of its packs, and its manifest.
//!
//! ```text
//! images/000012-000003-<16 digits>   a JSON list of the packs' names, a line feed, the manifest as in a store
//! packs/000003-<32 digits>           64 bytes that are not used, then chunks, as in a store's pack
//! ```
//! The digits are those of a BLAKE3: of an image's content, and of a pack's list of chunks with their checks. So equal
//! content is stored once, and an interrupted upload continues.
//! The number before them is the series of the upload. A supervisor relies on the objects of images in the run's state
//! and on those of its own series. So a request to remove an object, sent by a supervisor that has lost the lease since,
//! never hits one that is needed: it removes objects of no image, and none of a later series.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::bucket::Bucket;
use super::remote_error::RemoteError;
use crate::store::format::cipher::Secrets;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::Manifest;
use crate::store::format::manifest_file::{self, ManifestError};

/// Folder of the images.
pub(super) const IMAGES: &str = "images";
/// Folder of the packs.
pub(super) const PACKS: &str = "packs";

/// Complete image in the remote store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteImage {
    /// Name of the object with its manifest.
    pub object: String,
    /// Number of the image in the store that it was uploaded from. A store that it comes to has no higher one then, so
    /// later images of the run have higher numbers.
    pub id: ImageId,
    /// Start of the image, in milliseconds since 1970 UTC.
    pub created_unix_ms: u64,
    /// Total length of its streams.
    pub raw_bytes: u64,
    /// Note of its pin, possibly empty; `None` if it is not pinned.
    pub pinned: Option<String>,
    /// True if the run has continued from an older image since.
    pub abandoned: bool,
}

/// Image in object storage.
#[derive(Clone, Debug)]
pub(super) struct ImageObject {
    /// The names of the packs, in the order of the manifest's.
    pub packs: Vec<String>,
    pub manifest: Manifest,
}

impl ImageObject {
    pub(super) fn encode(
        &self,
        series: u64,
        secrets: Option<&Secrets>,
    ) -> Result<(String, Bytes), String> {
        let mut content = serde_json::to_vec(&self.packs).map_err(|error| error.to_string())?;
        content.push(b'\n');
        let manifest = manifest_file::encode(&self.manifest, secrets);
        content.extend(manifest.map_err(|error| error.to_string())?);
        let digits = digits(blake3::hash(&content), 16);
        let name = format!("{IMAGES}/{}-{series:06}-{digits}", self.manifest.id);
        Ok((name, Bytes::from(content)))
    }

    pub(super) fn read(
        bucket: &Bucket,
        image: &RemoteImage,
        secrets: Option<&Secrets>,
    ) -> Result<Self, RemoteError> {
        let damaged = |reason: &dyn std::fmt::Display| bucket.damaged(&image.object, reason);
        let (packs, manifest) = read_parts(bucket, &image.object)?;
        let manifest =
            manifest_file::decode(&manifest, image.id, secrets).map_err(|error| match error {
                ManifestError::Encrypted
                | ManifestError::NotEncrypted
                | ManifestError::OtherKey => RemoteError::Key {
                    url: bucket.url().to_owned(),
                    reason: error.to_string(),
                },
                error => damaged(&crate::printable::chain(&error)),
            })?;
        if packs.len() == manifest.packs.len() {
            Ok(Self { packs, manifest })
        } else {
            Err(damaged(&"its list of packs does not match its manifest"))
        }
    }
}

/// Returns the names of an image's packs, for which no key is needed.
pub(crate) fn packs_of(bucket: &Bucket, image: &RemoteImage) -> Result<Vec<String>, RemoteError> {
    Ok(read_parts(bucket, &image.object)?.0)
}

/// Returns an image's manifest.
pub(crate) fn read_manifest(
    bucket: &Bucket,
    image: &RemoteImage,
    secrets: Option<&Secrets>,
) -> Result<Manifest, RemoteError> {
    Ok(ImageObject::read(bucket, image, secrets)?.manifest)
}

/// Returns the names of an image's packs, and its manifest as it is stored.
fn read_parts(bucket: &Bucket, object: &str) -> Result<(Vec<String>, Bytes), RemoteError> {
    let damaged = |reason: &dyn std::fmt::Display| bucket.damaged(object, reason);
    let content = bucket
        .get(object)?
        .ok_or_else(|| damaged(&"it is missing"))?;
    let end = content.iter().position(|byte| *byte == b'\n');
    let end = end.ok_or_else(|| damaged(&"it has no list"))?;
    let packs: Vec<String> =
        serde_json::from_slice(&content[..end]).map_err(|error| damaged(&error))?;
    if packs.iter().all(|name| is_pack(name)) {
        Ok((packs, content.slice(end + 1..)))
    } else {
        Err(damaged(&"its list has other names than those of packs"))
    }
}

/// Returns the name of a pack whose list of chunks has this hash.
pub(super) fn pack_name(series: u64, chunks: blake3::Hash) -> String {
    format!("{PACKS}/{series:06}-{}", digits(chunks, 32))
}

/// Returns the series of an image's object or of a pack; `None` if it is neither.
pub(super) fn series_of(object: &str) -> Option<u64> {
    let (folder, name) = object.split_once('/')?;
    let mut parts = name.rsplit('-').skip(1);
    let series = parts.next()?;
    (folder == IMAGES || folder == PACKS).then(|| series.parse().ok())?
}

/// Returns true for a name that [`pack_name`] makes: the list is not trusted.
fn is_pack(name: &str) -> bool {
    let digits = name.rsplit_once('-').map_or("", |(_, digits)| digits);
    name.starts_with(PACKS)
        && series_of(name).is_some()
        && digits.len() == 32
        && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        && name.matches('/').count() == 1
}

fn digits(hash: blake3::Hash, count: usize) -> String {
    hash.to_hex()[..count].to_owned()
}
