//! Encoding of requests and decoding of replies. The meaning of a reply is irrelevant here.

use super::wire::{MAGIC, Reply, Request, Segment, VERSION};

/// Length of a request in bytes.
pub(super) const REQUEST_LEN: usize = size_of::<Request>();
/// Maximum length of a reply.
pub(super) const REPLY_LEN_MAX: usize =
    size_of::<Reply>() + super::wire::BATCH_MAX * size_of::<Segment>();

/// Encodes a request.
pub(super) fn encode(request: &Request) -> [u8; REQUEST_LEN] {
    let words = [
        request.magic,
        request.version,
        request.kind,
        request.first,
        request.count,
        request.reserved,
    ];
    let mut bytes = [0; REQUEST_LEN];
    for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes[24..].copy_from_slice(&request.serial.to_ne_bytes());
    bytes
}

/// Decodes a reply and its segments; `None` unless the bytes are complete, of this version, and have the given number
/// of segments.
pub(super) fn decode(bytes: &[u8]) -> Option<(Reply, Vec<Segment>)> {
    let mut rest = Rest(bytes);
    let reply = Reply {
        magic: rest.word()?,
        version: rest.word()?,
        kind: rest.word()?,
        status: rest.word()?,
        code: rest.word()?.cast_signed(),
        thread: rest.word()?.cast_signed(),
        first: rest.word()?,
        count: rest.word()?,
        total: rest.word()?,
        flags: rest.word()?,
        bytes: rest.long()?,
        serial: rest.long()?,
    };
    if reply.magic != MAGIC || reply.version != VERSION {
        return None;
    }
    let count = rest.0.len() / size_of::<Segment>();
    if rest.0.len() % size_of::<Segment>() != 0 || usize::try_from(reply.count) != Ok(count) {
        return None;
    }
    let segment = |_| {
        Some(Segment {
            address: rest.long()?,
            len: rest.long()?,
            device: rest.take()?,
        })
    };
    let segments = (0..count).map(segment).collect::<Option<Vec<_>>>()?;
    Some((reply, segments))
}

/// Bytes not read yet.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}
