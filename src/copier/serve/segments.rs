//! Places of segments: a segment's bytes are in extents, first of its shadow, then of the original.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::copier::wire::{Part, Refusal};
use crate::cuda::device::{Context, DeviceMemory};
use crate::sync::locked;

/// Maximum number of segments: more than a job has allocations; each is a mapping of this process.
const SEGMENTS_MAX: usize = 1 << 16;

/// Numbered piece of GPU memory. Immutable: a shadow creates a new value with the same number, and a thread that copies
/// from the old one continues with that.
#[derive(Debug)]
pub(super) struct Segment {
    context: Context,
    pub(super) len: u64,
    /// Number of bytes from the beginning that are in a shadow.
    pub(super) safe: u64,
    /// Extents in order, without gaps.
    extents: Vec<Extent>,
}

/// Contiguous bytes.
#[derive(Debug, Clone)]
pub(super) struct Extent {
    pub(super) memory: Arc<DeviceMemory>,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Segment {
    /// Creates a segment from memory that was created or imported.
    pub(super) fn whole(memory: DeviceMemory) -> Self {
        let context = memory.context().clone();
        let len = memory.len();
        let extents = vec![Extent {
            memory: Arc::new(memory),
            offset: 0,
            len,
        }];
        Self {
            context,
            len,
            safe: 0,
            extents,
        }
    }

    /// Returns the segment with its beginning in `shadow`, which is a copy of it.
    pub(super) fn shadowed(&self, mut shadow: Vec<Extent>) -> Self {
        let safe = shadow.iter().map(|extent| extent.len).sum();
        shadow.extend(self.extents_of(safe..self.len, u64::MAX));
        Self {
            context: self.context.clone(),
            len: self.len,
            safe,
            extents: shadow,
        }
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the places of the bytes of `range`, in pieces of up to `len_max`.
    pub(super) fn extents_of(
        &self,
        range: Range<u64>,
        len_max: u64,
    ) -> impl Iterator<Item = Extent> {
        let mut start = 0;
        self.extents.iter().flat_map(move |extent| {
            let here = start..start + extent.len;
            start = here.end;
            let end = range.end.min(here.end);
            let mut at = range.start.max(here.start);
            std::iter::from_fn(move || {
                let len = end.checked_sub(at).filter(|len| *len > 0)?.min(len_max);
                let offset = extent.offset + (at - here.start);
                at += len;
                let memory = Arc::clone(&extent.memory);
                Some(Extent {
                    memory,
                    offset,
                    len,
                })
            })
        })
    }
}

/// Segments, shared by the threads.
#[derive(Debug, Default)]
pub(super) struct Segments {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    last: u64,
    found: HashMap<u64, Arc<Segment>>,
}

impl Segments {
    fn lock(&self) -> MutexGuard<'_, Table> {
        locked(&self.table)
    }

    pub(super) fn add(&self, segment: Segment) -> Result<u64, Refusal> {
        let mut table = self.lock();
        if table.found.len() >= SEGMENTS_MAX {
            let text = format!("there are {SEGMENTS_MAX} segments already; release some");
            return Err(Refusal::request(text));
        }
        table.last += 1;
        let id = table.last;
        table.found.insert(id, Arc::new(segment));
        Ok(id)
    }

    pub(super) fn get(&self, id: u64) -> Result<Arc<Segment>, Refusal> {
        let found = self.lock().found.get(&id).map(Arc::clone);
        found.ok_or_else(|| not_there(id))
    }

    /// Returns the segment of a part, after checking that the part is within it.
    pub(super) fn of(&self, part: Part) -> Result<Arc<Segment>, Refusal> {
        let segment = self.get(part.segment)?;
        if part.start <= part.end && part.end <= segment.len {
            return Ok(segment);
        }
        Err(Refusal::Request(format!(
            "bytes {} to {} are not within the segment of {} bytes",
            part.start, part.end, segment.len
        )))
    }

    pub(super) fn replace(&self, id: u64, segment: Segment) {
        self.lock().found.insert(id, Arc::new(segment));
    }

    /// Removes all segments or, if one does not exist, none. Their memory is released outside the lock.
    pub(super) fn remove(&self, ids: &[u64]) -> Result<(), Refusal> {
        let mut table = self.lock();
        if let Some(id) = ids.iter().find(|id| !table.found.contains_key(id)) {
            return Err(not_there(*id));
        }
        let gone: Vec<_> = ids.iter().map(|id| table.found.remove(id)).collect();
        drop(table);
        drop(gone);
        Ok(())
    }
}

fn not_there(id: u64) -> Refusal {
    Refusal::Request(format!("there is no segment {id}"))
}
