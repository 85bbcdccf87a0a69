//! An image that is being downloaded: it can be read in this process as far as it is there, and a reader waits for the
//! rest. Other processes do not see it, because its manifest is written when the image is whole.
//!
//! ```text
//! begin ─▶ parts arrive in any order, those that a reader waits for first ─▶ all there ─▶ synced ─▶ manifest
//!      └─▶ visible in this process                                                            └─▶ an ordinary image
//! ```

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex};

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

/// Image that is being downloaded.
#[derive(Debug)]
pub(crate) struct PendingImage {
    manifest: Manifest,
    files: Vec<File>,
    parts: Vec<Part>,
    /// Position in `parts` of each chunk, by its pack and offset. Parts can overlap: one may contain bytes between its
    /// chunks that another one needs.
    by_chunk: HashMap<(u32, u64), usize>,
    arrival: Mutex<Arrival>,
    changed: Condvar,
}

#[derive(Debug)]
struct Arrival {
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
}

impl PendingImage {
    /// Creates the image, whose packs have these files.
    pub(crate) fn new(manifest: Manifest, files: Vec<File>) -> Self {
        let parts = parts(&manifest);
        let chunks = parts.iter().zip(0..).flat_map(|(part, number)| {
            let offsets = part.chunks.iter().map(|(_, stored)| stored.offset);
            offsets.map(move |offset| ((part.pack, offset), number))
        });
        Self {
            by_chunk: chunks.collect(),
            arrival: Mutex::new(Arrival {
                states: vec![PartState::Missing; parts.len()],
                wanted: VecDeque::new(),
                next: 0,
                left: parts.len(),
                failed: None,
            }),
            changed: Condvar::new(),
            manifest,
            files,
            parts,
        }
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the next part to be fetched; `None` if there is none, or if the download has failed.
    pub(crate) fn take(&self) -> Option<(usize, &Part)> {
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
        Some((part, &self.parts[part]))
    }

    /// Writes a part, whose chunks the caller has checked.
    pub(crate) fn put(&self, number: usize, bytes: &[u8]) -> io::Result<()> {
        let part = &self.parts[number];
        ops::write_at(&self.files[part.pack as usize], bytes, part.begin)?;
        let mut arrival = locked(&self.arrival);
        arrival.states[number] = PartState::There;
        arrival.left -= 1;
        drop(arrival);
        self.changed.notify_all();
        Ok(())
    }

    /// Ends the download: readers of missing parts get this reason.
    pub(crate) fn fail(&self, reason: String) {
        locked(&self.arrival).failed.get_or_insert(reason);
        self.changed.notify_all();
    }

    /// Returns the reason why the download has failed, if it has.
    pub(crate) fn failure(&self) -> Option<String> {
        locked(&self.arrival).failed.clone()
    }

    /// Returns true if all parts are there.
    pub(crate) fn is_whole(&self) -> bool {
        locked(&self.arrival).left == 0
    }

    /// Returns the files of the packs.
    pub(crate) fn files(&self) -> &[File] {
        &self.files
    }

    /// Fills `bytes` from a pack with the chunk at this offset, as soon as it is there.
    pub(crate) fn read(&self, pack: u32, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.wait_for(pack, offset)?;
        self.files[pack as usize].read_exact_at(bytes, offset)
    }

    /// Waits for the part with a chunk.
    fn wait_for(&self, pack: u32, offset: u64) -> io::Result<()> {
        let Some(number) = self.by_chunk.get(&(pack, offset)) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let mut arrival = locked(&self.arrival);
        if arrival.states[*number] == PartState::Missing {
            arrival.wanted.push_back(*number);
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

/// Returns the parts with all stored chunks, in the order in which the streams need them first.
fn parts(manifest: &Manifest) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (index, stored) in manifest.first_uses() {
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

    /// The middle one of three chunks is used last, so the part of the other two contains its bytes.
    #[test]
    fn a_chunk_is_there_when_its_own_part_is() {
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
        let file = tempfile::tempfile().unwrap();
        let pending = PendingImage::new(manifest, vec![file]);
        let ranges = pending.parts.iter().map(|part| (part.begin, part.end));
        assert!(ranges.eq([(offset(0), offset(3)), (offset(1), offset(2))]));

        while let Some((number, part)) = pending.take() {
            if part.chunks.len() == 1 {
                pending.put(number, &[1; 50]).unwrap();
            }
        }
        pending.fail("the network is down".to_owned());
        let read = |number| pending.read(0, offset(number), &mut [0; 50]);
        assert!(read(1).is_ok());
        for number in [0, 2] {
            assert_eq!(read(number).unwrap_err().to_string(), "the network is down");
        }
        assert!(!pending.is_whole());
    }
}
