//! Parts of ckpt-run that an image maps, and that go with it to other machines.
//!
//! The job's first process runs a copy of this program, and others may have the agent loaded; both lie in the `bin`
//! folder of the store that the image was made in, and CRIU wants them where they were. An exported or copied image
//! carries them as streams; a restore that does not find one puts it back.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::image::ImageFacts;
use super::leftovers::{COPIES, COPY_PREFIX};
use crate::job::OpenFile;
use crate::store::{Companion, ImageReader, Store};

/// The folder of their streams.
const FOLDER: &str = "program";

/// The parts that this image maps, as far as the store has them.
#[must_use]
pub fn companions(store: &Store, facts: &ImageFacts) -> Vec<Companion> {
    let folder = store.path().join(COPIES);
    let parts = facts.files.iter().filter_map(|file| {
        let name = name(file)?;
        // By name: the store may have been moved.
        let path = folder.join(name);
        path.is_file().then(|| Companion {
            stream: format!("{FOLDER}/{name}"),
            path,
        })
    });
    parts.collect()
}

/// Puts back the parts that are missing and that the image carries.
pub(super) fn put_back(image: &ImageReader, facts: &ImageFacts) -> io::Result<()> {
    for file in &facts.files {
        let Some(name) = name(file) else { continue };
        let stream = format!("{FOLDER}/{name}");
        let is_missing = fs::symlink_metadata(&file.path)
            .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if is_missing && image.contains(&stream) {
            tracing::info!(path = %file.path.display(), "put back a part of ckpt-run that the image maps");
            make(image, &stream, file)?;
        }
    }
    Ok(())
}

/// The name of a file that is a part of ours.
fn name(file: &OpenFile) -> Option<&str> {
    let name = file.path.file_name()?.to_str()?;
    let folder = file.path.parent()?.file_name()?;
    (folder == COPIES && name.starts_with(COPY_PREFIX)).then_some(name)
}

/// Makes the file as it was: what CRIU and the restore compare is mode, size and time.
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
    let modified = u64::try_from(file.modified_ns).map(Duration::from_nanos);
    let modified = SystemTime::UNIX_EPOCH + modified.unwrap_or_default();
    made.as_file().set_modified(modified)?;
    made.as_file().sync_all()?;
    made.persist_noclobber(&file.path)?;
    File::open(folder)?.sync_all()
}
