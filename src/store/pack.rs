//! Packs: files of stored chunks, one after the other behind a header.
//!
//! ```text
//! 0   magic "CKPTPACK"        8 bytes
//! 8   format                  u32, little endian like all numbers
//! 12  number within image     u32
//! 16  image that wrote it     u64
//! 24  chunks, as the manifests describe them
//! ```
//! A pack is written by one worker, sealed (cut to length and synced), and never
//! changed. Knows nothing of manifests: where a chunk lies is the caller's to remember.

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};

use super::error::is_loss;
use super::id::ImageId;
use super::layout::Store;
use super::sync::locked;

/// A worker goes on in a new pack after this: small enough that removing an image
/// gives back most of its space, large enough that packs stay few.
/// Tests want several packs without a gibibyte each.
const PACK_BYTES_MAX: u64 = if cfg!(test) { 2 << 20 } else { 1 << 30 };

/// Length of the header; the first chunk lies there.
pub(super) const HEADER_BYTES: u64 = 24;
const HEADER_LEN: usize = 24;
const MAGIC: [u8; 8] = *b"CKPTPACK";

/// Disk space is taken and writing back is started in steps of this, so that the sync
/// at the end finds little to do. Writing 4 GiB was seven times as fast as without.
const STEP_BYTES: u64 = 64 << 20;
/// No space is taken ahead for less than this: most packs of small jobs.
const STEP_FROM_BYTES: u64 = 8 << 20;

/// Packs that a reader keeps open: well below the usual limit of 1024 descriptors.
const OPEN_MAX: usize = 128;

/// The name of a pack: the image that wrote it and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackName {
    /// The image that wrote the pack; later ones may refer to it.
    pub image: ImageId,
    /// Counts the packs of that image.
    pub number: u32,
}

impl PackName {
    pub(super) fn from_file_name(name: &str) -> Option<Self> {
        let (image, number) = name.strip_suffix(".pack")?.split_once('-')?;
        let pack = Self {
            image: ImageId::from_file_name(image)?,
            number: number.parse().ok()?,
        };
        (pack.to_string() == name).then_some(pack)
    }

    pub(super) fn header(self) -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&1_u32.to_le_bytes());
        header[12..16].copy_from_slice(&self.number.to_le_bytes());
        header[16..].copy_from_slice(&self.image.number().to_le_bytes());
        header
    }
}

impl fmt::Display for PackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:02}.pack", self.image, self.number)
    }
}

/// A pack as a manifest lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pack {
    /// Which file.
    pub name: PackName,
    /// Its length, header included.
    pub len: u64,
}

/// A pack being written. Dropping it leaves the file, which no manifest names.
pub(super) struct PackWriter {
    name: PackName,
    file: File,
    len: u64,
    allocated: u64,
    written_back: u64,
}

impl PackWriter {
    pub(super) fn create(store: &Store, name: PackName) -> io::Result<Self> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(store.pack_file(name))?;
        file.write_all_at(&name.header(), 0)?;
        Ok(Self {
            name,
            file,
            len: HEADER_BYTES,
            allocated: STEP_FROM_BYTES,
            written_back: 0,
        })
    }

    pub(super) fn name(&self) -> PackName {
        self.name
    }

    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.len + bytes as u64 <= PACK_BYTES_MAX
    }

    /// Appends a stored chunk and says at which offset it lies.
    pub(super) fn append(&mut self, stored: &[u8]) -> io::Result<u64> {
        let offset = self.len;
        self.file.write_all_at(stored, offset)?;
        self.len += stored.len() as u64;
        self.keep_ahead();
        Ok(offset)
    }

    /// Makes the pack durable; its name is, once the folder is synced.
    pub(super) fn seal(self) -> io::Result<Pack> {
        // Gives back what was allocated ahead.
        self.file.set_len(self.len)?;
        self.file.sync_all()?;
        Ok(Pack {
            name: self.name,
            len: self.len,
        })
    }

    /// Both are hints: a file system that takes neither is only slower, and where
    /// space runs out the write itself says so.
    fn keep_ahead(&mut self) {
        if self.len > self.allocated {
            let (offset, bytes) = (signed(self.allocated), signed(STEP_BYTES));
            let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let _ = fallocate(&self.file, keep, offset, bytes);
            self.allocated += STEP_BYTES;
        }
        if self.len - self.written_back >= STEP_BYTES {
            // Linux starts to write the dirty pages of the range and does not wait.
            let (offset, bytes) = (signed(self.written_back), signed(STEP_BYTES));
            let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
            let _ = posix_fadvise(&self.file, offset, bytes, advice);
            self.written_back += STEP_BYTES;
        }
    }
}

/// A pack is about as long as `PACK_BYTES_MAX` at most, far from the sign.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// A pack that cannot serve: the chunks in it are lost.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The file is missing or the system fails to read it.
    #[error("cannot read {path}")]
    Read {
        /// The pack.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is shorter or longer than it was.
    #[error("{path} has {found} bytes instead of {expected}")]
    Length {
        /// The pack.
        path: PathBuf,
        /// Length of the file.
        found: u64,
        /// Length when the pack was sealed.
        expected: u64,
    },
    /// The file is not this pack.
    #[error("{path} does not begin as this pack does")]
    Header {
        /// The pack.
        path: PathBuf,
    },
}

impl PackError {
    /// Whether the chunks are lost, rather than out of reach for now.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            Self::Read { source, .. } => is_loss(source),
            Self::Length { .. } | Self::Header { .. } => true,
        }
    }
}

/// Opens a pack after checking that it is the one the manifest means.
pub(super) fn open(store: &Store, pack: Pack) -> Result<File, PackError> {
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
    let mut header = [0; HEADER_LEN];
    file.read_exact_at(&mut header, 0).map_err(failed)?;
    if header != pack.name.header() {
        return Err(PackError::Header { path });
    }
    Ok(file)
}

/// The packs of an image, open as needed.
#[derive(Debug)]
pub(super) struct PackFiles {
    store: Store,
    packs: Vec<Pack>,
    open: Mutex<HashMap<u32, Arc<File>>>,
}

impl PackFiles {
    /// Checks all packs once, so that an image that lacks one fails before its first byte.
    pub(super) fn new(store: &Store, packs: Vec<Pack>) -> Result<Self, PackError> {
        for pack in &packs {
            open(store, *pack)?;
        }
        Ok(Self {
            store: store.clone(),
            packs,
            open: Mutex::default(),
        })
    }

    /// Fills `bytes` from a pack, by its place in the table.
    pub(super) fn read(&self, index: u32, offset: u64, bytes: &mut [u8]) -> Result<(), PackError> {
        let pack = self.packs[index as usize];
        self.file(index, pack)?
            .read_exact_at(bytes, offset)
            .map_err(|source| PackError::Read {
                path: self.store.pack_file(pack.name),
                source,
            })
    }

    fn file(&self, index: u32, pack: Pack) -> Result<Arc<File>, PackError> {
        let mut files = locked(&self.open);
        if let Some(file) = files.get(&index) {
            return Ok(Arc::clone(file));
        }
        if files.len() >= OPEN_MAX {
            files.clear();
        }
        let file = Arc::new(open(&self.store, pack)?);
        files.insert(index, Arc::clone(&file));
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::temporary_store;

    const NAME: PackName = PackName {
        image: ImageId::FIRST,
        number: 0,
    };

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
    fn a_sealed_pack_has_no_space_taken_ahead() {
        use std::os::unix::fs::MetadataExt;
        let (_folder, store) = temporary_store();
        let mut writer = PackWriter::create(&store, NAME).unwrap();
        let part = vec![7; 1 << 20];
        for _ in 0..70 {
            writer.append(&part).unwrap();
        }
        let pack = writer.seal().unwrap();
        assert_eq!(pack.len, HEADER_BYTES + (70 << 20));
        let found = store.pack_file(NAME).metadata().unwrap();
        assert_eq!((found.len(), found.mode() & 0o777), (pack.len, 0o600));
        assert!(
            found.blocks() * 512 < pack.len + (4 << 20),
            "{}",
            found.blocks()
        );
    }

    #[test]
    fn a_pack_is_never_overwritten() {
        let (_folder, store) = temporary_store();
        PackWriter::create(&store, NAME).unwrap().seal().unwrap();
        let error = PackWriter::create(&store, NAME).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn a_pack_of_another_length_name_or_magic_is_refused() {
        let (_folder, store) = temporary_store();
        let mut writer = PackWriter::create(&store, NAME).unwrap();
        writer.append(b"chunk").unwrap();
        let pack = writer.seal().unwrap();
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
        let other = PackName { number: 1, ..NAME };
        std::fs::rename(&path, store.pack_file(other)).unwrap();
        assert!(matches!(open(&store, pack), Err(PackError::Read { .. })));
        let renamed = Pack {
            name: other,
            ..pack
        };
        assert!(matches!(
            open(&store, renamed),
            Err(PackError::Header { .. })
        ));
    }
}
