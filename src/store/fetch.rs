//! Getting one stored chunk back: read, check, decompress, and compare with its name.
//!
//! The only way by which bytes leave a pack; nothing that fails the comparison does. The
//! check of the stored bytes finds what changes them without changing what they
//! decompress to, and keeps damaged bytes away from the decoder.

use xxhash_rust::xxh3::xxh3_64;

use super::chunk::{self, CHUNK_BYTES};
use super::codec::{Codec, Decoder};
use super::manifest::Stored;
use super::pack::{PackError, PackFiles};

/// Why a chunk cannot be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error("it cannot be decompressed: {0}")]
    Decompress(std::io::Error),
    #[error("its stored bytes have changed")]
    Check,
    #[error("its hash is wrong")]
    Hash,
}

/// Fetches chunks, with its own memory; one a thread.
pub(super) struct Fetcher<'a> {
    packs: &'a PackFiles,
    decoder: Decoder,
    stored: Vec<u8>,
}

impl<'a> Fetcher<'a> {
    pub(super) fn new(packs: &'a PackFiles) -> std::io::Result<Self> {
        Ok(Self {
            packs,
            decoder: Decoder::new()?,
            stored: vec![0; CHUNK_BYTES],
        })
    }

    /// Fills all of `raw`, whose length is the chunk's. On an error `raw` holds anything.
    pub(super) fn fetch(&mut self, stored: &Stored, raw: &mut [u8]) -> Result<(), Fault> {
        match stored.codec {
            Codec::Raw => {
                self.packs.read(stored.pack, stored.offset, raw)?;
                check(stored, raw)?;
            }
            Codec::Zstd => {
                // A valid manifest has no stored chunk longer than CHUNK_BYTES.
                let bytes = &mut self.stored[..stored.len as usize];
                self.packs.read(stored.pack, stored.offset, bytes)?;
                check(stored, bytes)?;
                self.decoder
                    .decompress(bytes, raw)
                    .map_err(Fault::Decompress)?;
            }
        }
        if chunk::hash(raw) == stored.hash {
            Ok(())
        } else {
            Err(Fault::Hash)
        }
    }
}

fn check(stored: &Stored, bytes: &[u8]) -> Result<(), Fault> {
    match stored.check {
        Some(expected) if xxh3_64(bytes) != expected => Err(Fault::Check),
        Some(_) | None => Ok(()),
    }
}
