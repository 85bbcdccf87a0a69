//! Stream that consists of another store's chunks. They are already named and encoded, and enter the image without
//! being cut, hashed or compressed again.

use std::sync::Arc;

use super::chunker::Known;
use super::manifest_builder::Claim;
use super::worker::Shared;
use crate::store::error::WriteError;
use crate::store::format::chunk::{CHUNK_BYTES, Hash};
use crate::store::format::cipher::OVERHEAD_BYTES;
use crate::store::format::codec::Codec;

/// Stream under construction. If it is dropped before `finish`, the image cannot be committed.
pub(crate) struct PrechunkedStream {
    shared: Arc<Shared>,
    stream: u32,
    position: u32,
    raw_len: u64,
    /// Buffer for a sealed chunk, in an encrypted store.
    sealed: Vec<u8>,
}

impl PrechunkedStream {
    pub(crate) fn open(shared: &Arc<Shared>, name: &str) -> Result<Self, WriteError> {
        Ok(Self {
            stream: shared.builder.open(name)?,
            shared: Arc::clone(shared),
            position: 0,
            raw_len: 0,
            sealed: vec![0; CHUNK_BYTES + OVERHEAD_BYTES],
        })
    }

    /// Adds a chunk of `raw_len` bytes with this name; `encoded` is its encoded form.
    pub(crate) fn chunk(
        &mut self,
        raw_len: u32,
        name: Hash,
        codec: Codec,
        encoded: &[u8],
    ) -> Result<(), WriteError> {
        let position = self.next(raw_len)?;
        let builder = &self.shared.builder;
        match builder.set(self.stream, position, raw_len, name)? {
            Claim::Known => {}
            Claim::New(chunk) => {
                let place = self.shared.put(name, codec, encoded, &mut self.sealed)?;
                builder.place(chunk, place);
            }
        }
        Ok(())
    }

    /// Adds a chunk that is already part of the image or of an earlier one.
    pub(crate) fn again(&mut self, raw_len: u32, name: Hash) -> Result<(), WriteError> {
        let position = self.next(raw_len)?;
        let known = Known {
            len: raw_len,
            hash: Some(name),
        };
        let builder = &self.shared.builder;
        builder.set_known(self.stream, position, &[known])
    }

    /// Adds a chunk of zeros.
    pub(crate) fn zeros(&mut self, raw_len: u32) -> Result<(), WriteError> {
        let position = self.next(raw_len)?;
        self.shared.builder.set_zero(self.stream, position, raw_len)
    }

    /// Ends the stream; returns its length.
    pub(crate) fn finish(self) -> u64 {
        self.shared.builder.finish(self.stream, self.raw_len);
        self.raw_len
    }

    fn next(&mut self, raw_len: u32) -> Result<u32, WriteError> {
        let position = self.position;
        self.position = position.checked_add(1).ok_or(WriteError::TooManyChunks)?;
        self.raw_len += u64::from(raw_len);
        Ok(position)
    }
}
