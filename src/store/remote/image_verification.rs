//! Verification of images in a remote store: each chunk is read in its place and checked, and every fault is reported.
//!
//! ```text
//! image by image: manifest ─▶ chunks that were not read yet, by place ─▶ parts of 4 MiB, 8 at a time ─▶ faults
//! ```
//! Needs no lease and changes nothing. Memory: a manifest, a part for each thread, and some 50 bytes for each distinct
//! chunk.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Builder};

use bytes::Bytes;

use super::bucket::Bucket;
use super::chunk_check::ChunkCheck;
use super::download::REQUESTS;
use super::image_object::{ImageObject, PACKS, RemoteImage};
use super::remote_error::RemoteError;
use crate::store::format::cipher::Secrets;
use crate::store::format::manifest::{Content, Manifest, Stored};
use crate::store::format::manifest_file::ManifestError;
use crate::store::format::pack::PackError;
use crate::store::maintain::scan::bad_streams;
use crate::store::maintain::verify_report::{ChunkFault, ImageReport, Report};
use crate::store::read::pending_image::{Part, parts};
use crate::sync::locked;

/// Reads and checks every chunk of the images, and a shared chunk once. `progress` receives the bytes of streams that are
/// done and in total, from any thread, one call at a time.
///
/// # Errors
/// A request failed, or the key is not that of the images. Damage is not an error: the report contains all of it.
pub(crate) fn verify(
    bucket: &Bucket,
    images: &[RemoteImage],
    secrets: Option<&Secrets>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Report, RemoteError> {
    let packs = bucket.list(PACKS, None)?.into_iter();
    let mut verification = Verification {
        bucket,
        secrets,
        lengths: packs.map(|pack| (pack.name, pack.bytes)).collect(),
        numbers: HashMap::new(),
        read: HashMap::new(),
        progress,
        done: Mutex::new(0),
        total: images.iter().map(|image| image.raw_bytes).sum(),
    };
    let mut report = Report::default();
    for image in images {
        report.images.push(verification.image(image)?);
    }
    report.chunks = verification.read.len() as u64;
    Ok(report)
}

struct Verification<'a> {
    bucket: &'a Bucket,
    secrets: Option<&'a Secrets>,
    /// Lengths of the packs that exist.
    lengths: HashMap<String, u64>,
    /// Numbers of the packs of all images.
    numbers: HashMap<String, u32>,
    /// Chunks that were read, by pack and offset, with their faults.
    read: HashMap<(u32, u64), Option<ChunkFault>>,
    progress: &'a (dyn Fn(u64, u64) + Sync),
    done: Mutex<u64>,
    total: u64,
}

impl Verification<'_> {
    fn image(&mut self, image: &RemoteImage) -> Result<ImageReport, RemoteError> {
        let mut report = ImageReport {
            id: image.id,
            raw_bytes: image.raw_bytes,
            set_aside: None,
            manifest: None,
            packs: Vec::new(),
            streams: Vec::new(),
        };
        let read = ImageObject::read(self.bucket, image, self.secrets);
        let ImageObject { packs, manifest } = match read {
            Ok(object) => object,
            Err(error @ RemoteError::Damaged { .. }) => {
                let lost = io::Error::new(io::ErrorKind::UnexpectedEof, error.to_string());
                report.manifest = Some(ManifestError::Read(lost));
                return Ok(report);
            }
            Err(error) => return Err(error),
        };
        let problems = packs.iter().zip(&manifest.packs);
        report.packs = problems
            .filter_map(|(name, pack)| self.problem(name, pack.len))
            .collect();
        let numbers: Vec<u32> = packs.iter().map(|name| self.number(name)).collect();
        let place = |stored: &Stored| (numbers[stored.pack as usize], stored.offset);
        let mut fresh = manifest.first_uses();
        fresh.retain(|(_, stored)| !self.read.contains_key(&place(stored)));
        fresh.sort_unstable_by_key(|(_, stored)| (stored.pack, stored.offset));
        let faults = self.read(&packs, &manifest, &parts(fresh.clone()))?;
        let faults: HashMap<u32, ChunkFault> = faults.into_iter().collect();
        for (index, stored) in fresh {
            self.read
                .insert(place(&stored), faults.get(&index).copied());
        }
        let bad = manifest.chunks.iter().map(|chunk| match chunk.content {
            Content::Zero => None,
            Content::Stored(stored) => self.read.get(&place(&stored)).copied().flatten(),
        });
        report.streams = bad_streams(&manifest, &bad.collect::<Vec<_>>(), &packs);
        Ok(report)
    }

    fn number(&mut self, pack: &str) -> u32 {
        if let Some(number) = self.numbers.get(pack) {
            return *number;
        }
        // No remote store has enough packs to exceed `u32`.
        let next = u32::try_from(self.numbers.len()).unwrap_or(u32::MAX);
        self.numbers.insert(pack.to_owned(), next);
        next
    }

    /// Returns the difference between a pack and its entry in the manifest, if there is one.
    fn problem(&self, name: &str, expected: u64) -> Option<PackError> {
        let path = PathBuf::from(format!("{}/{name}", self.bucket.url()));
        match self.lengths.get(name) {
            Some(found) if *found == expected => None,
            Some(found) => Some(PackError::Length {
                path,
                found: *found,
                expected,
            }),
            None => Some(PackError::Read {
                path,
                source: io::ErrorKind::NotFound.into(),
            }),
        }
    }

    /// Reads parts of an image's packs. Returns the bad chunks by their positions in the manifest.
    fn read(
        &self,
        packs: &[String],
        manifest: &Manifest,
        parts: &[Part],
    ) -> Result<Vec<(u32, ChunkFault)>, RemoteError> {
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::new());
        let work = || {
            let checked = ChunkCheck::new(self.secrets).and_then(|mut check| {
                let mut faults = Vec::new();
                while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    faults.extend(self.part(&mut check, packs, manifest, part)?);
                }
                Ok(faults)
            });
            if checked.is_err() {
                next.store(parts.len(), Ordering::Relaxed);
            }
            locked(&results).push(checked);
        };
        thread::scope(|scope| {
            for _ in 1..REQUESTS.min(parts.len()) {
                // With one thread less it is only slower.
                let _ = Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        let results = std::mem::take(&mut *locked(&results));
        let faults: Vec<_> = results.into_iter().collect::<Result<_, _>>()?;
        Ok(faults.concat())
    }

    fn part(
        &self,
        check: &mut ChunkCheck<'_>,
        packs: &[String],
        manifest: &Manifest,
        part: &Part,
    ) -> Result<Vec<(u32, ChunkFault)>, RemoteError> {
        let object = &packs[part.pack as usize];
        // What a shorter pack still has is checked.
        let len = self.lengths.get(object).copied().unwrap_or(0);
        let end = part.end.min(len);
        let bytes = if part.begin < end {
            match self.bucket.get_range(object, part.begin..end) {
                // It was removed since.
                Err(RemoteError::Damaged { .. }) => Bytes::new(),
                read => read?,
            }
        } else {
            Bytes::new()
        };
        let faults = check.faults(manifest, part, &bytes);
        let chunks = part.chunks.iter();
        let raw = chunks.map(|(index, _)| u64::from(manifest.chunks[*index as usize].raw_len));
        let mut done = locked(&self.done);
        *done += raw.sum::<u64>();
        (self.progress)(*done, self.total);
        Ok(faults)
    }
}
