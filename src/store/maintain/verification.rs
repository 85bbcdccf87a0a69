//! Verification of images: each of their chunks is read, decompressed and hashed again, and every fault is reported.
//!
//! Needs no lock and changes nothing. `scan` reads the chunks, `verify_report` describes the result.

use std::collections::HashSet;

use super::scan::Scan;
use super::verify_report::{ImageReport, Report};
use crate::store::error::ReadError;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::Manifest;
use crate::store::format::pack;
use crate::store::format::store_folder::Store;

/// Totals of a verification that found no fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Distinct chunks that are not zero.
    pub chunks: u64,
    /// Uncompressed bytes of these chunks.
    pub chunk_bytes: u64,
    /// Bytes of all streams.
    pub raw_bytes: u64,
}

/// Selection of images to verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection<'a> {
    /// Every image of the store.
    All,
    /// These images; an image named twice is checked once.
    These(&'a [ImageId]),
}

impl Store {
    /// Reads and hashes every chunk of an image again, on all cores. `progress` receives the bytes done and in total,
    /// from any thread, one call at a time.
    ///
    /// # Errors
    /// The image is damaged; the error names the first fault. [`Store::verify_all`] reports all of them.
    pub fn verify(
        &self,
        id: ImageId,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Verified, ReadError> {
        let report = self.verify_all(Selection::These(&[id]), progress)?;
        let mut raw_bytes = 0;
        for image in report.images {
            raw_bytes += image.raw_bytes;
            if let Some(error) = image.into_error() {
                return Err(error);
            }
        }
        if !report.gone.is_empty() {
            return Err(ReadError::Missing { image: id });
        }
        Ok(Verified {
            chunks: report.chunks,
            chunk_bytes: report.chunk_bytes,
            raw_bytes,
        })
    }

    /// Reads and hashes every chunk of the images again, on all cores, and a shared chunk once. Takes 80 bytes of
    /// memory per distinct chunk. `progress` receives the bytes done and in total, from any thread, one call at a time.
    ///
    /// The report does not name faults of chunks that no stream uses.
    ///
    /// # Errors
    /// A named image does not exist, the store cannot be listed, or memory or descriptors run out. Damage is not an
    /// error: the report contains all of it.
    pub fn verify_all(
        &self,
        images: Selection<'_>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Report, ReadError> {
        Ok(self.survey(images, progress)?.0)
    }

    /// Verifies like [`Store::verify_all`] and also returns the result for each chunk.
    pub(crate) fn survey(
        &self,
        images: Selection<'_>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(Report, Scan), ReadError> {
        let mut scan = Scan::default();
        let mut report = Report::default();
        for id in self.selected(images)? {
            match self.manifest(id) {
                Err(ReadError::Missing { .. }) if images == Selection::All => report.gone.push(id),
                Err(ReadError::Manifest { source, .. }) => report.images.push(ImageReport {
                    manifest: Some(source),
                    ..self.blank(id)
                }),
                Err(error) => return Err(error),
                Ok(manifest) => {
                    scan.add(self, &manifest);
                    report.images.push(self.first_check(&manifest));
                }
            }
        }
        scan.run(self, progress)?;
        report.chunks = scan.places().len() as u64;
        report.chunk_bytes = scan.bytes();
        self.name_streams(&mut report, &scan)?;
        Ok((report, scan))
    }

    fn selected(&self, images: Selection<'_>) -> Result<Vec<ImageId>, ReadError> {
        match images {
            Selection::All => self.ids(),
            Selection::These(ids) => {
                let mut seen = HashSet::new();
                Ok(ids.iter().copied().filter(|id| seen.insert(*id)).collect())
            }
        }
    }

    fn blank(&self, id: ImageId) -> ImageReport {
        ImageReport {
            id,
            raw_bytes: 0,
            set_aside: self.damage_mark(id),
            manifest: None,
            packs: Vec::new(),
            streams: Vec::new(),
        }
    }

    fn first_check(&self, manifest: &Manifest) -> ImageReport {
        let packs = manifest.packs.iter();
        ImageReport {
            raw_bytes: manifest.raw_bytes,
            packs: packs
                .filter_map(|pack| pack::inspect(self, *pack))
                .collect(),
            ..self.blank(manifest.id)
        }
    }

    /// Finds the streams that the bad chunks belong to. An image that no longer exists was not damaged but removed, and
    /// its packs with it.
    fn name_streams(&self, report: &mut Report, scan: &Scan) -> Result<(), ReadError> {
        let images = std::mem::take(&mut report.images);
        for mut image in images {
            let suspect = scan.has_faults() || !image.packs.is_empty();
            if suspect && image.manifest.is_none() {
                match self.manifest(image.id) {
                    // The manifest is read again: a repair may have rewritten it meanwhile.
                    Ok(manifest) => {
                        image = ImageReport {
                            streams: scan.bad_streams(&manifest),
                            ..self.first_check(&manifest)
                        };
                    }
                    Err(ReadError::Missing { .. }) => {
                        report.gone.push(image.id);
                        continue;
                    }
                    Err(ReadError::Manifest { source, .. }) => image.manifest = Some(source),
                    Err(error) => return Err(error),
                }
            }
            report.images.push(image);
        }
        Ok(())
    }
}
