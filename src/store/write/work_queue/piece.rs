//! Items of the work queue.

use std::sync::Arc;

use super::super::buffer_pool::Buffer;
use super::super::chunker::Known;
use super::WorkQueue;
use crate::store::format::chunk::CHUNK_BYTES;

/// Work for a worker, with `P` for the bytes of a piece. Streams are numbered in the order in which they were opened,
/// pieces within their stream.
#[derive(Debug)]
pub(crate) enum Work<P> {
    Piece {
        stream: u32,
        position: u32,
        piece: P,
    },
    /// Full piece of zeros, which takes no memory.
    Zeros { stream: u32, position: u32 },
    /// Chunks of an earlier image, which take no memory.
    Known {
        stream: u32,
        position: u32,
        chunks: Vec<Known>,
    },
    /// Number of pieces in the stream.
    End { stream: u32, pieces: u32 },
}

impl Work<Bytes> {
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Piece { piece, .. } => piece.len(),
            Self::Zeros { .. } => CHUNK_BYTES,
            Self::Known { chunks, .. } => chunks.iter().map(|chunk| chunk.len as usize).sum(),
            Self::End { .. } => 0,
        }
    }
}

/// Bytes of a stream for the workers; all pieces are full but the last and those before known chunks. Dropping a piece returns its memory.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(super) work_queue: Arc<WorkQueue>,
    pub(super) bytes: Bytes,
}

#[derive(Debug)]
pub(super) enum Bytes {
    Whole { buffer: Buffer, len: usize },
    Small(Box<[u8]>),
}

impl Bytes {
    fn len(&self) -> usize {
        match self {
            Self::Whole { len, .. } => *len,
            Self::Small(bytes) => bytes.len(),
        }
    }
}

impl Piece {
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Whole { buffer, len } => &buffer[..*len],
            Bytes::Small(bytes) => bytes,
        }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let nothing = Bytes::Small(Box::default());
        let bytes = std::mem::replace(&mut self.bytes, nothing);
        self.work_queue.give_back(bytes);
    }
}
