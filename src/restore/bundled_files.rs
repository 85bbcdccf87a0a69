//! Parts of ckpt-run that an image maps, and that move with the image to other machines.
//!
//! The job's first process runs a copy of this program, and other processes may have the agent loaded. Both files are
//! in the `bin` folder of the store in which the image was made, and CRIU requires them at the same path. An exported
//! or copied image contains them as streams; a restore creates a missing file from its stream. A file with a different
//! modification time, for example after the store was copied as a folder, gets its recorded time again.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::job::OpenFile;
use crate::run::housekeeping::{COPIES, COPY_DIGITS, COPY_PREFIX};
use crate::run::image_facts::ImageFacts;
use crate::run::run_context::hash_of;
use crate::store::{Companion, ImageReader, Store};

/// The folder of their streams.
const FOLDER: &str = "program";

/// Returns the parts that this image maps and that exist in the store.
#[must_use]
pub fn companions(store: &Store, facts: &ImageFacts) -> Vec<Companion> {
    let folder = store.path().join(COPIES);
    let parts = facts.files.iter().filter_map(|file| {
        let name = name(file)?;
        // Compared by name: the store may have been moved.
        let path = folder.join(name);
        path.is_file().then(|| Companion {
            stream: format!("{FOLDER}/{name}"),
            path,
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
                tracing::info!(path = %file.path.display(), "put back a part of ckpt-run that the image maps");
                make(image, &stream, file)?;
            }
            Ok(there) if there.is_file() && there.modified()? != modified(file) => {
                // The name contains a hash of the content.
                let digits = hash_of(&file.path)?.to_hex();
                if name.contains(&digits[..COPY_DIGITS]) {
                    File::open(&file.path)?.set_modified(modified(file))?;
                }
            }
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

/// Returns the file's name if the file is a part of ckpt-run.
fn name(file: &OpenFile) -> Option<&str> {
    let name = file.path.file_name()?.to_str()?;
    let folder = file.path.parent()?.file_name()?;
    (folder == COPIES && name.starts_with(COPY_PREFIX)).then_some(name)
}

fn modified(file: &OpenFile) -> SystemTime {
    let since = u64::try_from(file.modified_ns).map(Duration::from_nanos);
    SystemTime::UNIX_EPOCH + since.unwrap_or_default()
}

/// Creates the file as it was: CRIU and the restore compare its mode, size and modification time.
fn make(image: &ImageReader, stream: &str, file: &OpenFile) -> io::Result<()> {
    let folder = file.path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    let mut made = tempfile::NamedTempFile::new_in(folder)?;
    image
        .copy_to(stream, made.as_file_mut())
        .map_err(io::Error::other)?;
    made.as_file()
        .set_permissions(Permissions::from_mode(file.mode & 0o777))?;
    made.as_file().set_modified(modified(file))?;
    made.as_file().sync_all()?;
    made.persist_noclobber(&file.path)?;
    File::open(folder)?.sync_all()
}
