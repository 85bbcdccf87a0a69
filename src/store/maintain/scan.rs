//! A scan that reads every chunk of many images once, in the order of their positions on the disk.
//!
//! ```text
//! add images ─▶ table of distinct places ─▶ threads take batches, fetch, forget ─▶ faults
//! ```
//! A place is read once, however many images refer to it. The table takes [`PLACE_BYTES`] per distinct chunk, and one
//! manifest at a time is in memory besides. The pages that were read leave the page cache again: verifying a store must
//! not displace the job's cached data. Damaged packs are read as far as possible, to determine which of their chunks
//! are whole.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Mutex;

use super::verify_report::{BadRun, BadStream, ChunkFault};
use crate::store::error::ReadError;
use crate::store::format::chunk::Hash;
use crate::store::format::manifest::{Chunk, Content, Manifest, Stored};
use crate::store::format::pack::{HEADER_LEN, Pack, PackError, PackFiles, PackName, has_header};
use crate::store::format::store_folder::Store;
use crate::store::fs::ops;
use crate::store::read::chunk_fetcher::{ChunkFetcher, Fault};
use crate::sync::locked;

/// Maximum number of threads: more would only wait for the disk.
const WORKERS_MAX: usize = 16;

/// Bytes that a thread takes at a time: a few milliseconds of a fast disk, so that threads read adjacent ranges and
/// seldom meet at the queue.
const BATCH_BYTES: u64 = 4 << 20;

/// Maximum memory for a distinct chunk: 100 GiB in chunks of 64 KiB take 130 MB.
const PLACE_BYTES: usize = 80;
const _: () = assert!(size_of::<Place>() <= PLACE_BYTES);

/// A chunk in the place that a manifest names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) raw_len: u32,
    /// Location and name of the chunk; `pack` is the position in the scan's table.
    pub(crate) stored: Stored,
}

/// State of a pack's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackState {
    Readable(Probe),
    Lost,
    /// The file cannot be read for lack of permission, memory or descriptors.
    OutOfReach,
}

/// The chunks of some images, and the bad ones among them.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    numbers: HashMap<PackName, u32>,
    packs: Vec<(PackName, PackState)>,
    /// The distinct places, sorted by [`Place::key`].
    places: Vec<Place>,
    /// The bad places as positions in `places`, ascending.
    faults: Vec<(usize, ChunkFault)>,
}

impl Place {
    /// Returns a key that orders places by their position on the disk. If two manifests disagree about a place, it is
    /// read for each of them.
    fn key(&self) -> (u32, u64, u32, u32, Hash) {
        let stored = &self.stored;
        (
            stored.pack,
            stored.offset,
            stored.len,
            self.raw_len,
            stored.hash,
        )
    }
}

impl Scan {
    /// Adds the chunks of an image.
    pub(crate) fn add(&mut self, store: &Store, manifest: &Manifest) {
        let packs = manifest.packs.iter();
        let numbers: Vec<u32> = packs.map(|pack| self.admit(store, pack.name)).collect();
        let chunks = manifest.chunks.iter();
        let mut fresh: Vec<Place> = chunks
            .filter_map(|chunk| place(chunk, &numbers))
            .filter(|place| self.position(place).is_none())
            .collect();
        if !fresh.is_empty() {
            self.places.append(&mut fresh);
            self.places.sort_unstable_by_key(Place::key);
            self.places.dedup();
        }
    }

    fn admit(&mut self, store: &Store, name: PackName) -> u32 {
        *self.numbers.entry(name).or_insert_with(|| {
            let state = match probe(store, name) {
                Ok(probe) => PackState::Readable(probe),
                Err(error) if error.is_damage() => PackState::Lost,
                Err(_) => PackState::OutOfReach,
            };
            self.packs.push((name, state));
            // A summary has at most 300 thousand packs, and no store has enough images to exceed `u32`.
            u32::try_from(self.packs.len() - 1).unwrap_or(u32::MAX)
        })
    }

    fn position(&self, place: &Place) -> Option<usize> {
        let key = place.key();
        let found = self.places.binary_search_by_key(&key, Place::key).ok()?;
        (self.places[found] == *place).then_some(found)
    }

    /// Returns the uncompressed bytes of all places.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = self.places.iter().map(|place| u64::from(place.raw_len));
        bytes.sum()
    }

    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    pub(crate) fn packs(&self) -> &[(PackName, PackState)] {
        &self.packs
    }

    /// Returns the position of a pack in the table.
    pub(crate) fn number(&self, name: PackName) -> Option<u32> {
        self.numbers.get(&name).copied()
    }

    /// Returns true if no pack was skipped because it cannot be read at present.
    pub(crate) fn reached_all(&self) -> bool {
        let mut packs = self.packs.iter();
        packs.all(|(_, state)| *state != PackState::OutOfReach)
    }

    /// Returns the files of all packs, regardless of their state.
    pub(crate) fn files(&self, store: &Store) -> PackFiles {
        let named = |(name, _): &(PackName, PackState)| Pack {
            name: *name,
            len: 0, // not used
        };
        PackFiles::unchecked(store, self.packs.iter().map(named).collect())
    }

    /// Returns the packs whose header is not their own, each with the offset of its first good place.
    pub(crate) fn misnamed(&self) -> BTreeMap<PackName, u64> {
        let mut found = BTreeMap::new();
        for place in self.good() {
            let (name, state) = self.packs[place.stored.pack as usize];
            match state {
                PackState::Readable(probe) if !probe.header_fits => {
                    found.entry(name).or_insert(place.stored.offset);
                }
                PackState::Readable(_) | PackState::Lost | PackState::OutOfReach => {}
            }
        }
        found
    }

    pub(crate) fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Returns the bad places.
    pub(crate) fn faults(&self) -> impl Iterator<Item = (&Place, ChunkFault)> {
        let faults = self.faults.iter();
        faults.map(|(position, fault)| (&self.places[*position], *fault))
    }

    /// Returns the good places.
    pub(crate) fn good(&self) -> impl Iterator<Item = &Place> {
        let mut faults = self.faults.iter().map(|(position, _)| *position).peekable();
        let places = self.places.iter().enumerate();
        let good = places.filter(move |(position, _)| faults.next_if_eq(position).is_none());
        good.map(|(_, place)| place)
    }

    /// Returns the fault of each chunk of an added image, by its position in the image's table.
    pub(crate) fn bad_chunks(&self, manifest: &Manifest) -> Vec<Option<ChunkFault>> {
        // A pack that the image did not have when it was added has no number here.
        let packs = manifest.packs.iter().map(|pack| self.number(pack.name));
        let numbers: Vec<u32> = packs.map(|number| number.unwrap_or(u32::MAX)).collect();
        let fault = |chunk: &Chunk| {
            let position = self.position(&place(chunk, &numbers)?)?;
            let faults = &self.faults;
            let found = faults.binary_search_by_key(&position, |(position, _)| *position);
            found.ok().map(|found| faults[found].1)
        };
        manifest.chunks.iter().map(fault).collect()
    }

    /// Returns the streams of an added image that have missing bytes.
    pub(crate) fn bad_streams(&self, manifest: &Manifest) -> Vec<BadStream> {
        let packs = manifest.packs.iter().map(|pack| pack.name.to_string());
        let packs: Vec<String> = packs.collect();
        bad_streams(manifest, &self.bad_chunks(manifest), &packs)
    }

    /// Reads and checks every place. `progress` receives the bytes done and in total, from any thread, one call at a
    /// time. Fails only if nothing can be determined about the store, for lack of memory or descriptors.
    pub(crate) fn run(
        &mut self,
        store: &Store,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), ReadError> {
        let pass = Pass {
            scan: self,
            files: self.files(store),
            progress,
            total: self.bytes(),
            next: Mutex::new(0),
            done: Mutex::default(),
        };
        let mut done = pass.run()?;
        done.faults.sort_unstable_by_key(|(position, _)| *position);
        self.faults = done.faults;
        Ok(())
    }
}

fn place(chunk: &Chunk, numbers: &[u32]) -> Option<Place> {
    match chunk.content {
        Content::Zero => None,
        Content::Stored(stored) => Some(Place {
            raw_len: chunk.raw_len,
            stored: Stored {
                pack: numbers[stored.pack as usize],
                ..stored
            },
        }),
    }
}

/// Returns the streams of an image that have missing bytes, given the fault of each chunk of its table and the names of
/// its packs.
pub(crate) fn bad_streams(
    manifest: &Manifest,
    bad: &[Option<ChunkFault>],
    packs: &[String],
) -> Vec<BadStream> {
    let streams = manifest.streams.iter().map(|stream| BadStream {
        name: stream.name.clone(),
        runs: runs(manifest, &stream.chunks, bad, packs),
    });
    streams.filter(|stream| !stream.runs.is_empty()).collect()
}

fn runs(
    manifest: &Manifest,
    chunks: &[u32],
    bad: &[Option<ChunkFault>],
    packs: &[String],
) -> Vec<BadRun> {
    let mut runs: Vec<BadRun> = Vec::new();
    let mut offset = 0;
    for (position, index) in chunks.iter().enumerate() {
        let chunk = &manifest.chunks[*index as usize];
        let end = offset + u64::from(chunk.raw_len);
        if let (Some(fault), Content::Stored(stored)) = (bad[*index as usize], chunk.content) {
            let run = BadRun {
                chunks: position..position + 1,
                bytes: offset..end,
                pack: packs[stored.pack as usize].clone(),
                fault,
            };
            match runs.last_mut().filter(|last| continues(last, &run)) {
                Some(last) => (last.chunks.end, last.bytes.end) = (run.chunks.end, run.bytes.end),
                None => runs.push(run),
            }
        }
        offset = end;
    }
    runs
}

fn continues(last: &BadRun, next: &BadRun) -> bool {
    last.chunks.end == next.chunks.start && last.pack == next.pack && last.fault == next.fault
}

/// A pass over all places.
struct Pass<'a> {
    scan: &'a Scan,
    files: PackFiles,
    progress: &'a (dyn Fn(u64, u64) + Sync),
    total: u64,
    /// The first place that no thread has taken.
    next: Mutex<usize>,
    done: Mutex<Done>,
}

#[derive(Default)]
struct Done {
    bytes: u64,
    faults: Vec<(usize, ChunkFault)>,
    failure: Option<ReadError>,
}

impl Pass<'_> {
    fn run(self) -> Result<Done, ReadError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let stored = self.scan.places.iter().map(|place| place.stored.len);
        let batches = stored.map(u64::from).sum::<u64>().div_ceil(BATCH_BYTES);
        let batches = usize::try_from(batches).unwrap_or(usize::MAX);
        std::thread::scope(|scope| {
            for _ in 1..cores.min(WORKERS_MAX).min(batches) {
                // With one thread less the scan is only slower.
                let _ = std::thread::Builder::new().spawn_scoped(scope, || self.work());
            }
            self.work();
        });
        let mut done = std::mem::take(&mut *locked(&self.done));
        match done.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(done),
        }
    }

    fn work(&self) {
        let mut fetcher = match ChunkFetcher::new(&self.files) {
            Ok(fetcher) => fetcher,
            Err(error) => return self.fail(ReadError::Worker(error)),
        };
        let mut raw = Vec::new();
        while let Some(batch) = self.take() {
            for position in batch.clone() {
                let place = &self.scan.places[position];
                match self.check(&mut fetcher, place, &mut raw) {
                    Ok(fault) => self.count(position, place, fault),
                    Err(failure) => return self.fail(failure),
                }
            }
            self.forget(&batch);
        }
    }

    /// Takes the next places of one pack, [`BATCH_BYTES`] of them.
    fn take(&self) -> Option<Range<usize>> {
        let mut next = locked(&self.next);
        let places = &self.scan.places;
        let first = places.get(*next)?;
        let end = first.stored.offset.saturating_add(BATCH_BYTES);
        let ours =
            |place: &&Place| place.stored.pack == first.stored.pack && place.stored.offset < end;
        let count = places[*next..].iter().take_while(ours).count();
        let batch = *next..*next + count;
        *next = batch.end;
        Some(batch)
    }

    fn check(
        &self,
        fetcher: &mut ChunkFetcher<'_>,
        place: &Place,
        raw: &mut Vec<u8>,
    ) -> Result<Option<ChunkFault>, ReadError> {
        let (name, state) = self.scan.packs[place.stored.pack as usize];
        match state {
            PackState::Readable(_) => {}
            PackState::Lost => return Ok(Some(ChunkFault::Lost)),
            PackState::OutOfReach => return Ok(Some(ChunkFault::OutOfReach)),
        }
        raw.resize(place.raw_len as usize, 0);
        match fetcher.fetch(&place.stored, raw) {
            Ok(()) => Ok(None),
            Err(Fault::Hash) => Ok(Some(ChunkFault::Content)),
            Err(Fault::Check | Fault::Open(_)) => Ok(Some(ChunkFault::Check)),
            Err(Fault::Decompress(_)) => Ok(Some(ChunkFault::Form)),
            Err(Fault::Pack(error)) if error.is_damage() => Ok(Some(ChunkFault::Lost)),
            Err(Fault::Pack(source)) => Err(ReadError::Pack {
                image: name.image,
                source,
            }),
        }
    }

    fn count(&self, position: usize, place: &Place, fault: Option<ChunkFault>) {
        let mut done = locked(&self.done);
        done.bytes += u64::from(place.raw_len);
        done.faults.extend(fault.map(|fault| (position, fault)));
        (self.progress)(done.bytes, self.total);
    }

    /// Drops the batch from the page cache, and the batch before it: the kernel keeps a page or a larger folio of the
    /// cache that extends beyond the end of the dropped range.
    fn forget(&self, batch: &Range<usize>) {
        let (first, last) = (
            &self.scan.places[batch.start],
            &self.scan.places[batch.end - 1],
        );
        let start = first.stored.offset.saturating_sub(BATCH_BYTES);
        let end = last.stored.offset + u64::from(last.stored.len);
        self.files.forget(first.stored.pack, start, end - start);
    }

    /// Stores the first failure and prevents all threads from beginning another batch.
    fn fail(&self, failure: ReadError) {
        *locked(&self.next) = self.scan.places.len();
        locked(&self.done).failure.get_or_insert(failure);
    }
}

/// Properties of a pack's file in its present state, regardless of what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) len: u64,
    pub(crate) header_fits: bool,
}

/// Inspects the pack with this name.
pub(crate) fn probe(store: &Store, name: PackName) -> Result<Probe, PackError> {
    let path = store.pack_file(name);
    let read = File::open(&path).and_then(|file| {
        let len = file.metadata()?.len();
        let header_fits = match has_header(&file, name) {
            // A damaged file may be shorter than its header.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            read => read?,
        };
        Ok(Probe { len, header_fits })
    });
    read.map_err(|source| PackError::Read { path, source })
}

/// Rewrites the header of a pack durably, after the chunks in it have proved which pack it is. `first` is the offset of
/// the first needed chunk. An interrupted call leaves a header that does not fit, as before.
pub(crate) fn rewrite_header(store: &Store, name: PackName, first: u64) -> io::Result<()> {
    let file = ops::open(&store.pack_file(name))?;
    if first < HEADER_LEN as u64 {
        ops::write_at(&file, &name.common(1), 0)?;
    } else {
        ops::write_at(&file, &name.header(), 0)?;
    }
    ops::sync(&file)
}
