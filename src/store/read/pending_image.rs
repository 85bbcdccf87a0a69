//! An image that is elsewhere: its parts are fetched when they are needed. Other processes do not see it, because its
//! manifest is written when the image is whole.
//!
//! ```text
//! offered: visible in this process; a reader fetches what it needs
//!      └─▶ started: parts arrive in any order, those that a reader waits for first ─▶ all there ─▶ synced ─▶ manifest
//!                                                                                                 an ordinary image ◀┘
//! ```

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, Builder};

use bytes::Bytes;

use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Manifest, Stored};
use crate::store::fs::ops;
use crate::sync::{locked, wait};

/// Maximum length of a part, and of the unused bytes between two of its chunks.
const PART_BYTES_MAX: u64 = 4 << 20;
const GAP_BYTES_MAX: u64 = 64 << 10;

/// Part of a pack, which arrives as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Position of the pack in the manifest.
    pub(crate) pack: u32,
    pub(crate) begin: u64,
    pub(crate) end: u64,
    /// The chunks in it, with their positions in the manifest.
    pub(crate) chunks: Vec<(u32, Stored)>,
}

impl Part {
    /// Returns the bytes of a chunk in those of the part; `None` if they end before it does.
    pub(crate) fn chunk<'a>(&self, stored: &Stored, bytes: &'a [u8]) -> Option<&'a [u8]> {
        let begin = usize::try_from(stored.offset - self.begin).ok()?;
        bytes.get(begin..)?.get(..stored.len as usize)
    }
}

/// Place that an image comes from.
pub(crate) trait Origin: fmt::Debug + Send + Sync {
    /// Creates the files of the image's packs, with their lengths.
    fn create_files(&self, manifest: &Manifest) -> io::Result<Vec<File>>;

    /// Fetches a part and checks its chunks. The error is a text for the user.
    fn fetch(&self, part: &Part) -> Result<Bytes, String>;
}

/// Image that is offered or being downloaded.
#[derive(Debug)]
pub(crate) struct PendingImage {
    manifest: Manifest,
    origin: Box<dyn Origin>,
    parts: Vec<Part>,
    /// Position in `parts` of each chunk, by its pack and offset. Parts can overlap: one may contain bytes between its
    /// chunks that another one needs.
    by_chunk: HashMap<(u32, u64), usize>,
    arrival: Mutex<Arrival>,
    changed: Condvar,
}

#[derive(Debug)]
struct Arrival {
    /// The files of the packs; `None` until the first part arrives.
    files: Option<Arc<[File]>>,
    /// True if all parts are being fetched; until then a reader fetches those that it needs.
    is_started: bool,
    states: Vec<PartState>,
    /// Parts that readers wait for.
    wanted: VecDeque<usize>,
    /// First part that may be missing.
    next: usize,
    left: usize,
    failed: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartState {
    Missing,
    Taken,
    There,
}

/// The images of a store that this process downloads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pending(Arc<Mutex<Vec<Arc<PendingImage>>>>);

impl Pending {
    pub(crate) fn find(&self, id: ImageId) -> Option<Arc<PendingImage>> {
        let images = locked(&self.0);
        images.iter().find(|image| image.manifest.id == id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<PendingImage>> {
        locked(&self.0).clone()
    }

    pub(crate) fn add(&self, image: &Arc<PendingImage>) {
        locked(&self.0).push(Arc::clone(image));
    }

    pub(crate) fn remove(&self, id: ImageId) {
        locked(&self.0).retain(|image| image.manifest.id != id);
    }

    /// Removes an image unless its download has started.
    pub(crate) fn withdraw(&self, id: ImageId) {
        let is_started = |image: &PendingImage| locked(&image.arrival).is_started;
        locked(&self.0).retain(|image| image.manifest.id != id || is_started(image));
    }
}

impl PendingImage {
    /// Creates the image. Nothing is fetched yet.
    pub(crate) fn new(manifest: Manifest, origin: Box<dyn Origin>) -> Self {
        let parts = parts(manifest.first_uses());
        let chunks = parts.iter().zip(0..).flat_map(|(part, number)| {
            let offsets = part.chunks.iter().map(|(_, stored)| stored.offset);
            offsets.map(move |offset| ((part.pack, offset), number))
        });
        Self {
            by_chunk: chunks.collect(),
            arrival: Mutex::new(Arrival {
                files: None,
                is_started: false,
                states: vec![PartState::Missing; parts.len()],
                wanted: VecDeque::new(),
                next: 0,
                left: parts.len(),
                failed: None,
            }),
            changed: Condvar::new(),
            manifest,
            origin,
            parts,
        }
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Notes that all parts are going to be fetched. Returns false if they are already.
    pub(crate) fn start(&self) -> bool {
        !std::mem::replace(&mut locked(&self.arrival).is_started, true)
    }

    /// Fetches parts until none is left, or until a thread fails. `arrived` is called with the length of each one.
    pub(crate) fn fetch(&self, arrived: &(dyn Fn(u64) + Sync)) {
        while let Some(number) = self.take() {
            if self.fetch_part(number).is_err() {
                return;
            }
            let part = &self.parts[number];
            arrived(part.end - part.begin);
        }
    }

    /// Fetches a part that was taken. A failure ends the download: readers of missing parts get the reason.
    fn fetch_part(&self, number: usize) -> Result<(), String> {
        let fetched = self.origin.fetch(&self.parts[number]);
        let put = fetched.and_then(|bytes| {
            let put = self.put(number, &bytes);
            put.map_err(|error| format!("cannot write the image: {error}"))
        });
        put.inspect_err(|reason| self.fail(reason))
    }

    fn fail(&self, reason: &str) {
        let failed = &mut locked(&self.arrival).failed;
        failed.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
    }

    /// Fetches a part that was taken, on another thread: this one may be that of an async runtime, where requests cannot
    /// wait.
    fn fetch_elsewhere(&self, number: usize) -> io::Result<()> {
        let fetched = thread::scope(|scope| {
            let fetching = Builder::new().spawn_scoped(scope, || self.fetch_part(number));
            let fetching = fetching.inspect_err(|error| self.fail(&error.to_string()))?;
            let fetched = fetching.join();
            Ok::<_, io::Error>(fetched.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        fetched?.map_err(io::Error::other)
    }

    /// Returns the next part to be fetched; `None` if there is none, or if the download has failed.
    fn take(&self) -> Option<usize> {
        let mut arrival = locked(&self.arrival);
        if arrival.failed.is_some() {
            return None;
        }
        let mut taken = None;
        while let Some(part) = arrival.wanted.pop_front() {
            if arrival.states[part] == PartState::Missing {
                taken = Some(part);
                break;
            }
        }
        while taken.is_none() && arrival.next < self.parts.len() {
            let part = arrival.next;
            arrival.next += 1;
            taken = (arrival.states[part] == PartState::Missing).then_some(part);
        }
        let part = taken?;
        arrival.states[part] = PartState::Taken;
        Some(part)
    }

    fn put(&self, number: usize, bytes: &[u8]) -> io::Result<()> {
        let part = &self.parts[number];
        ops::write_at(&self.files()?[part.pack as usize], bytes, part.begin)?;
        let mut arrival = locked(&self.arrival);
        arrival.states[number] = PartState::There;
        arrival.left -= 1;
        drop(arrival);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for the parts that a reader fetches, after no other part is left. The error is the reason of a failure.
    pub(crate) fn wait_until_whole(&self) -> Result<(), String> {
        let mut arrival = locked(&self.arrival);
        loop {
            match &arrival.failed {
                Some(reason) => return Err(reason.clone()),
                None if arrival.left == 0 => return Ok(()),
                None => arrival = wait(&self.changed, arrival),
            }
        }
    }

    /// Returns the files of the packs.
    pub(crate) fn files(&self) -> io::Result<Arc<[File]>> {
        let mut arrival = locked(&self.arrival);
        if let Some(files) = &arrival.files {
            return Ok(Arc::clone(files));
        }
        let files: Arc<[File]> = self.origin.create_files(&self.manifest)?.into();
        arrival.files = Some(Arc::clone(&files));
        Ok(files)
    }

    /// Fills `bytes` from a pack with the chunk at this offset, as soon as it is there.
    pub(crate) fn read(&self, pack: u32, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.wait_for(pack, offset)?;
        self.files()?[pack as usize].read_exact_at(bytes, offset)
    }

    /// Waits for the part with a chunk, or fetches it.
    fn wait_for(&self, pack: u32, offset: u64) -> io::Result<()> {
        let Some(number) = self.by_chunk.get(&(pack, offset)) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let mut arrival = locked(&self.arrival);
        if arrival.states[*number] == PartState::Missing && arrival.failed.is_none() {
            if arrival.is_started {
                arrival.wanted.push_back(*number);
            } else {
                arrival.states[*number] = PartState::Taken;
                drop(arrival);
                return self.fetch_elsewhere(*number);
            }
        }
        while arrival.states[*number] != PartState::There {
            if let Some(reason) = &arrival.failed {
                return Err(io::Error::other(reason.clone()));
            }
            arrival = wait(&self.changed, arrival);
        }
        Ok(())
    }
}

/// Returns the parts with these chunks, given with their positions in the manifest, in this order.
pub(crate) fn parts(chunks: Vec<(u32, Stored)>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (index, stored) in chunks {
        let end = stored.offset + u64::from(stored.len);
        if let Some(part) = parts.last_mut()
            && part.pack == stored.pack
            && (part.end..=part.end + GAP_BYTES_MAX).contains(&stored.offset)
            && end - part.begin <= PART_BYTES_MAX
        {
            part.end = end;
            part.chunks.push((index, stored));
            continue;
        }
        parts.push(Part {
            pack: stored.pack,
            begin: stored.offset,
            end,
            chunks: vec![(index, stored)],
        });
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::format::manifest::tests::example;
    use crate::store::format::manifest::{Chunk, Content};
    use crate::store::format::pack::HEADER_BYTES;

    /// Fetches parts with one chunk only.
    #[derive(Debug)]
    struct Short;

    impl Origin for Short {
        fn create_files(&self, _: &Manifest) -> io::Result<Vec<File>> {
            Ok(vec![tempfile::tempfile()?])
        }

        fn fetch(&self, part: &Part) -> Result<Bytes, String> {
            match part.chunks.len() {
                1 => Ok(vec![1; 50].into()),
                _ => Err("the network is down".to_owned()),
            }
        }
    }

    /// Returns an image of three chunks, of which the middle one is used last, so the part of the other two contains
    /// its bytes. Returns the offsets of the chunks, too.
    fn pending() -> (PendingImage, impl Fn(u64) -> u64) {
        let mut manifest = example();
        let Content::Stored(first) = manifest.chunks[0].content else {
            panic!("the example's first chunk is stored");
        };
        let offset = |number: u64| HEADER_BYTES + 50 * number;
        let chunk = |number| Chunk {
            raw_len: 100,
            content: Content::Stored(Stored {
                offset: offset(number),
                ..first
            }),
        };
        manifest.chunks = vec![chunk(0), chunk(1), chunk(2)];
        manifest.streams[0].chunks = vec![0, 2, 1];
        let pending = PendingImage::new(manifest, Box::new(Short));
        let ranges = pending.parts.iter().map(|part| (part.begin, part.end));
        assert!(ranges.eq([(offset(0), offset(3)), (offset(1), offset(2))]));
        (pending, offset)
    }

    #[test]
    fn a_chunk_is_there_when_its_own_part_is() {
        let (pending, offset) = pending();
        assert!(pending.start() && !pending.start());
        // The last part first, as if a reader waited for it.
        locked(&pending.arrival).wanted.push_back(1);
        pending.fetch(&|len| assert_eq!(len, 50));
        let read = |number| pending.read(0, offset(number), &mut [0; 50]);
        assert!(read(1).is_ok());
        for number in [0, 2] {
            assert_eq!(read(number).unwrap_err().to_string(), "the network is down");
        }
        assert_eq!(
            pending.wait_until_whole().unwrap_err(),
            "the network is down"
        );
    }

    #[test]
    fn an_offered_image_is_fetched_by_its_readers() {
        let (pending, offset) = pending();
        let mut bytes = [0; 50];
        pending.read(0, offset(1), &mut bytes).unwrap();
        assert_eq!(bytes, [1; 50]);
        assert_eq!(locked(&pending.arrival).failed, None);
        let failed = pending.read(0, offset(0), &mut bytes).unwrap_err();
        assert_eq!(failed.to_string(), "the network is down");
        assert_eq!(
            pending.wait_until_whole().unwrap_err(),
            "the network is down"
        );
    }

    #[test]
    fn a_part_that_a_reader_fetches_is_waited_for() {
        let (pending, offset) = pending();
        // All but the part that the reader takes first.
        locked(&pending.arrival).left = 1;
        thread::scope(|scope| {
            let whole = scope.spawn(|| pending.wait_until_whole());
            pending.read(0, offset(1), &mut [0; 50]).unwrap();
            assert_eq!(whole.join().unwrap(), Ok(()));
        });
    }
}
