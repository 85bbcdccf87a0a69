//! Header of a manifest's file: identity, lengths of the parts, encryption flag.
//!
//! Impossible values are refused before anything is read or allocated. The content of the parts is not interpreted
//! here.

use super::{META_BYTES_MAX, ManifestError, SUM_LEN};
use crate::store::format::FORMAT;
use crate::store::format::cipher::{Cipher, Secrets};
use crate::store::format::image_id::ImageId;

const MAGIC: [u8; 8] = *b"CKPTMANI";
/// Length of the header without checksums.
pub(super) const CHECKED_LEN: usize = 48;
/// Maximum length of a summary: the caller's data and a table of 300 thousand packs, which is 300 TiB.
const SUMMARY_BYTES_MAX: usize = META_BYTES_MAX + (8 << 20);
/// Maximum length of a body: 55 bytes per chunk for 19 million chunks, an image of more than a TiB.
const BODY_BYTES_MAX: u64 = 1 << 30;
/// Length of the longest file.
pub(crate) const FILE_BYTES_MAX: u64 =
    (CHECKED_LEN + 2 * SUM_LEN + SUMMARY_BYTES_MAX) as u64 + BODY_BYTES_MAX;
pub(super) const NOT_SEALED: u32 = 0;
pub(super) const SEALED: u32 = 1;
/// Last format with a single checksum.
pub(super) const FORMAT_OF_ONE_SUM: u32 = 1;

/// Header without checksums.
pub(super) struct Header {
    pub(super) format: u32,
    pub(super) needs: u32,
    pub(super) image: u64,
    pub(super) summary_len: u32,
    pub(super) sealing: u32,
    pub(super) body_len: u64,
    pub(super) raw_body_len: u64,
}

impl Header {
    pub(super) fn to_bytes(&self) -> [u8; CHECKED_LEN] {
        let mut bytes = [0; CHECKED_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.format.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.needs.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.image.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.summary_len.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.sealing.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.raw_body_len.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; CHECKED_LEN], id: ImageId) -> Result<Self, ManifestError> {
        if bytes[..8] != MAGIC {
            return Err(ManifestError::Damaged("it has no manifest header"));
        }
        let header = Self {
            format: u32_at(bytes, 8),
            needs: u32_at(bytes, 12),
            image: u64_at(bytes, 16),
            summary_len: u32_at(bytes, 24),
            sealing: u32_at(bytes, 28),
            body_len: u64_at(bytes, 32),
            raw_body_len: u64_at(bytes, 40),
        };
        if header.needs > FORMAT {
            let format = header.needs;
            return Err(ManifestError::Newer { format });
        }
        if header.image != id.number() {
            return Err(ManifestError::Damaged("it belongs to another image"));
        }
        if header.is_too_large() {
            return Err(ManifestError::Damaged("its lengths are impossible"));
        }
        Ok(header)
    }

    /// Returns the cipher of the parts; `None` if they are not sealed.
    pub(super) fn cipher<'a>(
        &self,
        secrets: Option<&'a Secrets>,
    ) -> Result<Option<&'a Cipher>, ManifestError> {
        match (self.sealing, secrets) {
            // Format 1 had no encryption. Without this check, the flag could be forged without the key.
            (SEALED, _) if self.format == FORMAT_OF_ONE_SUM => {
                Err(ManifestError::Damaged("its encryption flag is unknown"))
            }
            (NOT_SEALED, None) => Ok(None),
            (SEALED, Some(secrets)) => Ok(Some(&secrets.manifests)),
            (NOT_SEALED, Some(_)) => Err(ManifestError::NotEncrypted),
            (SEALED, None) => Err(ManifestError::Encrypted),
            (_, _) => Err(ManifestError::Damaged("its encryption flag is unknown")),
        }
    }

    /// Returns the length of the whole file.
    pub(super) fn file_len(&self) -> u64 {
        let sums = match self.format {
            FORMAT_OF_ONE_SUM => SUM_LEN,
            _ => 2 * SUM_LEN,
        };
        (CHECKED_LEN + sums) as u64 + u64::from(self.summary_len) + self.body_len
    }

    pub(super) fn is_too_large(&self) -> bool {
        self.summary_len as usize > SUMMARY_BYTES_MAX
            || self.body_len > BODY_BYTES_MAX
            || self.raw_body_len > BODY_BYTES_MAX
    }
}

pub(super) fn u32_at(bytes: &[u8; CHECKED_LEN], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

pub(super) fn u64_at(bytes: &[u8; CHECKED_LEN], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}
