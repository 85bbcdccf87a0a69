//! Sink for an image's new chunks: all workers share it, and it fills one pack after the other at the speed of the
//! disk.
//!
//! ```text
//! append ─ lock: reserve a place, copy ─▶ staging buffer ─ full ─▶ written by the worker
//!                                               ▲                  that filled it, no lock
//!                                               └──────────────────────────┘
//! ```
//! Several writes are in progress at a time, and all packs but the last are full. A pack is completed (truncated to its
//! length and synced) after its last buffer is written, and the sync has little left to do. This module is independent
//! of the content of chunks.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::pack_writer::{PackWriter, STAGING_BYTES, Staging};
use crate::store::error::WriteError;
use crate::store::format::image_id::ImageId;
use crate::store::format::pack::{HEADER_LEN, Pack, PackName};
use crate::store::format::store_folder::Store;
use crate::sync::{locked, wait};

/// Maximum number of staging buffers: one is filled while the others are written. Together they are all the memory of a
/// sink, 16 MiB.
const STAGING_BUFFERS_MAX: usize = 4;

/// Sink of all new chunks of an image. Dropping it leaves files that no manifest names.
#[derive(Debug)]
pub(crate) struct PackSink {
    store: Store,
    image: ImageId,
    state: Mutex<State>,
    /// Signals that a buffer was returned, a pack was completed, or an error occurred.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of packs begun so far.
    begun: u32,
    current: Option<Job>,
    idle: Vec<Staging>,
    /// Number of existing staging buffers.
    made: usize,
    /// Number of unfinished jobs.
    writing: usize,
    sealed: Vec<Pack>,
    failed: Option<Arc<WriteError>>,
}

/// Pack with a buffer that is being filled or written.
#[derive(Debug)]
struct Job {
    pack: Arc<PackWriter>,
    staging: Staging,
}

impl PackSink {
    /// Creates a sink for the packs of an image. The first pack is created with the first chunk.
    pub(crate) fn new(store: &Store, image: ImageId) -> Self {
        Self {
            store: store.clone(),
            image,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Appends the stored form of a chunk and returns its position. The chunk and a header must fit a staging buffer.
    /// Waits while all buffers are being written.
    ///
    /// # Errors
    /// The first error of any worker, returned again by all later calls.
    pub(crate) fn append(&self, stored: &[u8]) -> Result<(PackName, u64), WriteError> {
        assert!(
            HEADER_LEN + stored.len() < STAGING_BYTES,
            "a chunk of {} bytes",
            stored.len()
        );
        let mut state = self.with_room(stored.len())?;
        let ended = self.turn_over(&mut state, stored.len())?;
        let (place, full) = state.fill(stored);
        drop(state);
        // Never both: the first buffer of a new pack has room for the chunk.
        if let Some(job) = ended.or(full) {
            self.write(job)?;
        }
        Ok(place)
    }

    /// Makes all packs durable except for their names, and returns them. No other thread may append meanwhile.
    ///
    /// # Errors
    /// The same as [`append`](Self::append). A failed sync is not repeated: the unwritten data are lost, and the kernel
    /// reports the error only once.
    pub(crate) fn seal(&self) -> Result<Vec<Pack>, WriteError> {
        let mut state = locked(&self.state);
        if let Some(job) = state.end_current() {
            drop(state);
            self.write(job)?;
            state = locked(&self.state);
        }
        while state.writing > 0 {
            state = wait(&self.changed, state);
        }
        state.check()?;
        state.idle.clear();
        state.made = 0;
        state.sealed.sort_by_key(|pack| pack.name);
        Ok(state.sealed.clone())
    }

    /// Abandons the packs: closes the files and frees the memory. Later appends fail.
    pub(crate) fn abandon(&self) {
        let mut state = locked(&self.state);
        state.fail(WriteError::Aborted);
        state.current = None;
        state.idle.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until an append of `len` bytes has the buffers it needs: one besides the current buffer, if that becomes
    /// full or a new pack begins.
    fn with_room(&self, len: usize) -> Result<MutexGuard<'_, State>, WriteError> {
        let mut state = locked(&self.state);
        loop {
            state.check()?;
            let fits = |current: &Job| current.pack.has_room(len) && current.staging.room() > len;
            if state.current.as_ref().is_some_and(fits) || !state.idle.is_empty() {
                return Ok(state);
            }
            if state.made < STAGING_BUFFERS_MAX {
                state.made += 1;
                state.idle.push(Staging::new());
                return Ok(state);
            }
            state = wait(&self.changed, state);
        }
    }

    /// Begins a pack if none has room; returns the end of the previous pack.
    fn turn_over(&self, state: &mut State, len: usize) -> Result<Option<Job>, WriteError> {
        if let Some(current) = &state.current
            && current.pack.has_room(len)
        {
            return Ok(None);
        }
        let name = PackName {
            image: self.image,
            number: state.begun,
        };
        let created = PackWriter::create(name, self.store.pack_file(name));
        let pack = created.map_err(|error| state.fail(error))?;
        state.begun += 1;
        let ended = state.end_current();
        state.fill_next(Arc::new(pack));
        state.fill(&name.header());
        Ok(ended)
    }

    /// Writes a buffer, outside the lock. The thread that writes the last buffer of a pack completes the pack.
    fn write(&self, mut job: Job) -> Result<(), WriteError> {
        let written = job.pack.write(&mut job.staging);
        let mut state = locked(&self.state);
        let result = written.map_err(|error| state.fail(error));
        let result = result.and_then(|()| state.check());
        state.idle.push(job.staging);
        self.changed.notify_all();
        let last = Arc::into_inner(job.pack);
        let result = match (result, last) {
            (Ok(()), Some(pack)) => {
                drop(state);
                let sealed = pack.seal();
                state = locked(&self.state);
                let sealed = sealed.map_err(|error| state.fail(error));
                sealed.map(|pack| state.sealed.push(pack))
            }
            (result, _) => result,
        };
        state.writing -= 1;
        self.changed.notify_all();
        result
    }
}

impl State {
    /// Copies bytes to the end of the current pack and returns their position. Returns the buffer, too, if it is full
    /// now.
    fn fill(&mut self, bytes: &[u8]) -> ((PackName, u64), Option<Job>) {
        let Some(current) = &mut self.current else {
            unreachable!("a pack was begun");
        };
        let pack = Arc::clone(&current.pack);
        let place = (pack.name(), pack.len());
        let rest = current.staging.take(bytes);
        pack.grow(bytes.len() - rest.len());
        if current.staging.room() > 0 {
            return (place, None);
        }
        let full = self.end_current();
        self.fill_next(pack);
        self.fill(rest);
        (place, full)
    }

    /// Continues in a buffer that `with_room` provided.
    fn fill_next(&mut self, pack: Arc<PackWriter>) {
        let Some(mut staging) = self.idle.pop() else {
            unreachable!("nothing is appended without room");
        };
        staging.restart(pack.len());
        self.current = Some(Job { pack, staging });
    }

    /// Returns the unwritten rest of the current pack.
    fn end_current(&mut self) -> Option<Job> {
        let job = self.current.take();
        self.writing += usize::from(job.is_some());
        job
    }

    /// Stores the first error.
    fn fail(&mut self, error: WriteError) -> WriteError {
        let first = self.failed.get_or_insert_with(|| Arc::new(error));
        WriteError::Stopped(Arc::clone(first))
    }

    fn check(&self) -> Result<(), WriteError> {
        match &self.failed {
            Some(error) => Err(WriteError::Stopped(Arc::clone(error))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::store::format::codec::tests::noise;
    use crate::store::format::pack::PackFiles;
    use crate::store::tests::support::{packs, temporary_store};

    const IMAGE: ImageId = ImageId::FIRST;

    #[test]
    fn concurrent_appends_lie_at_their_positions() {
        let (_folder, store) = temporary_store();
        let sink = PackSink::new(&store, IMAGE);
        // Lengths from zero to the maximum: buffers end anywhere within chunks.
        let longest = STAGING_BYTES - HEADER_LEN - 1;
        let lengths = |worker: usize| (0..40).map(move |n| (worker * 7919 + n * 30_011) % longest);
        let places = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..6)
                .map(|worker| {
                    let sink = &sink;
                    scope.spawn(move || {
                        let chunks = lengths(worker).zip(0..);
                        chunks
                            .map(|(len, seed)| (sink.append(&noise(seed, len)).unwrap(), seed, len))
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            let places = threads.into_iter().map(|thread| thread.join().unwrap());
            places.flatten().collect::<Vec<_>>()
        });
        assert!(locked(&sink.state).made <= STAGING_BUFFERS_MAX);
        sink.append(&noise(0, longest)).unwrap();
        let sealed = sink.seal().unwrap();
        assert_eq!(sink.seal().unwrap(), sealed);
        assert_eq!(packs(&store).len(), sealed.len());
        let stored: usize = places.iter().map(|(_, _, len)| len).sum::<usize>() + longest;
        let total: u64 = sealed.iter().map(|pack| pack.len).sum();
        assert_eq!(total, (stored + sealed.len() * HEADER_LEN) as u64);
        let (last, full) = sealed.split_last().unwrap();
        assert!(full.len() > 10 && last.len <= 2 << 20);
        for pack in full {
            assert!(pack.len + longest as u64 > 2 << 20, "{pack:?} is not full");
        }
        let files = PackFiles::new(&store, sealed.clone()).unwrap();
        for ((name, offset), seed, len) in places {
            let index = sealed.iter().position(|pack| pack.name == name).unwrap();
            let mut bytes = vec![0; len];
            let index = u32::try_from(index).unwrap();
            files.read(index, offset, &mut bytes).unwrap();
            assert!(bytes == noise(seed, len), "{name} {offset}");
        }
    }

    #[test]
    fn a_sink_that_got_nothing_has_no_packs() {
        let (_folder, store) = temporary_store();
        assert_eq!(PackSink::new(&store, IMAGE).seal().unwrap(), []);
        assert_eq!(packs(&store), [""; 0]);
    }

    #[test]
    fn the_first_failure_is_everyones() {
        let (_folder, store) = temporary_store();
        let sink = PackSink::new(&store, IMAGE);
        let taken = PackName {
            image: IMAGE,
            number: 1,
        };
        fs::write(store.pack_file(taken), "").unwrap();
        let chunk = noise(1, 300_000);
        let failed = std::thread::scope(|scope| {
            let append = || (0..20).find_map(|_| sink.append(&chunk).err());
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(append)).collect();
            let ended = threads.into_iter().map(|thread| thread.join().unwrap());
            ended.collect::<Vec<_>>()
        });
        for error in failed.into_iter().chain([sink.seal().err()]) {
            let error = error.unwrap().to_string();
            assert!(error.ends_with("000001-01.pack"), "{error}");
        }
    }

    #[test]
    fn abandoned_sink_refuses_appends_and_frees_memory() {
        let (_folder, store) = temporary_store();
        let sink = PackSink::new(&store, IMAGE);
        sink.append(b"chunk").unwrap();
        sink.abandon();
        assert!(sink.append(b"chunk").is_err() && sink.seal().is_err());
        let state = locked(&sink.state);
        assert!(state.current.is_none() && state.idle.is_empty());
    }
}
