//! Packs: files that consist of a header and stored chunks.
//!
//! ```text
//! 0   magic "CKPTPACK"        8 bytes
//! 8   format                  u32, little endian like all numbers
//! 12  number within the image  u32
//! 16  image that wrote the pack u64
//! 24  zero                    40 bytes
//! 64  chunks, as the manifests describe them, each sealed in an encrypted store
//! ```
//! In format 1 the chunks begin at 24. A [sink](crate::store::write::pack_sink) writes packs; a completed pack never
//! changes. This module is independent of manifests, which record the positions of chunks.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::image_id::ImageId;
use super::store_folder::Store;
use crate::known_errors::is_loss;
use crate::store::format::FORMAT;
use crate::store::read::pending_image::PendingImage;
use crate::sync::locked;

/// Lowest offset of a chunk in any format.
pub(crate) const HEADER_BYTES: u64 = 24;
/// Length of the header in the present format.
pub(crate) const HEADER_LEN: usize = 64;
/// Length of the header's part that all formats share.
pub(crate) const COMMON_LEN: usize = 24;
const MAGIC: [u8; 8] = *b"CKPTPACK";

/// Maximum number of packs that a reader keeps open, so that their chunks stay readable if the packs are removed
/// meanwhile. This covers some hundred GiB and uses a quarter of the usual limit of 1024 descriptors.
const KEPT_OPEN_MAX: usize = if cfg!(test) { 3 } else { 256 };
/// Maximum number of further packs open at the same time.
const REOPENED_MAX: usize = if cfg!(test) { 2 } else { 64 };

/// Name of a pack: the image that wrote it, and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackName {
    /// The image that wrote the pack; later ones may refer to it.
    pub image: ImageId,
    /// Number of the pack within that image.
    pub number: u32,
}

impl PackName {
    pub(crate) fn from_file_name(name: &str) -> Option<Self> {
        let (image, number) = name.strip_suffix(".pack")?.split_once('-')?;
        let pack = Self {
            image: ImageId::from_file_name(image)?,
            number: number.parse().ok()?,
        };
        (pack.to_string() == name).then_some(pack)
    }

    /// Returns the pack's header.
    pub(crate) fn header(self) -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        header[..COMMON_LEN].copy_from_slice(&self.common(FORMAT));
        header
    }

    /// Returns the part of the header that all formats share.
    pub(crate) fn common(self, format: u32) -> [u8; COMMON_LEN] {
        let mut common = [0; COMMON_LEN];
        common[..8].copy_from_slice(&MAGIC);
        common[8..12].copy_from_slice(&format.to_le_bytes());
        common[12..16].copy_from_slice(&self.number.to_le_bytes());
        common[16..].copy_from_slice(&self.image.number().to_le_bytes());
        common
    }
}

impl fmt::Display for PackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:02}.pack", self.image, self.number)
    }
}

/// Pack as listed in a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pack {
    /// The file.
    pub name: PackName,
    /// Its length, header included.
    pub len: u64,
}

/// Error for a pack that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The file is missing or cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The pack.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The length of the file has changed.
    #[error("{path} has {found} bytes instead of {expected}")]
    Length {
        /// The pack.
        path: PathBuf,
        /// Length of the file.
        found: u64,
        /// Length of the completed pack.
        expected: u64,
    },
    /// The file has the header of another pack, or none.
    #[error("{path} does not have this pack's header")]
    Header {
        /// The pack.
        path: PathBuf,
    },
}

impl PackError {
    /// Returns true if the chunks are lost, false if the cause may be temporary.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            Self::Read { source, .. } => is_loss(source),
            Self::Length { .. } | Self::Header { .. } => true,
        }
    }
}

/// Returns the difference between a pack and its entry in the manifest, if there is one.
pub(crate) fn inspect(store: &Store, pack: Pack) -> Option<PackError> {
    open(store, pack).err()
}

/// Opens a pack and checks its length and header.
fn open(store: &Store, pack: Pack) -> Result<File, PackError> {
    let path = store.pack_file(pack.name);
    let failed = |source| PackError::Read {
        path: path.clone(),
        source,
    };
    let file = File::open(&path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?.len();
    if found != pack.len {
        return Err(PackError::Length {
            path,
            found,
            expected: pack.len,
        });
    }
    if has_header(&file, pack.name).map_err(failed)? {
        Ok(file)
    } else {
        Err(PackError::Header { path })
    }
}

/// Returns true if the file has the header of the pack with this name.
pub(crate) fn has_header(file: &File, name: PackName) -> io::Result<bool> {
    let mut common = [0; COMMON_LEN];
    file.read_exact_at(&mut common, 0)?;
    if common == name.common(1) {
        return Ok(true);
    }
    let mut header = [0; HEADER_LEN];
    file.read_exact_at(&mut header, 0)?;
    Ok(header == name.header())
}

/// Open packs of an image. Packs opened at the beginning stay readable if the image is removed meanwhile. If there are
/// more packs than can be kept open, the others are opened on demand.
#[derive(Debug)]
pub(crate) struct PackFiles {
    store: Store,
    packs: Vec<Pack>,
    admission: Admission,
    /// Packs that stay open, the first of the list.
    kept: Vec<File>,
    reopened: Mutex<HashMap<u32, Arc<File>>>,
    /// Download that the packs are part of.
    pending: Option<Arc<PendingImage>>,
}

/// Check of the files opened as packs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    /// Length and header must match the manifest.
    Right,
    /// Only the name must match: the caller looks for usable parts.
    Named,
}

impl PackFiles {
    /// Opens all packs once, so that an image with a missing pack fails before the first read.
    pub(crate) fn new(store: &Store, packs: Vec<Pack>) -> Result<Self, PackError> {
        let mut kept = Vec::new();
        for pack in &packs {
            let file = open(store, *pack)?;
            if kept.len() < KEPT_OPEN_MAX {
                kept.push(file);
            }
        }
        Ok(Self {
            store: store.clone(),
            packs,
            admission: Admission::Right,
            kept,
            reopened: Mutex::default(),
            pending: None,
        })
    }

    /// Creates the table for an image that is being downloaded: a read waits for the bytes.
    pub(crate) fn arriving(store: &Store, pending: Arc<PendingImage>) -> Self {
        Self {
            packs: pending.manifest().packs.clone(),
            pending: Some(pending),
            ..Self::unchecked(store, Vec::new())
        }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Creates the table for packs that may be damaged or missing. Lengths and headers are not checked, and each pack
    /// is opened on its first read.
    pub(crate) fn unchecked(store: &Store, packs: Vec<Pack>) -> Self {
        Self {
            store: store.clone(),
            packs,
            admission: Admission::Named,
            kept: Vec::new(),
            reopened: Mutex::default(),
            pending: None,
        }
    }

    /// Fills `bytes` from the pack with this index.
    pub(crate) fn read(&self, index: u32, offset: u64, bytes: &mut [u8]) -> Result<(), PackError> {
        let read = match (&self.pending, self.kept.get(index as usize)) {
            (Some(pending), _) => pending.read(index, offset, bytes),
            (None, Some(file)) => file.read_exact_at(bytes, offset),
            (None, None) => self.reopen(index)?.read_exact_at(bytes, offset),
        };
        read.map_err(|source| PackError::Read {
            path: self.store.pack_file(self.packs[index as usize].name),
            source,
        })
    }

    /// Drops a part of a pack from the page cache, as a hint: the caller will not read it again.
    pub(crate) fn forget(&self, index: u32, offset: u64, len: u64) {
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        let drop = |file: &File| posix_fadvise(file, signed(offset), signed(len), advice);
        let _ = match self.kept.get(index as usize) {
            Some(file) => drop(file),
            None => self.reopen(index).map_or(Ok(()), |file| drop(&file)),
        };
    }

    fn reopen(&self, index: u32) -> Result<Arc<File>, PackError> {
        let mut files = locked(&self.reopened);
        if let Some(file) = files.get(&index) {
            return Ok(Arc::clone(file));
        }
        if files.len() >= REOPENED_MAX {
            files.clear();
        }
        let pack = self.packs[index as usize];
        let file = match self.admission {
            Admission::Right => open(&self.store, pack)?,
            Admission::Named => {
                let path = self.store.pack_file(pack.name);
                File::open(&path).map_err(|source| PackError::Read { path, source })?
            }
        };
        let file = Arc::new(file);
        files.insert(index, Arc::clone(&file));
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::store::tests::support::temporary_store;
    use crate::store::write::pack_sink::PackSink;

    const NAME: PackName = PackName {
        image: ImageId::FIRST,
        number: 0,
    };

    /// Writes a pack that holds the given bytes.
    fn written(store: &Store, image: ImageId, bytes: &[u8]) -> (Pack, u64) {
        let sink = PackSink::new(store, image);
        let (_, offset) = sink.append(bytes).unwrap();
        (sink.seal().unwrap().remove(0), offset)
    }

    #[test]
    fn pack_names_have_one_form_only() {
        assert_eq!(NAME.to_string(), "000001-00.pack");
        assert_eq!(PackName::from_file_name("000001-00.pack"), Some(NAME));
        assert_eq!(
            PackName::from_file_name("000001-100.pack").unwrap().number,
            100
        );
        for name in [
            "000001-0.pack",
            "1-00.pack",
            "000001-+1.pack",
            "000001-000.pack",
            "000001-00",
            "-.pack",
        ] {
            assert_eq!(PackName::from_file_name(name), None, "{name:?}");
        }
    }

    #[test]
    fn a_pack_of_another_length_name_or_header_is_refused() {
        let (_folder, store) = temporary_store();
        let (pack, _) = written(&store, ImageId::FIRST, b"chunk");
        let path = store.pack_file(NAME);
        open(&store, pack).unwrap();
        let longer = Pack {
            len: pack.len + 1,
            ..pack
        };
        assert!(matches!(
            open(&store, longer),
            Err(PackError::Length { .. })
        ));
        let good = fs::read(&path).unwrap();
        for at in 0..HEADER_LEN {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            fs::write(&path, bad).unwrap();
            let opened = open(&store, pack);
            assert!(matches!(opened, Err(PackError::Header { .. })), "{at}");
        }
        let other = PackName { number: 1, ..NAME };
        fs::rename(&path, store.pack_file(other)).unwrap();
        assert!(matches!(open(&store, pack), Err(PackError::Read { .. })));
        fs::write(store.pack_file(other), good).unwrap();
        let renamed = Pack {
            name: other,
            ..pack
        };
        assert!(matches!(
            open(&store, renamed),
            Err(PackError::Header { .. })
        ));
    }

    #[test]
    fn a_pack_of_format_1_has_a_short_header() {
        let (_folder, store) = temporary_store();
        let bytes = [&NAME.common(1)[..], b"chunk"].concat();
        fs::write(store.pack_file(NAME), &bytes).unwrap();
        let pack = Pack {
            name: NAME,
            len: bytes.len() as u64,
        };
        let files = PackFiles::new(&store, vec![pack]).unwrap();
        let mut chunk = [0; 5];
        files.read(0, HEADER_BYTES, &mut chunk).unwrap();
        assert_eq!(&chunk, b"chunk");
    }

    #[test]
    fn packs_that_are_kept_open_stay_readable_when_they_are_removed() {
        let (_folder, store) = temporary_store();
        let mut offset = 0;
        let mut packs = Vec::new();
        for number in 1..=7 {
            let image = ImageId::new(number).unwrap();
            let written = written(&store, image, &number.to_le_bytes());
            packs.push(written.0);
            offset = written.1;
        }
        let files = PackFiles::new(&store, packs.clone()).unwrap();
        let read = |index: u32| {
            let mut bytes = [0; 8];
            let read = files.read(index, offset, &mut bytes);
            read.map(|()| assert_eq!(u64::from_le_bytes(bytes), u64::from(index) + 1))
        };
        for index in (0..7).chain((0..7).rev()) {
            read(index).unwrap();
        }
        for pack in &packs {
            fs::remove_file(store.pack_file(pack.name)).unwrap();
        }
        for index in 0..3 {
            read(index).unwrap();
        }
        let open: Vec<u32> = (3..7).filter(|index| read(*index).is_ok()).collect();
        assert_eq!(open.len(), REOPENED_MAX, "{open:?}");
    }
}
