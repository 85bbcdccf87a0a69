//! The files that accumulate in the store's folder beside the images: copies of this program, and the data that
//! restores cut off from the job's files.
//!
//! An image maps the copy that made it, so a copy is kept as long as an image refers to it. If the facts of any image
//! cannot be read, all copies are kept. The caller holds the store's lock: no other sandbox runs.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::format::chain;
use crate::files::Held;
use crate::path_text;
use crate::sparse_file::allocated_bytes;
use crate::store::fs::durable::TEMPORARY_PREFIX;
use crate::store::{ImageEntry, ListError, ReadError, Store, StoreLock};

/// The folder of the copies in a store.
pub(crate) const COPIES: &str = "bin";
/// Prefix of their names; a part of their hash follows.
pub(crate) const COPY_PREFIX: &str = "ckpt-run-";
/// Number of the hash's digits in their names.
pub(crate) const COPY_DIGITS: usize = 16;

/// The folder of the data that restores cut off.
const ASIDE: &str = "aside";
/// Number of restores whose cut-off data is kept. A user who needs the data looks soon after the crash; for a job that
/// crashes every day, the data of some weeks is kept.
const ASIDE_KEPT: usize = 20;

/// Copies of the program that no image needs.
#[derive(Debug, Default)]
pub struct Copies {
    paths: Vec<PathBuf>,
    /// Their size on the disk.
    pub bytes: u64,
}

impl Copies {
    /// Finds the copies that are not needed; `needed` is the copy that this process runs.
    ///
    /// # Errors
    /// The images or the folder cannot be listed.
    pub fn find(
        store: &Store,
        _lock: &StoreLock,
        needed: Option<&Path>,
    ) -> Result<Self, ReadError> {
        let folder = store.path().join(COPIES);
        let Some(mut kept) = mapped(&store.images()?) else {
            return Ok(Self::default());
        };
        kept.extend(needed.and_then(Path::file_name).map(OsString::from));
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            entries => entries.map_err(|source| {
                ReadError::List(ListError {
                    path: folder.clone(),
                    source,
                })
            })?,
        };
        let mut copies = Self::default();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let is_file = entry.metadata().is_ok_and(|found| found.is_file());
            if is_file && is_ours(&name.to_string_lossy()) && !kept.contains(&name) {
                copies.bytes += entry.metadata().map_or(0, |found| allocated_bytes(&found));
                copies.paths.push(entry.path());
            }
        }
        Ok(copies)
    }

    /// Returns the number of copies.
    #[must_use]
    pub fn count(&self) -> usize {
        self.paths.len()
    }

    /// Removes the copies.
    ///
    /// # Errors
    /// The first copy that cannot be removed; others may already be removed.
    pub fn remove(&self) -> io::Result<()> {
        self.paths.iter().try_for_each(fs::remove_file)
    }
}

/// Removes the copies needed neither by an image nor by this process, only to free space.
pub(crate) fn remove_copies(store: &Store, lock: &StoreLock, needed: &Path) {
    let copies = match Copies::find(store, lock, Some(needed)) {
        Ok(copies) => copies,
        Err(error) => {
            tracing::warn!("cannot find old copies of the program: {}", chain(&error));
            return;
        }
    };
    if let Err(error) = copies.remove() {
        tracing::warn!(%error, "cannot remove an old copy of the program");
    }
}

/// Removes the large files that the store holds for images that are gone. The caller holds the store's lock, and no
/// image is being written.
pub fn remove_held(store: &Store) {
    match store.images() {
        Ok(images) => {
            let images = images.iter().map(|image| image.id.number()).collect();
            Held::of(store.path()).sweep(&images);
        }
        Err(error) => tracing::warn!("cannot list the images: {}", chain(&error)),
    }
}

/// Returns the names of all files that images have mapped or open; `None` if the facts of an image cannot be read.
fn mapped(images: &[ImageEntry]) -> Option<HashSet<OsString>> {
    #[derive(Deserialize)]
    struct Facts {
        files: Vec<Mapped>,
    }
    #[derive(Deserialize)]
    struct Mapped {
        #[serde(with = "path_text")]
        path: PathBuf,
    }
    let mut names = HashSet::new();
    for image in images {
        let facts: Facts = serde_json::from_slice(&image.meta).ok()?;
        // Compared by name: the store may have been moved.
        let files = facts.files.iter().filter_map(|file| file.path.file_name());
        names.extend(files.map(OsString::from));
    }
    Some(names)
}

/// Returns true if a file is a copy, or the remainder of one from a killed writer.
fn is_ours(name: &str) -> bool {
    let is_hash =
        |text: &str| text.len() == COPY_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    name.starts_with(TEMPORARY_PREFIX) || name.strip_prefix(COPY_PREFIX).is_some_and(is_hash)
}

/// Returns a name for the folder of a restore's cut-off data; removes the oldest such folders.
pub(crate) fn aside(store: &Path, image: impl std::fmt::Display, unix_ms: u64) -> PathBuf {
    let folder = store.join(ASIDE);
    forget_aside(&folder, ASIDE_KEPT - 1);
    folder.join(format!("{image}-{unix_ms}"))
}

/// Keeps the `keep` newest folders, by the time in their names.
fn forget_aside(folder: &Path, keep: usize) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    let mut found: Vec<(u64, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let (image, time) = name.to_str()?.split_once('-')?;
            image.parse::<crate::store::ImageId>().ok()?;
            Some((time.parse().ok()?, entry.path()))
        })
        .collect();
    found.sort();
    let old = found.len().saturating_sub(keep);
    for (_, path) in &found[..old] {
        if let Err(error) = fs::remove_dir_all(path) {
            tracing::warn!(folder = %path.display(), %error, "cannot remove the files that an old restore set aside");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::WriteOptions;

    const OLD: &str = "ckpt-run-00000000000000aa";
    const MAPPED: &str = "ckpt-run-00000000000000bb";
    const OURS: &str = "ckpt-run-00000000000000cc";

    fn names(folder: &Path) -> Vec<String> {
        let entries = folder.read_dir().unwrap().flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn write_image(store: &Store, lock: &StoreLock, meta: &str) {
        let options = WriteOptions {
            buffer: 4 << 20,
            workers: 1,
            level: 1,
        };
        let writer = store.begin(lock, options).unwrap();
        writer.commit(meta.as_bytes()).unwrap();
    }

    #[test]
    fn copies_of_the_program_that_no_image_maps_go_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create_or_open(&folder.path().join("store")).unwrap();
        let lock = store.lock().unwrap();
        let bin = store.path().join(COPIES);
        fs::create_dir(&bin).unwrap();
        let others = ["ckpt-run-mine", "notes"];
        for name in [OLD, MAPPED, OURS, ".tmp-x", others[0], others[1]] {
            fs::write(bin.join(name), "#!").unwrap();
        }
        write_image(
            &store,
            &lock,
            &format!(r#"{{"files": [{{"path": "/moved/{MAPPED}", "access": "map"}}]}}"#),
        );
        remove_copies(&store, &lock, &bin.join(OURS));
        assert_eq!(names(&bin), [MAPPED, OURS, others[0], others[1]]);
        // An image without readable facts needs all copies.
        write_image(&store, &lock, "{}");
        fs::write(bin.join(OLD), "#!").unwrap();
        remove_copies(&store, &lock, &bin.join(OURS));
        assert!(bin.join(OLD).exists());
    }

    #[test]
    fn data_cut_off_by_the_last_restores_are_kept() {
        let store = tempfile::tempdir().unwrap();
        let folder = store.path().join(ASIDE);
        fs::create_dir_all(folder.join("mine-7")).unwrap();
        // The time decides, not the image.
        for number in 0..ASIDE_KEPT as u64 + 2 {
            let path = aside(store.path(), format!("{:06}", 100 - number), 1000 + number);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("0-log"), "end").unwrap();
        }
        let left = names(&folder);
        assert_eq!(left.len(), ASIDE_KEPT + 1);
        assert!(left.contains(&"mine-7".to_owned()));
        assert!(
            !left.contains(&"000100-1000".to_owned()) && !left.contains(&"000099-1001".to_owned())
        );
    }
}
