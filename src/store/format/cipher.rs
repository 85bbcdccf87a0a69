//! Sealing and opening of buffers: what stands between an encrypted store and its disk.
//!
//! ```text
//! key ─┬─ "names"     ─▶ keyed BLAKE3 ─▶ names of chunks
//!      ├─ "chunks"    ─▶ AEGIS-128L   ─▶ nonce (16 bytes) ‖ ciphertext ‖ tag (16 bytes)
//!      ├─ "manifests" ─▶ AEGIS-128L   ─▶ the same
//!      └─ "portable files" ─▶ with a salt a file: AEGIS-128L of its frames, and a check of the key
//! ```
//! A sealed buffer stands for itself: it can lie anywhere in any pack, and no header is
//! needed to open it. It is bound to what it is, a chunk to its name and a part of a
//! manifest to the manifest's header, so none passes for another. Nonce, ciphertext and
//! tag all look like noise, so a pack shows neither how many chunks it has nor where
//! they end.
//!
//! Nonces are drawn by the kernel, 128 bits each, where nobody can pass one in or keep
//! one: RFC 10032 allows 2^48 of them with one key, which is 2^62 bytes of chunks of
//! the least length. Counters would be shorter, but would have to survive crashes, copies of
//! the store and repairs, each of which must not seal twice with the same.
//!
//! AEGIS-128L (RFC 10032) because with chunks of 256 KiB on one core without VAES it did
//! 9.0 GB/s (best of nine rounds), against 3.1 of AES-256-GCM (ring and aws-lc-rs), 1.4 of
//! ChaCha20-Poly1305 and 3.6 of hashing. What that costs an image is measured by
//! `benches/seal.rs`. Knows nothing of files, chunks or codecs.

use std::fmt;
use std::io;

use aegis::aegis128l::Aegis128L;

use super::chunk::Hash;
use super::store_key::Key;
use crate::clock;
use crate::secret::Secret;

const NONCE_BYTES: usize = 16;
const TAG_BYTES: usize = 16;
/// Difference in length between the sealed and the plain form.
pub(crate) const OVERHEAD_BYTES: usize = NONCE_BYTES + TAG_BYTES;

/// `OVERHEAD_BYTES` as the type of a chunk's length on disk.
pub(crate) const OVERHEAD_LEN: u32 = 32;
const _: () = assert!(OVERHEAD_LEN as usize == OVERHEAD_BYTES);

/// Fixed for ever: other texts are other keys.
const NAMES: &str = "ckpt-run 2026-11-21 store, names of chunks";
const CHUNKS: &str = "ckpt-run 2026-11-21 store, chunks";
const MANIFESTS: &str = "ckpt-run 2026-11-21 store, manifests";
const FILES: &str = "ckpt-run 2026-11-21 store, portable files";
const FRAMES: &str = "ckpt-run 2026-11-21 portable file, frames";
const FILE_CHECK: &str = "ckpt-run 2026-11-21 portable file, key check";

/// Ciphers and checks that are derived from a store's key.
pub(crate) struct Secrets {
    names: Secret<32>,
    pub(crate) chunks: Cipher,
    pub(crate) manifests: Cipher,
    files: Key,
}

impl Secrets {
    pub(crate) fn new(key: &Key) -> Self {
        Self {
            names: Secret::copy_of(&key.derive(NAMES, &[])),
            chunks: Cipher::new(key, CHUNKS),
            manifests: Cipher::new(key, MANIFESTS),
            files: Key::from_bytes(&key.derive(FILES, &[])),
        }
    }

    /// The name of a chunk: who lacks the key cannot tell whether the store has a certain
    /// chunk, not even from a name.
    pub(crate) fn name(&self, chunk: &[u8]) -> Hash {
        *blake3::keyed_hash(&self.names, chunk).as_bytes()
    }
}

impl Secrets {
    /// Seals and opens the frames of the portable file that has this salt.
    pub(crate) fn file(&self, salt: &[u8; 32]) -> Cipher {
        Cipher::derived(&self.files.derive(FRAMES, salt))
    }

    /// Returns the check by which a portable file recognizes its key.
    pub(crate) fn file_check(&self, salt: &[u8; 32]) -> [u8; 32] {
        *self.files.derive(FILE_CHECK, salt)
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets")
    }
}

/// A buffer that this key did not seal as what it is taken for, or that was changed since.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it was changed, or sealed with another key")]
pub(crate) struct Unsealed;

/// Seals and opens buffers.
pub(crate) struct Cipher(Secret<16>);

impl Cipher {
    fn new(key: &Key, context: &str) -> Self {
        Self::derived(&key.derive(context, &[]))
    }

    fn derived(derived: &[u8; 32]) -> Self {
        let mut key = Secret::zeros();
        key.copy_from_slice(&derived[..16]);
        Self(key)
    }

    /// Fills `sealed`, which is longer by the overhead, with the sealed form of `plain`,
    /// bound to `about`, which the reader must know.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    ///
    /// # Panics
    /// If `sealed` has another length.
    pub(crate) fn seal(&self, about: &[u8], plain: &[u8], sealed: &mut [u8]) -> io::Result<()> {
        let random = clock::random()?;
        let (nonce, _) = random
            .split_first_chunk()
            .unwrap_or((&[0; NONCE_BYTES], &[]));
        self.seal_with(nonce, about, plain, sealed);
        Ok(())
    }

    /// Seals for [`seal`](Self::seal) only: two seals with one nonce reveal the content.
    fn seal_with(&self, nonce: &[u8; NONCE_BYTES], about: &[u8], plain: &[u8], sealed: &mut [u8]) {
        let (front, rest) = sealed.split_at_mut(NONCE_BYTES);
        let (text, tag) = rest.split_at_mut(plain.len());
        front.copy_from_slice(nonce);
        let mut encryptor = self.with(nonce).encryptor(about);
        encryptor.update(plain, text);
        tag.copy_from_slice(&encryptor.finalize());
    }

    /// Fills `plain`, whose length is that before sealing. On an error it holds nothing
    /// of the content.
    pub(crate) fn open(
        &self,
        about: &[u8],
        sealed: &[u8],
        plain: &mut [u8],
    ) -> Result<(), Unsealed> {
        let Some((nonce, rest)) = sealed.split_first_chunk() else {
            return Err(Unsealed);
        };
        let Some((text, tag)) = rest.split_last_chunk() else {
            return Err(Unsealed);
        };
        if text.len() != plain.len() {
            return Err(Unsealed);
        }
        // Holds what it decrypts back, and wipes it unless the tag is right.
        let mut decryptor = self.with(nonce).decryptor(about, plain);
        let decrypted = decryptor.update(text);
        decrypted
            .and_then(|()| decryptor.finalize(tag))
            .map(|_| ())
            .map_err(|_| Unsealed)
    }

    fn with(&self, nonce: &[u8; NONCE_BYTES]) -> Aegis128L<TAG_BYTES> {
        Aegis128L::new(&self.0, nonce)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABOUT: &[u8] = b"the name of a chunk";

    fn secrets(byte: u8) -> Secrets {
        Secrets::new(&Key::from_bytes(&[byte; 32]))
    }

    fn sealed(plain: &[u8]) -> Vec<u8> {
        let mut bytes = vec![1; plain.len() + OVERHEAD_BYTES];
        secrets(3).chunks.seal(ABOUT, plain, &mut bytes).unwrap();
        bytes
    }

    fn open(cipher: &Cipher, about: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let mut plain = vec![0; sealed.len().saturating_sub(OVERHEAD_BYTES)];
        let opened = cipher.open(about, sealed, &mut plain);
        opened.is_ok().then_some(plain)
    }

    #[test]
    fn what_was_sealed_opens() {
        for len in [0, 1, 15, 16, 17, 31, 32, 33, 4096, 262_144] {
            let plain: Vec<u8> = (0..=250).cycle().take(len).collect();
            let bytes = sealed(&plain);
            assert_eq!(bytes.len(), plain.len() + OVERHEAD_BYTES);
            assert_eq!(
                open(&secrets(3).chunks, ABOUT, &bytes),
                Some(plain),
                "{len}"
            );
        }
    }

    #[test]
    fn every_flipped_bit_and_every_missing_byte_is_noticed() {
        let bytes = sealed(&[7; 100]);
        let cipher = secrets(3).chunks;
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(&cipher, ABOUT, &damaged), None, "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert_eq!(open(&cipher, ABOUT, &bytes[..len]), None, "{len} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(open(&cipher, ABOUT, &longer), None);
    }

    #[test]
    fn what_does_not_open_leaves_nothing_of_its_content() {
        let mut bytes = sealed(&[7; 100]);
        *bytes.last_mut().unwrap() ^= 1;
        let mut plain = [1; 100];
        let opened = secrets(3).chunks.open(ABOUT, &bytes, &mut plain);
        assert_eq!((opened, plain), (Err(Unsealed), [0; 100]));
        let mut short = [1; 99];
        let opened = secrets(3)
            .chunks
            .open(ABOUT, &sealed(&[7; 100]), &mut short);
        assert_eq!((opened, short), (Err(Unsealed), [1; 99]));
    }

    #[test]
    fn another_key_purpose_or_name_does_not_open() {
        let bytes = sealed(b"content");
        let opens = |cipher: &Cipher, about| open(cipher, about, &bytes).is_some();
        assert!(opens(&secrets(3).chunks, ABOUT));
        assert!(!opens(&secrets(3).chunks, b"another name"));
        assert!(!opens(&secrets(3).manifests, ABOUT));
        assert!(!opens(&secrets(4).chunks, ABOUT));
    }

    #[test]
    fn no_nonce_is_seen_twice() {
        let nonces: std::collections::HashSet<Vec<u8>> = (0..10_000)
            .map(|_| sealed(b"the same")[..NONCE_BYTES].to_vec())
            .collect();
        assert_eq!(nonces.len(), 10_000);
    }

    #[test]
    fn names_depend_on_the_key() {
        let name = secrets(1).name(b"chunk");
        assert_eq!(name, secrets(1).name(b"chunk"));
        assert_ne!(name, secrets(2).name(b"chunk"));
        assert_ne!(name, *blake3::hash(b"chunk").as_bytes());
    }

    /// A change of this is a new format: no store made before could be read.
    #[test]
    fn names_and_the_sealed_form_stay_what_they_are() {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let Secrets {
            chunks, manifests, ..
        } = secrets(3);
        let seal = |cipher: &Cipher| {
            let mut bytes = [0; 7 + OVERHEAD_BYTES];
            cipher.seal_with(&[5; NONCE_BYTES], ABOUT, b"content", &mut bytes);
            hex(&bytes[NONCE_BYTES..])
        };
        assert_eq!(hex(&secrets(3).name(b"chunk")[..8]), "dbac19e73207d0d7");
        assert_eq!(
            seal(&chunks),
            "d7bc8a2f4405b9663f1eabcae0d060842e7f95b8e1d87e"
        );
        assert_eq!(
            seal(&manifests),
            "d874c1434bf125e3934aae8d2803cbe128b992bcbc07bb"
        );
    }
}
