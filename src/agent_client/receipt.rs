//! Progress of a release, or of new memory: the pieces in order, until the agent reports the end.
//!
//! ```text
//! MORE first=0 ▶ MORE first=64 ▶ … ▶ OK      complete: everything checked, all of it ours
//!   └ BUSY, REFUSED, DRIVER                  nothing was released; what came is dropped
//! ```
//! It outlives a wait that was too short: if it were dropped, the descriptors would take the released memory with them.

use std::os::fd::OwnedFd;

use super::wire::{self, Reply};

/// A piece of a process's device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// Address of the mapping in the process.
    pub address: u64,
    /// The number of bytes.
    pub len: u64,
    /// UUID of its GPU.
    pub device: [u8; 16],
}

/// A piece of device memory that its process has let go of, or has made anew. On drop, unless it is mapped or kept
/// elsewhere, it is gone.
#[derive(Debug)]
pub struct Held {
    /// The piece of memory.
    pub segment: Segment,
    /// The descriptor that keeps it; it can be imported any number of times.
    pub descriptor: OwnedFd,
}

/// The answers to such a request, as far as they came.
#[derive(Debug, Default)]
pub(super) struct Receipt {
    held: Vec<Held>,
    /// Number of pieces, known once a batch arrived.
    total: u32,
    /// True if the request was carried out and all pieces have arrived.
    is_complete: bool,
}

/// An answer that cannot be.
pub(super) type Wrong = &'static str;

impl Receipt {
    /// Takes in an answer.
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
            wire::OK => Err("done, but not as it should be"),
            // Nothing was changed, or all is lost.
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
            return Err("a batch of no size");
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
                return Err("a segment of no length");
            }
            if segment.address < start {
                return Err("segments that overlap");
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
            return Err("not all segments came");
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
