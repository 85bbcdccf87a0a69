//! Fetcher of single stored chunks: reads, checks, decrypts and decompresses a chunk, and compares it with its name.
//!
//! All data from packs pass through this module. A reader gets no data that differ from the name; an upload gets the
//! stored bytes, compared with their check. The check detects changes that decompress to the same content, and keeps
//! damaged bytes away from the decoder. Only a reader that compares the content itself can do without both.

use xxhash_rust::xxh3::xxh3_64;

use crate::store::format::chunk::CHUNK_BYTES;
use crate::store::format::cipher::{OVERHEAD_BYTES, Secrets, Unsealed};
use crate::store::format::codec::{Codec, Decoder};
use crate::store::format::manifest::Stored;
use crate::store::format::pack::{PackError, PackFiles};

/// Reason why a chunk cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error("it cannot be decompressed: {0}")]
    Decompress(std::io::Error),
    #[error("its stored bytes have changed")]
    Check,
    #[error("it cannot be decrypted: {0}")]
    Open(#[from] Unsealed),
    #[error("its hash is wrong")]
    Hash,
}

/// Fetcher of chunks with its own memory; each thread has one.
pub(crate) struct ChunkFetcher<'a> {
    packs: &'a PackFiles,
    secrets: Option<&'a Secrets>,
    scratch: Scratch,
    /// False if the caller compares the content.
    compares: bool,
}

/// Working memory of a fetcher, for reuse: obtaining fresh memory from the kernel costs as much as hashing its content.
pub(crate) struct Scratch {
    decoder: Decoder,
    sealed: Vec<u8>,
    stored: Vec<u8>,
}

impl Scratch {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            decoder: Decoder::new()?,
            sealed: vec![0; CHUNK_BYTES + OVERHEAD_BYTES],
            stored: vec![0; CHUNK_BYTES],
        })
    }
}

impl<'a> ChunkFetcher<'a> {
    pub(crate) fn new(packs: &'a PackFiles) -> std::io::Result<Self> {
        Ok(Self::with(packs, Scratch::new()?))
    }

    pub(crate) fn with(packs: &'a PackFiles, scratch: Scratch) -> Self {
        Self {
            packs,
            secrets: packs.store().secrets(),
            scratch,
            compares: true,
        }
    }

    /// Does not compare content with its name from now on, nor stored bytes with their check unless they are encrypted.
    pub(crate) fn trust(&mut self) {
        self.compares = false;
    }

    pub(crate) fn into_scratch(self) -> Scratch {
        self.scratch
    }

    /// Fills `raw`, which must have the chunk's length. On an error the content of `raw` is unspecified.
    pub(crate) fn fetch(&mut self, stored: &Stored, raw: &mut [u8]) -> Result<(), Fault> {
        match stored.codec {
            Codec::Raw => self.read(stored, raw)?,
            Codec::Zstd | Codec::Planes => {
                let mut bytes = std::mem::take(&mut self.scratch.stored);
                let decoded = self.decode(stored, &mut bytes, raw);
                self.scratch.stored = bytes;
                decoded?;
            }
        }
        self.compare_name(stored, raw)
    }

    /// Fetches like [`fetch`](Self::fetch), and sets `encoded` to the chunk's stored form, decrypted.
    pub(crate) fn fetch_encoded(
        &mut self,
        stored: &Stored,
        raw: &mut [u8],
        encoded: &mut Vec<u8>,
    ) -> Result<(), Fault> {
        let overhead = self.secrets.map_or(0, |_| OVERHEAD_BYTES);
        encoded.resize(stored.len as usize - overhead, 0);
        self.decode(stored, encoded, raw)?;
        self.compare_name(stored, raw)
    }

    fn compare_name(&self, stored: &Stored, raw: &[u8]) -> Result<(), Fault> {
        if !self.compares || self.packs.store().name_of(raw) == stored.hash {
            Ok(())
        } else {
            Err(Fault::Hash)
        }
    }

    /// Fills `bytes`, which must have the chunk's length in the pack, with the chunk as it is there, and returns their
    /// check. They are compared with the check that was made when the chunk was written; only a chunk without one is
    /// compared with its name.
    pub(crate) fn fetch_stored(
        &mut self,
        stored: &Stored,
        raw_len: u32,
        bytes: &mut [u8],
    ) -> Result<u64, Fault> {
        self.packs.read(stored.pack, stored.offset, bytes)?;
        check(stored, bytes)?;
        if let Some(check) = stored.check {
            return Ok(check);
        }
        self.fetch(stored, &mut vec![0; raw_len as usize])?;
        Ok(xxh3_64(bytes))
    }

    /// Returns the bytes of the pack that the latest [`fetch_encoded`](Self::fetch_encoded) of an encrypted chunk read.
    pub(crate) fn sealed(&self, stored: &Stored) -> &[u8] {
        &self.scratch.sealed[..stored.len as usize]
    }

    fn decode(&mut self, stored: &Stored, bytes: &mut [u8], raw: &mut [u8]) -> Result<(), Fault> {
        let overhead = self.secrets.map_or(0, |_| OVERHEAD_BYTES);
        // A valid manifest has no stored chunk longer than CHUNK_BYTES.
        let bytes = &mut bytes[..stored.len as usize - overhead];
        self.read(stored, bytes)?;
        self.scratch
            .decoder
            .decode(stored.codec, bytes, raw)
            .map_err(Fault::Decompress)
    }

    /// Fills `bytes` with the stored form, decrypted.
    fn read(&mut self, stored: &Stored, bytes: &mut [u8]) -> Result<(), Fault> {
        let Some(secrets) = self.secrets else {
            self.packs.read(stored.pack, stored.offset, bytes)?;
            if self.compares {
                check(stored, bytes)?;
            }
            return Ok(());
        };
        let sealed = &mut self.scratch.sealed[..stored.len as usize];
        self.packs.read(stored.pack, stored.offset, sealed)?;
        check(stored, sealed)?;
        Ok(secrets.chunks.open(&stored.hash, sealed, bytes)?)
    }
}

/// Computes the check of a chunk from format 1, which has no checks. The caller has just compared its hash.
pub(crate) fn missing_check(packs: &PackFiles, stored: &Stored) -> Result<u64, PackError> {
    let mut bytes = vec![0; stored.len as usize];
    packs.read(stored.pack, stored.offset, &mut bytes)?;
    Ok(xxh3_64(&bytes))
}

fn check(stored: &Stored, bytes: &[u8]) -> Result<(), Fault> {
    match stored.check {
        Some(expected) if xxh3_64(bytes) != expected => Err(Fault::Check),
        Some(_) | None => Ok(()),
    }
}
