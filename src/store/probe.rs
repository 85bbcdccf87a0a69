//! Packs that may be damaged: what is left of one, and giving it back its header.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::disk;
use super::layout::Store;
use super::pack::{COMMON_LEN, HEADER_LEN, PackError, PackName, Salt, read_header};

/// A pack's file as it is, whatever it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Probe {
    pub(super) len: u64,
    pub(super) header_fits: bool,
    /// What lies where the salt belongs, if the header does not say that there is none.
    pub(super) salt: Salt,
}

/// Looks at the pack of this name.
pub(super) fn probe(store: &Store, name: PackName) -> Result<Probe, PackError> {
    let path = store.pack_file(name);
    let read = File::open(&path).and_then(|file| {
        let len = file.metadata()?.len();
        let whole = some(read_header(&file, name))?.flatten();
        let mut left = Salt::default();
        if whole.is_none() {
            some(file.read_exact_at(&mut left, COMMON_LEN as u64))?;
        }
        Ok(Probe {
            len,
            header_fits: whole.is_some(),
            salt: whole.unwrap_or(left),
        })
    });
    read.map_err(|source| PackError::Read { path, source })
}

/// A file may end anywhere.
fn some<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        read => read.map(Some),
    }
}

/// Writes the header of a pack again, durably, after the chunks in it have proved which
/// pack it is; `first` is where the first of them lies that is needed. Cut short, it leaves a
/// header that does not fit, as before.
pub(super) fn mend_header(store: &Store, name: PackName, first: u64) -> io::Result<()> {
    let file = disk::open_or_create(&store.pack_file(name), 0o600)?;
    if first < HEADER_LEN as u64 {
        disk::write_at(&file, &name.common(1), 0)?;
    } else {
        // The salt stays, which nothing else knows.
        let mut salt = Salt::default();
        file.read_exact_at(&mut salt, COMMON_LEN as u64)?;
        disk::write_at(&file, &name.header(salt), 0)?;
    }
    disk::sync(&file)
}
