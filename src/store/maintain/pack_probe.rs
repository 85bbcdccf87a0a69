//! Packs that may be damaged: what is left of one, and giving it back its header.

use std::fs::File;
use std::io;

use crate::store::format::pack::{HEADER_LEN, PackError, PackName, has_header};
use crate::store::format::store_folder::Store;
use crate::store::fs::ops;

/// A pack's file as it is, whatever it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) len: u64,
    pub(crate) header_fits: bool,
}

/// Looks at the pack of this name.
pub(crate) fn probe(store: &Store, name: PackName) -> Result<Probe, PackError> {
    let path = store.pack_file(name);
    let read = File::open(&path).and_then(|file| {
        let len = file.metadata()?.len();
        let header_fits = match has_header(&file, name) {
            // A file may end anywhere.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            read => read?,
        };
        Ok(Probe { len, header_fits })
    });
    read.map_err(|source| PackError::Read { path, source })
}

/// Writes the header of a pack again, durably, after the chunks in it have proved which
/// pack it is; `first` is where the first of them lies that is needed. Cut short, it leaves a
/// header that does not fit, as before.
pub(crate) fn mend_header(store: &Store, name: PackName, first: u64) -> io::Result<()> {
    let file = ops::open(&store.pack_file(name))?;
    if first < HEADER_LEN as u64 {
        ops::write_at(&file, &name.common(1), 0)?;
    } else {
        ops::write_at(&file, &name.header(), 0)?;
    }
    ops::sync(&file)
}
