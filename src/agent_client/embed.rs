//! Installation of the libraries that a job preloads: a file, and environment variables.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::wire::{TOKEN_LEN, TOKEN_VARIABLE};
use crate::clock;

/// Variable of the dynamic loader for libraries to load before a program's own.
pub const PRELOAD_VARIABLE: &str = "LD_PRELOAD";
/// Prefix of the agent's file name.
pub const LIBRARY_PREFIX: &str = "ckpt-run-agent-";
/// Mode that allows reading and execution for all: the job may run as another user.
const MODE: u32 = 0o755;
/// Characters that `LD_PRELOAD` treats as separators or expands: the path must not contain them.
const SEPARATORS: &[u8] = b" :$";

/// Library compiled by `build.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// Keeps the job's memory on the GPU (`src/agent`).
    Agent,
    /// Reports the files that the job changes (`src/witness`).
    Witness,
}

impl Library {
    const fn bytes(self) -> &'static [u8] {
        match self {
            Self::Agent => include_bytes!(concat!(env!("OUT_DIR"), "/ckpt-run-agent.so")),
            Self::Witness => include_bytes!(concat!(env!("OUT_DIR"), "/ckpt-run-witness.so")),
        }
    }

    const fn prefix(self) -> &'static str {
        match self {
            Self::Agent => LIBRARY_PREFIX,
            Self::Witness => "ckpt-run-witness-",
        }
    }
}

/// Writes a library into a folder that the job's user can access, under a name that contains its hash; an existing
/// correct file is left unchanged. Returns the path to preload.
///
/// # Errors
/// The library cannot be written, or the folder's path has a character that is not allowed in `LD_PRELOAD`.
pub fn install(library: Library, folder: &Path) -> io::Result<PathBuf> {
    let folder = folder.canonicalize()?;
    let bytes = folder.as_os_str().as_bytes();
    if bytes.iter().any(|byte| SEPARATORS.contains(byte)) {
        let reason = format!(
            "{} contains a space, a colon or a dollar sign, which LD_PRELOAD does not allow; use another folder for \
             the images (--store)",
            folder.display()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    let hash = blake3::hash(library.bytes()).to_hex();
    let path = folder.join(format!("{}{}.so", library.prefix(), &hash[..16]));
    if !is_right(&path, library) {
        let mut file = tempfile::NamedTempFile::new_in(&folder)?;
        file.write_all(library.bytes())?;
        file.as_file()
            .set_permissions(Permissions::from_mode(MODE))?;
        file.as_file().sync_all()?;
        file.persist(&path)?;
    }
    Ok(path)
}

fn is_right(path: &Path, library: Library) -> bool {
    let Ok(metadata) = fs::symlink_metadata(path) else {
        return false;
    };
    metadata.is_file()
        && metadata.mode() & 0o7777 == MODE
        && metadata.len() == library.bytes().len() as u64
        && fs::read(path).is_ok_and(|bytes| bytes == library.bytes())
}

/// Returns the value of [`PRELOAD_VARIABLE`] for a library. Libraries that the job preloads already follow it.
#[must_use]
pub fn preload_before(path: &Path, existing: Option<&OsStr>) -> OsString {
    let mut preload = path.as_os_str().to_owned();
    if let Some(existing) = existing.filter(|existing| !existing.is_empty()) {
        preload.push(":");
        preload.push(existing);
    }
    preload
}

/// Returns the environment variables that a job needs for the agent at `path`.
#[must_use]
pub fn environment(
    path: &Path,
    token: &Token,
    existing_ld_preload: Option<&OsStr>,
) -> Vec<(OsString, OsString)> {
    let preload = preload_before(path, existing_ld_preload);
    vec![
        (PRELOAD_VARIABLE.into(), preload),
        (TOKEN_VARIABLE.into(), token.to_string().into()),
    ]
}

/// Secret part of the names of a run's agents: 128 random bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Token([u8; TOKEN_LEN / 2]);

impl Token {
    /// Generates a token.
    ///
    /// # Errors
    /// The kernel has no random bytes.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; TOKEN_LEN / 2];
        bytes.copy_from_slice(&clock::random()?[..TOKEN_LEN / 2]);
        Ok(Self(bytes))
    }
}

/// Error for text that is not a token.
#[derive(Debug, thiserror::Error)]
#[error("an agent's token has {TOKEN_LEN} hexadecimal digits, in lower case")]
pub struct TokenError;

impl fmt::Display for Token {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(TokenError),
        };
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let mut bytes = [0; TOKEN_LEN / 2];
        if pairs.len() != bytes.len() || !rest.is_empty() {
            return Err(TokenError);
        }
        for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Ok(Self(bytes))
    }
}

impl From<Token> for String {
    fn from(token: Token) -> Self {
        token.to_string()
    }
}

impl TryFrom<String> for Token {
    type Error = TokenError;

    fn try_from(text: String) -> Result<Self, TokenError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_library_lies_readable_for_all_and_is_written_once() {
        let folder = tempfile::tempdir().unwrap();
        let (library, bytes) = (Library::Agent, Library::Agent.bytes());
        let path = install(library, folder.path()).unwrap();
        let first = fs::metadata(&path).unwrap();
        assert_eq!(first.permissions().mode() & 0o7777, 0o755);
        assert_eq!(install(library, folder.path()).unwrap(), path);
        assert_eq!(fs::metadata(&path).unwrap().ino(), first.ino());
        for damage in [&b""[..], b"x", &bytes[..bytes.len() - 1]] {
            fs::write(&path, damage).unwrap();
            assert_eq!(install(library, folder.path()).unwrap(), path);
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        for name in ["a b", "a:b", "$ORIGIN"] {
            let folder = folder.path().join(name);
            fs::create_dir(&folder).unwrap();
            assert_eq!(
                install(library, &folder).unwrap_err().kind(),
                std::io::ErrorKind::InvalidInput
            );
        }
    }

    #[test]
    fn nothing_is_linked_to_the_libraries() {
        for library in [Library::Agent, Library::Witness].map(Library::bytes) {
            let has = |text: &[u8]| library.windows(text.len()).any(|bytes| bytes == text);
            assert!(has(b"dl_iterate_phdr") && !has(b"libc.so") && !has(b"GLIBC"));
            assert!(library.starts_with(b"\x7fELF") && library.len() < 64 << 10);
        }
    }

    #[test]
    fn a_library_precedes_the_jobs_own_preloads() {
        let value = |existing: Option<&str>| {
            preload_before(Path::new("/a.so"), existing.map(std::ffi::OsStr::new))
        };
        assert_eq!(value(None), "/a.so");
        assert_eq!(value(Some("")), "/a.so");
        assert_eq!(value(Some("b.so c.so")), "/a.so:b.so c.so");
    }

    #[test]
    fn a_token_is_its_text() {
        let token = Token::random().unwrap();
        assert_ne!(token, Token::random().unwrap());
        assert_eq!(token.to_string().parse::<Token>().unwrap(), token);
        let text = serde_json::to_string(&token).unwrap();
        assert_eq!(text, format!("\"{token}\""));
        assert_eq!(serde_json::from_str::<Token>(&text).unwrap(), token);
        let text = token.to_string();
        for wrong in [
            "",
            "00",
            &text[1..],
            &format!("{text}0"),
            &format!("{}G", &text[1..]),
            &text
                .to_uppercase()
                .replace(|digit: char| digit.is_ascii_digit(), "A"),
        ] {
            assert!(wrong.parse::<Token>().is_err(), "{wrong}");
        }
    }
}
