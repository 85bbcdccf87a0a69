//! Parts of ckpt-run that an image maps. They are copied with the image to other machines.
//!
//! The job's first process runs a copy of this program, and other processes may have the agent loaded. Both files are
//! in the `bin` folder of the store in which the image was made, and CRIU requires them at the same path. An exported
//! or copied image contains them as streams; a restore creates a missing file from its stream. A file with a different
//! modification time, for example after the store was copied as a folder, gets its recorded time back.
//!
//! The path comes from the image and is not trusted. A file is created only in a folder that other users cannot access,
//! under a name derived from its content, and never replaces a file. Missing folders are created without access for
//! other users. Links that another user can have created are not followed.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::time::{Duration, SystemTime};

use crate::job::OpenFile;
use crate::run::housekeeping::{COPIES, COPY_DIGITS, COPY_PREFIX};
use crate::run::image_facts::ImageFacts;
use crate::run::run_context::hash_of;
use crate::safe_path::Spot;
use crate::store::{Companion, ImageReader, Store};

/// Folder of their streams in an image.
const FOLDER: &str = "program";

/// Returns the parts that this image maps and that exist in the store.
#[must_use]
pub fn companions(store: &Store, facts: &ImageFacts) -> Vec<Companion> {
    let folder = store.path().join(COPIES);
    let parts = facts.files.iter().filter_map(|file| {
        let name = name(file)?;
        // The comparison is by name, because the store may have been moved.
        let path = folder.join(name);
        path.is_file().then(|| Companion {
            stream: format!("{FOLDER}/{name}"),
            path,
            opened: None,
        })
    });
    parts.collect()
}

/// Creates missing parts from the image's streams, and restores the modification times of existing ones.
pub(crate) fn put_back(image: &ImageReader, facts: &ImageFacts) -> io::Result<()> {
    for file in &facts.files {
        let Some(name) = name(file) else { continue };
        let stream = format!("{FOLDER}/{name}");
        match fs::symlink_metadata(&file.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && image.contains(&stream) => {
                tracing::info!(path = %file.path.display(), "restored a part of ckpt-run that the image maps");
                make(image, &stream, file)?;
            }
            Ok(there) if there.is_file() && there.modified()? != modified(file) => {
                if is_named_after(name, hash_of(&file.path)?) {
                    File::open(&file.path)?.set_modified(modified(file))?;
                }
            }
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

/// Returns true if the file is a part of ckpt-run.
pub(super) fn is_part(file: &OpenFile) -> bool {
    name(file).is_some()
}

/// Returns the file's name if the file is a part of ckpt-run.
fn name(file: &OpenFile) -> Option<&str> {
    let name = file.path.file_name()?.to_str()?;
    let folder = file.path.parent()?.file_name()?;
    (folder == COPIES && name.starts_with(COPY_PREFIX)).then_some(name)
}

/// Returns true if the name contains the hash of the content.
fn is_named_after(name: &str, hash: blake3::Hash) -> bool {
    name.contains(&hash.to_hex()[..COPY_DIGITS])
}

fn modified(file: &OpenFile) -> SystemTime {
    let since = u64::try_from(file.modified_ns).map(Duration::from_nanos);
    SystemTime::UNIX_EPOCH + since.unwrap_or_default()
}

/// Creates the file with its recorded mode, size and modification time, which CRIU and the restore compare.
fn make(image: &ImageReader, stream: &str, file: &OpenFile) -> io::Result<()> {
    let name = name(file).unwrap_or_default();
    let spot = closed_folder(file)?;
    let path = spot.path();
    let folder = path.parent().unwrap_or(&path);
    let mut made = tempfile::NamedTempFile::new_in(folder)?;
    image
        .copy_to(stream, made.as_file_mut())
        .map_err(io::Error::other)?;
    if !is_named_after(name, hash_of(made.path())?) {
        return Err(refused(file, "its name does not match its content"));
    }
    made.as_file()
        .set_permissions(Permissions::from_mode(file.mode & 0o777))?;
    made.as_file().set_modified(modified(file))?;
    made.as_file().sync_all()?;
    made.persist_noclobber(&path)?;
    File::open(folder)?.sync_all()
}

/// Opens the folder of the file, and creates missing folders of its path.
fn closed_folder(file: &OpenFile) -> io::Result<Spot> {
    let mut missing: Vec<_> = file.path.ancestors().skip(1).collect();
    // The root has no name and always exists.
    missing.pop();
    for folder in missing.into_iter().rev() {
        let spot = Spot::of(folder)?;
        match DirBuilder::new().mode(0o700).create(spot.path()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    let spot = Spot::of(&file.path)?;
    if spot.is_closed()? {
        Ok(spot)
    } else {
        Err(refused(file, "other users can access its folder"))
    }
}

fn refused(file: &OpenFile, why: &str) -> io::Error {
    let path = file.path.display();
    let message = format!("cannot create {path}, a part of ckpt-run that the image maps: {why}");
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}
