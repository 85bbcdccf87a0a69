//! Progress of a release, or of the creation of memory: the pieces in order, until the agent reports the end.
//!
//! ```text
//! MORE first=0 ▶ MORE first=64 ▶ … ▶ OK      complete: all pieces checked and owned
//!   └ BUSY, REFUSED, DRIVER                  nothing was released; received pieces are dropped
//! ```
//! The state is kept after a time-out: if the descriptors were dropped, the released memory would be lost.

use std::os::fd::OwnedFd;

use super::wire::{self, Reply};

/// Piece of a process's device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Address of the mapping in the process.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// UUID of the GPU.
    pub device: [u8; 16],
}

/// Piece of device memory that its process has released, or has created anew. It is freed on drop, unless it is mapped
/// or held elsewhere.
#[derive(Debug)]
pub struct Held {
    /// Description of the piece.
    pub segment: Segment,
    /// Descriptor that keeps the memory alive; it can be imported any number of times.
    pub descriptor: OwnedFd,
}

/// Replies to such a request so far.
#[derive(Debug, Default)]
pub(super) struct Receipt {
    held: Vec<Held>,
    /// Number of pieces, known after the first batch.
    total: u32,
    /// True if the request was carried out and all pieces have arrived.
    is_complete: bool,
}

/// Description of an invalid reply.
pub(super) type Wrong = &'static str;

impl Receipt {
    /// Processes a reply.
    pub(super) fn absorb(
        &mut self,
        reply: &Reply,
        segments: &[wire::Segment],
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), Wrong> {
        match reply.status {
            wire::MORE => self.add(reply, segments, descriptors),
            wire::OK
                if reply.total == 0
                    || (reply.kind == wire::RELEASE) == (reply.flags & wire::RELEASED != 0) =>
            {
                self.is_complete = self.is_complete || self.matches(reply)?;
                Ok(())
            }
            wire::OK => Err("an incomplete result"),
            // Nothing was changed, or everything is lost.
            _ => {
                self.held.clear();
                Ok(())
            }
        }
    }

    fn add(
        &mut self,
        reply: &Reply,
        segments: &[wire::Segment],
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), Wrong> {
        if segments.is_empty() || segments.len() > wire::BATCH_MAX {
            return Err("an empty batch");
        }
        if segments.len() != descriptors.len() {
            return Err("not as many descriptors as segments");
        }
        if reply.first == 0 {
            self.held.clear();
            self.is_complete = false;
        }
        if usize::try_from(reply.first) != Ok(self.held.len()) {
            return Err("segments out of order");
        }
        if self.is_complete {
            return Err("segments after the last");
        }
        self.total = reply.total;
        for (segment, descriptor) in segments.iter().zip(descriptors) {
            let start = match self.held.last() {
                Some(Held { segment, .. }) => segment.address + segment.len,
                None => 0,
            };
            if segment.len == 0 || segment.address.checked_add(segment.len).is_none() {
                return Err("an empty segment");
            }
            if segment.address < start {
                return Err("overlapping segments");
            }
            self.held.push(Held {
                segment: Segment {
                    address: segment.address,
                    len: segment.len,
                    device: segment.device,
                },
                descriptor,
            });
        }
        Ok(())
    }

    /// Returns true if all pieces that the agent counts have arrived; false if none has, because they may have gone to
    /// another receiver.
    fn matches(&self, reply: &Reply) -> Result<bool, Wrong> {
        if self.held.is_empty() && reply.total != 0 {
            return Ok(false);
        }
        // The pieces lie in order without overlap, so their sum fits.
        let bytes: u64 = self.held.iter().map(|held| held.segment.len).sum();
        if usize::try_from(reply.total) != Ok(self.held.len()) || reply.bytes != bytes {
            return Err("missing segments");
        }
        Ok(true)
    }

    /// Returns true if the agent has more to send before it releases anything.
    pub(super) fn is_short(&self) -> bool {
        self.held.is_empty()
            || usize::try_from(self.total).is_ok_and(|total| self.held.len() < total)
    }

    /// Returns all pieces, once the agent has reported their release.
    pub(super) fn take(&mut self) -> Option<Vec<Held>> {
        self.is_complete.then(|| {
            self.is_complete = false;
            std::mem::take(&mut self.held)
        })
    }
}
