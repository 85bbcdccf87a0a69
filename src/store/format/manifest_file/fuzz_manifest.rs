//! Manual construction of manifest files: the only part of fuzzing that depends on their layout.

use super::manifest_header::{
    CHECKED_LEN, FORMAT_OF_ONE_SUM, Header, NOT_SEALED, SEALED, u32_at, u64_at,
};
use super::{Part, SUM_LEN, checksum};
use crate::store::format::FORMAT;
use crate::store::format::cipher::{OVERHEAD_BYTES, Secrets};
use crate::store::format::image_id::ImageId;

/// Corrects the checksums of a manifest's file, so that the protected content gets decoded.
pub(in crate::store) fn reseal(file: &mut [u8]) {
    let Some((head, rest)) = file.split_first_chunk_mut::<CHECKED_LEN>() else {
        return;
    };
    let format = u32_at(head, 8);
    let summary_len = usize::try_from(u32_at(head, 24)).unwrap();
    let Some((sum, rest)) = rest.split_first_chunk_mut::<SUM_LEN>() else {
        return;
    };
    if format == FORMAT_OF_ONE_SUM {
        *sum = checksum(head, &[rest]);
    } else if let Some((body_sum, content)) = rest.split_first_chunk_mut::<SUM_LEN>()
        && let Some((summary, body)) = content.split_at_checked(summary_len)
    {
        *sum = checksum(head, &[summary]);
        *body_sum = checksum(head, &[body]);
    }
}

/// Builds a manifest's file from two arbitrary messages, for a store with these secrets.
pub(in crate::store) fn seal(
    id: ImageId,
    summary: &[u8],
    raw_body: &[u8],
    secrets: Option<&Secrets>,
) -> Vec<u8> {
    let body = zstd::bulk::compress(raw_body, 1).unwrap();
    let overhead = secrets.map_or(0, |_| OVERHEAD_BYTES);
    let header = Header {
        format: FORMAT,
        needs: FORMAT,
        image: id.number(),
        summary_len: u32::try_from(summary.len() + overhead).unwrap(),
        sealing: secrets.map_or(NOT_SEALED, |_| SEALED),
        body_len: (body.len() + overhead) as u64,
        raw_body_len: raw_body.len() as u64,
    };
    let head = header.to_bytes();
    let part = |part, plain: &[u8]| match secrets {
        Some(secrets) => super::seal(&secrets.manifests, &head, part, plain).unwrap(),
        None => plain.to_vec(),
    };
    let sums = [0; 2 * SUM_LEN];
    let (summary, body) = (part(Part::Summary, summary), part(Part::Body, &body));
    let mut file = [&head[..], &sums, &summary, &body].concat();
    reseal(&mut file);
    file
}

/// Returns the image number in a file's header.
pub(in crate::store) fn image_of(file: &[u8]) -> Option<ImageId> {
    let header = file.first_chunk::<CHECKED_LEN>()?;
    ImageId::new(u64_at(header, 16))
}
