//! Manifest files made by hand: the one place that fuzzing needs to know their layout.

use super::{CHECKED_LEN, HEADER_LEN, Header, checksum, u64_at};
use crate::store::id::ImageId;
use crate::store::layout::FORMAT;

/// Makes the checksum of a manifest's file right, so that what it protects gets decoded.
pub(in crate::store) fn reseal(file: &mut [u8]) {
    if file.len() >= HEADER_LEN {
        let sum = checksum(&file[..CHECKED_LEN], &[&file[HEADER_LEN..]]);
        file[CHECKED_LEN..HEADER_LEN].copy_from_slice(&sum);
    }
}

/// A manifest's file with these two messages, whatever is in them.
pub(in crate::store) fn seal(id: ImageId, summary: &[u8], raw_body: &[u8]) -> Vec<u8> {
    let body = zstd::bulk::compress(raw_body, 1).unwrap_or_default();
    let header = Header {
        format: FORMAT,
        needs: FORMAT,
        image: id.number(),
        summary_len: u32::try_from(summary.len()).unwrap_or(u32::MAX),
        body_len: body.len() as u64,
        raw_body_len: raw_body.len() as u64,
    };
    let mut file = Vec::new();
    header.write_to(&mut file);
    file.resize(HEADER_LEN, 0);
    file.extend_from_slice(summary);
    file.extend_from_slice(&body);
    reseal(&mut file);
    file
}

/// The image that a file says it is of.
pub(in crate::store) fn image_of(file: &[u8]) -> Option<ImageId> {
    let header = file.first_chunk::<HEADER_LEN>()?;
    ImageId::new(u64_at(header, 16))
}
