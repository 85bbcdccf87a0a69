//! The object that makes an image whole: the names of its packs, and its manifest.
//!
//! ```text
//! images/000012-<16 digits>   a JSON list of the packs' names, a line feed, the manifest as in a store
//! packs/000003-<32 digits>    64 bytes that are not used, then chunks, as in a store's pack
//! ```
//! The digits are those of the content's BLAKE3, so equal content is stored once and an interrupted upload continues.
//! A pack's name begins with the tenure of its upload. A supervisor relies on the packs of images in the run's state and
//! on those of its own tenure. So a request to remove a pack, sent by a supervisor that has lost the lease since, never
//! hits a pack that is needed: it removes packs of no image, and none of a later tenure.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::bucket::Bucket;
use super::remote_error::RemoteError;
use crate::store::format::cipher::Secrets;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::Manifest;
use crate::store::format::manifest_file::{self, ManifestError};
use crate::store::format::pack::HEADER_LEN;

/// Folder of the images.
pub(super) const IMAGES: &str = "images";
/// Folder of the packs.
pub(super) const PACKS: &str = "packs";

/// Complete image in the remote store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteImage {
    /// Name of the object with its manifest.
    pub object: String,
    /// Number of the image in the store that it was uploaded from.
    pub number: u64,
    /// Start of the image, in milliseconds since 1970 UTC.
    pub created_unix_ms: u64,
    /// Total length of its streams.
    pub raw_bytes: u64,
}

/// Image in object storage.
#[derive(Clone, Debug)]
pub(super) struct ImageObject {
    /// The names of the packs, in the order of the manifest's.
    pub packs: Vec<String>,
    pub manifest: Manifest,
}

impl ImageObject {
    pub(super) fn encode(&self, secrets: Option<&Secrets>) -> Result<(String, Bytes), String> {
        let mut content = serde_json::to_vec(&self.packs).map_err(|error| error.to_string())?;
        content.push(b'\n');
        let manifest = manifest_file::encode(&self.manifest, secrets);
        content.extend(manifest.map_err(|error| error.to_string())?);
        let name = format!("{IMAGES}/{}-{}", self.manifest.id, digits(&content, 16));
        Ok((name, Bytes::from(content)))
    }

    pub(super) fn read(
        bucket: &Bucket,
        object: &str,
        number: u64,
        secrets: Option<&Secrets>,
    ) -> Result<Self, RemoteError> {
        let damaged = |reason: &dyn std::fmt::Display| bucket.damaged(object, reason);
        let content = bucket
            .get(object)?
            .ok_or_else(|| damaged(&"it is missing"))?;
        let end = content.iter().position(|byte| *byte == b'\n');
        let (list, manifest) = content.split_at(end.ok_or_else(|| damaged(&"it has no list"))?);
        let packs: Vec<String> = serde_json::from_slice(list).map_err(|error| damaged(&error))?;
        let id = ImageId::new(number).ok_or_else(|| damaged(&"it has no valid number"))?;
        let manifest =
            manifest_file::decode(&manifest[1..], id, secrets).map_err(|error| match error {
                ManifestError::Encrypted
                | ManifestError::NotEncrypted
                | ManifestError::OtherKey => RemoteError::Key {
                    url: bucket.url().to_owned(),
                    reason: error.to_string(),
                },
                error => damaged(&crate::printable::chain(&error)),
            })?;
        let is_whole =
            packs.len() == manifest.packs.len() && packs.iter().all(|name| is_pack(name));
        if is_whole {
            Ok(Self { packs, manifest })
        } else {
            Err(damaged(&"its list of packs does not match its manifest"))
        }
    }
}

/// Returns the name of a pack with this content.
pub(super) fn pack_name(tenure: u64, content: &[u8]) -> String {
    format!("{PACKS}/{tenure:06}-{}", digits(content, 32))
}

/// Returns the tenure in which a pack was uploaded.
pub(super) fn tenure_of(pack: &str) -> Option<u64> {
    let (tenure, _) = pack
        .strip_prefix(PACKS)?
        .strip_prefix('/')?
        .split_once('-')?;
    tenure.parse().ok()
}

/// Returns the beginning of every pack: the places of chunks are those of a pack in a store.
pub(super) fn pack_beginning() -> Vec<u8> {
    vec![0; HEADER_LEN]
}

/// Returns true for a name that [`pack_name`] makes: the list is not trusted.
fn is_pack(name: &str) -> bool {
    let digits = name.rsplit_once('-').map_or("", |(_, digits)| digits);
    tenure_of(name).is_some()
        && digits.len() == 32
        && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        && name.matches('/').count() == 1
}

fn digits(content: &[u8], count: usize) -> String {
    blake3::hash(content).to_hex()[..count].to_owned()
}
