//! Key of an encrypted store, and the check by which a store recognizes it.
//!
//! ```text
//! key-check   "ckpt-run key 1 <salt> <check>", both 64 hexadecimal digits
//! ```
//! The check is derived from the key and the salt. It reveals nothing about the key, which is random and cannot be
//! guessed. A store gets the file at its creation or never: it is written before the file `format`, which makes a
//! folder a store.
//!
//! The caller obtains the key.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use blake3::Hash as Digest;
use zeroize::{Zeroize, Zeroizing};

use crate::clock;
use crate::secret::Secret;

/// Name of the check's file.
pub(crate) const KEY_FILE: &str = "key-check";
const MAGIC: &str = "ckpt-run key 1 ";
/// A line of text; anything longer is not ours.
pub(crate) const KEY_FILE_BYTES_MAX: u64 = 256;

/// Context of the derived check. It must never change: a different text gives a different check.
const CHECK: &str = "ckpt-run 2026-11-21 store, key check";

/// Master key of a store: 32 random bytes from which all other keys are derived. Wiped on drop and never displayed.
pub struct Key(Secret<32>);

/// Random bytes that make the checks of two stores with the same key different.
type Salt = [u8; 32];

/// Reason for rejecting a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKey {
    /// The length is not 32 bytes.
    #[error("a key cannot have {len} bytes: a key is 64 hexadecimal digits or 32 random bytes")]
    Length {
        /// The given length.
        len: usize,
    },
    /// The key is text, which could be guessed.
    #[error(
        "text is not accepted as a key: a key is 64 hexadecimal digits or 32 random bytes, \
         and not made from words"
    )]
    Text,
    /// The key is 32 equal bytes, as in a file after a disk failure.
    #[error("a key of 32 equal bytes is not random: the file was never written, or is damaged")]
    Uniform,
}

impl Key {
    /// Generates a key.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    pub fn generate() -> io::Result<Self> {
        Ok(Self::from_bytes(&Zeroizing::new(clock::random()?)))
    }

    /// Reads a key: 64 hexadecimal digits with white space around them, or 32 raw bytes.
    ///
    /// # Errors
    /// See [`InvalidKey`]. The error contains no part of the text.
    pub fn parse(text: &[u8]) -> Result<Self, InvalidKey> {
        if let Ok(digits) = Digest::from_hex(text.trim_ascii()).map(Zeroizing::new) {
            return Self::checked(digits.as_bytes());
        }
        let is_text = text
            .iter()
            .all(|b| b.is_ascii_graphic() || b.is_ascii_whitespace());
        match <[u8; 32]>::try_from(text) {
            _ if is_text && text.len() >= 32 => Err(InvalidKey::Text),
            Ok(bytes) => Self::checked(&Zeroizing::new(bytes)),
            Err(_) => Err(InvalidKey::Length { len: text.len() }),
        }
    }

    /// Returns the key in the text form of [`parse`](Self::parse): 64 digits and a line end.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(2 * self.0.len() + 1));
        for byte in *self.0 {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        text.push('\n');
        text
    }

    pub(crate) fn from_bytes(secret: &[u8; 32]) -> Self {
        Self(Secret::copy_of(secret))
    }

    fn checked(secret: &[u8; 32]) -> Result<Self, InvalidKey> {
        if *secret == [secret[0]; 32] {
            return Err(InvalidKey::Uniform);
        }
        Ok(Self::from_bytes(secret))
    }

    /// Derives a key for one purpose.
    pub(crate) fn derive(&self, context: &str, salt: &[u8]) -> Zeroizing<[u8; 32]> {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(self.0.as_slice());
        hasher.update(salt);
        let derived = Zeroizing::new(*hasher.finalize().as_bytes());
        hasher.zeroize();
        derived
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// Check by which a store recognizes its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyCheck {
    salt: Salt,
    check: Digest,
}

/// Reason for rejecting a store's key check.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyCheckError {
    #[error("cannot read the file")]
    Read(#[source] io::Error),
    #[error("the file is damaged")]
    Damaged,
}

impl KeyCheck {
    /// Creates the check of a new store.
    pub(crate) fn new(key: &Key) -> io::Result<Self> {
        let salt = clock::random()?;
        let check = Self::check(key, &salt);
        Ok(Self { salt, check })
    }

    /// Reads the check from a file; `None` if the file does not exist.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, KeyCheckError> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(KeyCheckError::Read(error)),
        };
        let mut text = Vec::new();
        file.take(KEY_FILE_BYTES_MAX)
            .read_to_end(&mut text)
            .map_err(KeyCheckError::Read)?;
        Self::parse(&text).map(Some).ok_or(KeyCheckError::Damaged)
    }

    /// Returns the content of the check's file.
    pub(crate) fn to_text(self) -> String {
        let salt = Digest::from_bytes(self.salt).to_hex();
        format!("{MAGIC}{salt} {}\n", self.check.to_hex())
    }

    /// Returns true if the store was made with this key.
    pub(crate) fn fits(&self, key: &Key) -> bool {
        Self::check(key, &self.salt) == self.check
    }

    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let line = text.strip_prefix(MAGIC.as_bytes())?.strip_suffix(b"\n")?;
        let (salt, check) = line.split_at_checked(64)?;
        Some(Self {
            salt: *Digest::from_hex(salt).ok()?.as_bytes(),
            check: Digest::from_hex(check.strip_prefix(b" ")?).ok()?,
        })
    }

    fn check(key: &Key, salt: &Salt) -> Digest {
        Digest::from_bytes(*key.derive(CHECK, salt))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Key {
        Key::from_bytes(&[byte; 32])
    }

    fn read(text: &[u8]) -> Result<Option<KeyCheck>, KeyCheckError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(KEY_FILE);
        std::fs::write(&path, text).unwrap();
        KeyCheck::read(&path)
    }

    #[test]
    fn a_key_is_read_from_digits_and_from_bytes() {
        let key = Key::generate().unwrap();
        let text = key.to_text();
        assert_eq!((text.len(), text.ends_with('\n')), (65, true));
        let same = |text: &[u8]| *Key::parse(text).unwrap().0 == *key.0;
        assert!(same(text.as_bytes()) && same(text.trim().as_bytes()));
        assert!(same(
            format!("  {}\r\n", text.trim().to_uppercase()).as_bytes()
        ));
        assert!(same(key.0.as_slice()));
    }

    #[test]
    fn guessable_text_is_not_a_key() {
        let parse = |text: &[u8]| Key::parse(text).unwrap_err();
        assert_eq!(parse(b""), InvalidKey::Length { len: 0 });
        assert_eq!(parse(&[200; 31]), InvalidKey::Length { len: 31 });
        assert_eq!(parse(b"hunter2\n"), InvalidKey::Length { len: 8 });
        assert_eq!(parse(b"correct horse battery staple 123"), InvalidKey::Text);
        assert_eq!(parse("g".repeat(64).as_bytes()), InvalidKey::Text);
        assert_eq!(parse(&[0; 32]), InvalidKey::Uniform);
        assert_eq!(parse("00".repeat(32).as_bytes()), InvalidKey::Uniform);
    }

    #[test]
    fn nothing_shows_the_key() {
        let key = key(7);
        let shown = format!("{key:?} {:?}", KeyCheck::new(&key).unwrap());
        assert!(shown.starts_with("Key KeyCheck"), "{shown}");
        assert!(!shown.contains(key.to_text().trim()), "{shown}");
        let damaged = InvalidKey::Length { len: 3 }.to_string();
        assert!(!damaged.contains("hunter"), "{damaged}");
    }

    #[test]
    fn a_store_knows_its_key_again_and_no_other() {
        let check = KeyCheck::new(&key(1)).unwrap();
        let again = read(check.to_text().as_bytes()).unwrap().unwrap();
        assert_eq!(again, check);
        assert!(again.fits(&key(1)));
        assert!(!again.fits(&key(2)));
        assert_ne!(KeyCheck::new(&key(1)).unwrap().to_text(), check.to_text());
    }

    #[test]
    fn a_damaged_check_is_no_missing_one() {
        assert!(
            KeyCheck::read(Path::new("/no/such/file"))
                .unwrap()
                .is_none()
        );
        let text = KeyCheck::new(&key(1)).unwrap().to_text();
        for len in 0..text.len() {
            let cut = read(&text.as_bytes()[..len]).unwrap_err();
            assert!(matches!(cut, KeyCheckError::Damaged), "{len}");
        }
        for text in [text.replace("key 1", "key 2"), text.replace('\n', "0\n")] {
            assert!(read(text.as_bytes()).is_err(), "{text}");
        }
    }

    /// A change of these values would be a new format: existing stores could not be opened.
    #[test]
    fn key_checks_never_change() {
        let check = KeyCheck::check(&key(3), &[5; 32]).to_hex();
        assert_eq!(&check[..16], "fa5b438158bed6cc");
    }
}
