//! Checking a whole image: each of its chunks is read, decompressed and hashed again.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::error::ReadError;
use super::fetch::Fetcher;
use super::id::ImageId;
use super::layout::Store;
use super::manifest::{Content, Manifest, Stored};
use super::reader::ImageReader;
use super::sync::locked;

/// More threads than these wait for the disk.
const WORKERS_MAX: usize = 16;

/// What was checked, all of it good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Distinct chunks that are not zero.
    pub chunks: u64,
    /// Their uncompressed bytes.
    pub chunk_bytes: u64,
    /// The bytes of all streams.
    pub raw_bytes: u64,
}

struct Check<'a> {
    reader: &'a ImageReader,
    progress: &'a (dyn Fn(u64, u64) + Sync),
    /// Stored chunks with their positions in the table, in the order they lie on disk.
    jobs: Vec<(u32, u32, Stored)>,
    total: u64,
    next: AtomicUsize,
    done: Mutex<Done>,
}

struct Done {
    bytes: u64,
    fault: Option<ReadError>,
}

impl Store {
    /// Reads and hashes every chunk of an image again, on all cores. `progress` gets the
    /// bytes done and in total, from any thread, one call at a time.
    ///
    /// # Errors
    /// The image is damaged; the error names the first place that was found.
    pub fn verify(
        &self,
        id: ImageId,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Verified, ReadError> {
        let reader = self.read(id)?;
        let jobs = jobs(reader.manifest());
        let total = jobs.iter().map(|(_, raw_len, _)| u64::from(*raw_len)).sum();
        let check = Check {
            reader: &reader,
            progress,
            total,
            next: AtomicUsize::new(0),
            done: Mutex::new(Done {
                bytes: 0,
                fault: None,
            }),
            jobs,
        };
        check.run()?;
        Ok(Verified {
            chunks: check.jobs.len() as u64,
            chunk_bytes: total,
            raw_bytes: reader.manifest().raw_bytes,
        })
    }
}

impl Check<'_> {
    fn run(&self) -> Result<(), ReadError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 1..cores.min(WORKERS_MAX).min(self.jobs.len()) {
                // One thread less is only slower.
                let _ = std::thread::Builder::new().spawn_scoped(scope, || self.work());
            }
            self.work();
        });
        match locked(&self.done).fault.take() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    fn work(&self) {
        let mut fetcher = match Fetcher::new(self.reader.packs()) {
            Ok(fetcher) => fetcher,
            Err(error) => return self.fail(ReadError::Worker(error)),
        };
        let mut raw = Vec::new();
        while let Some((chunk, raw_len, stored)) =
            self.jobs.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            raw.resize(*raw_len as usize, 0);
            if let Err(fault) = fetcher.fetch(stored, &mut raw) {
                let Some((stream, position)) = self.reader.manifest().first_use(*chunk) else {
                    continue;
                };
                return self.fail(self.reader.damage(stream, position, fault));
            }
            let mut done = locked(&self.done);
            done.bytes += u64::from(*raw_len);
            (self.progress)(done.bytes, self.total);
        }
    }

    /// Keeps the first fault and lets nobody begin another chunk.
    fn fail(&self, fault: ReadError) {
        self.next.store(self.jobs.len(), Ordering::Relaxed);
        locked(&self.done).fault.get_or_insert(fault);
    }
}

fn jobs(manifest: &Manifest) -> Vec<(u32, u32, Stored)> {
    let stored = (0..)
        .zip(&manifest.chunks)
        .filter_map(|(position, chunk)| match chunk.content {
            Content::Zero => None,
            Content::Stored(stored) => Some((position, chunk.raw_len, stored)),
        });
    let mut jobs: Vec<(u32, u32, Stored)> = stored.collect();
    jobs.sort_unstable_by_key(|(_, _, stored)| (stored.pack, stored.offset));
    jobs
}
