//! Check of chunks that came from a remote store, in the form in which they are stored.

use xxhash_rust::xxh3::xxh3_64;

use super::remote_error::RemoteError;
use crate::store::format::chunk::{self, CHUNK_BYTES};
use crate::store::format::cipher::{OVERHEAD_BYTES, Secrets};
use crate::store::format::codec::Decoder;
use crate::store::format::manifest::{Manifest, Stored};
use crate::store::maintain::verify_report::ChunkFault;
use crate::store::read::pending_image::Part;

/// Checker with its own memory; each thread has one.
pub(super) struct ChunkCheck<'a> {
    secrets: Option<&'a Secrets>,
    decoder: Decoder,
    opened: Vec<u8>,
    raw: Vec<u8>,
}

impl<'a> ChunkCheck<'a> {
    pub(super) fn new(secrets: Option<&'a Secrets>) -> Result<Self, RemoteError> {
        Ok(Self {
            secrets,
            decoder: Decoder::new().map_err(RemoteError::Thread)?,
            opened: Vec::new(),
            raw: vec![0; CHUNK_BYTES],
        })
    }

    /// Checks the chunks of a part of a pack, of which these bytes have come. Returns the bad ones by their positions in
    /// the manifest.
    pub(super) fn faults(
        &mut self,
        manifest: &Manifest,
        part: &Part,
        bytes: &[u8],
    ) -> Vec<(u32, ChunkFault)> {
        let mut faults = Vec::new();
        for (index, stored) in &part.chunks {
            let raw_len = manifest.chunks[*index as usize].raw_len as usize;
            let fault = match part.chunk(stored, bytes) {
                Some(bytes) => self.fault(stored, raw_len, bytes),
                None => Some(ChunkFault::Lost),
            };
            faults.extend(fault.map(|fault| (*index, fault)));
        }
        faults
    }

    fn fault(&mut self, stored: &Stored, raw_len: usize, bytes: &[u8]) -> Option<ChunkFault> {
        if stored.check.is_some_and(|check| check != xxh3_64(bytes)) {
            return Some(ChunkFault::Check);
        }
        let encoded = match self.secrets {
            None => bytes,
            Some(secrets) => {
                // A valid manifest has no sealed chunk that is shorter.
                let len = bytes.len().saturating_sub(OVERHEAD_BYTES);
                self.opened.resize(len, 0);
                let opened = secrets.chunks.open(&stored.hash, bytes, &mut self.opened);
                if opened.is_err() {
                    return Some(ChunkFault::Check);
                }
                &self.opened
            }
        };
        let raw = &mut self.raw[..raw_len];
        if self.decoder.decode(stored.codec, encoded, raw).is_err() {
            return Some(ChunkFault::Form);
        }
        let hash = match self.secrets {
            Some(secrets) => secrets.name(raw),
            None => chunk::hash(raw),
        };
        (hash != stored.hash).then_some(ChunkFault::Content)
    }
}
