//! Fence around a store that several machines can write.
//!
//! ```text
//! holder of lease 7   holders/7/.tmp-x ──rename──▶ run.json, images/…          a write
//!                     images/…, packs/… ──rename──▶ holders/7/… ──▶ removed    a removal
//! holder of lease 8   removes holders/7: each later rename of the former holder fails
//! ```
//! A machine can be suspended between a check of its lease and the write that the check permits. Therefore files get and
//! lose their names through a folder of the holder, which the next holder removes: no image, state of the run or removal
//! of a former holder takes effect. Packs are written without the fence, because nobody reads a pack that no manifest
//! names. Messages and records are appended without it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use nix::errno::Errno;

use super::durable::{self, DurableError};
use super::ops;
use crate::sync::locked;

/// Folder of the holders' folders in a store.
const HOLDERS: &str = "holders";
/// Limit on the attempts to remove a folder in which its holder may be creating files.
const TRIES_MAX: u32 = 1000;

/// Folder of this process in each store that it has fenced.
static FENCES: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());

/// Lets files of the store get and lose their names only by this process, or by a later holder. `epoch` is the number of
/// the lease, which no other holder has.
///
/// # Errors
/// A former holder's folder cannot be removed, or the own one not created, or there is one of a later holder. The store is
/// not fenced.
pub(crate) fn raise(store: &Path, epoch: u64) -> Result<(), DurableError> {
    let holders = store.join(HOLDERS);
    durable::create_folder(&holders)?;
    let failed = |path: &Path| {
        let path = path.to_owned();
        |source| DurableError::Remove { path, source }
    };
    for former in fs::read_dir(&holders).map_err(failed(&holders))? {
        let former = former.map_err(failed(&holders))?.path();
        let number = former
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        if number.is_some_and(|number: u64| number > epoch) {
            let source = io::Error::other("a later holder of the lease has its folder there");
            return Err(failed(&former)(source));
        }
        remove_holder(&former).map_err(failed(&former))?;
    }
    durable::sync_folder(&holders)?;
    let own = holders.join(epoch.to_string());
    durable::create_folder(&own)?;
    locked(&FENCES).insert(store.to_owned(), own);
    Ok(())
}

/// Returns the folder through which a file gets or loses its name, if it is in a store that this process has fenced.
pub(crate) fn passage(path: &Path) -> Option<PathBuf> {
    let fences = locked(&FENCES);
    let mut fences = fences.iter();
    let found = fences.find(|(store, _)| path.starts_with(store));
    found.map(|(_, own)| own.clone())
}

/// Removes the folder of a former holder, who may still create files in it.
fn remove_holder(folder: &Path) -> io::Result<()> {
    for _ in 0..TRIES_MAX {
        for file in fs::read_dir(folder)? {
            match ops::remove_file(&file?.path()) {
                // It has been renamed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // NFS keeps a removed file that a process of this machine reads. So its holder was here, and is gone.
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return Ok(()),
                result => result?,
            }
        }
        match ops::remove_folder(folder) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            result => return result,
        }
    }
    Err(Errno::ENOTEMPTY.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::support::{OPTIONS, temporary_store, write_image};

    /// Acts as a former holder: with the folder of its lease, which others have removed since.
    fn as_former_holder<T>(store: &Path, act: impl FnOnce() -> T) -> T {
        let holder = store.join(HOLDERS).join("1");
        let present = locked(&FENCES).insert(store.to_owned(), holder);
        let result = act();
        locked(&FENCES).insert(store.to_owned(), present.unwrap());
        result
    }

    #[test]
    fn a_holder_writes_and_removes_as_without_a_fence() {
        let (_folder, store) = temporary_store();
        raise(store.path(), 1).unwrap();
        let lock = store.lock().unwrap();
        let image = write_image(&store, &lock, &[("a", b"one")]);
        let next = write_image(&store, &lock, &[("a", b"two")]);
        assert_eq!(store.rotate(&lock, 1).unwrap(), [image.id]);
        assert_eq!(store.ids().unwrap(), [next.id]);
        let own = store.path().join(HOLDERS).join("1");
        assert_eq!(own.read_dir().unwrap().count(), 0);
    }

    #[test]
    fn nothing_of_a_former_holder_takes_effect() {
        let (_folder, store) = temporary_store();
        raise(store.path(), 1).unwrap();
        let lock = store.lock().unwrap();
        let first = write_image(&store, &lock, &[("a", b"one")]);
        let run = store.path().join("run.json");
        durable::write(&run, b"before").unwrap();
        let writer = store.begin(&lock, OPTIONS).unwrap();
        let mut stream = writer.stream("a").unwrap();
        stream.write_all(b"late").unwrap();
        stream.finish().unwrap();

        raise(store.path(), 2).unwrap();
        durable::write(&run, b"after").unwrap();
        as_former_holder(store.path(), || {
            writer.commit(b"").unwrap_err();
            durable::write(&run, b"late").unwrap_err();
            durable::remove(&store.manifest_file(first.id)).unwrap_err();
        });
        assert_eq!(store.ids().unwrap(), [first.id]);
        assert_eq!(fs::read(&run).unwrap(), b"after");
    }

    #[test]
    fn a_former_holder_cannot_raise_its_fence_again() {
        let (_folder, store) = temporary_store();
        raise(store.path(), 2).unwrap();
        let error = raise(store.path(), 1).unwrap_err();
        assert!(error.io_error().to_string().contains("a later holder"));
        assert!(store.path().join(HOLDERS).join("2").exists());
    }

    #[test]
    fn files_that_a_former_holder_is_writing_go_with_its_folder() {
        let (_folder, store) = temporary_store();
        raise(store.path(), 1).unwrap();
        let former = store.path().join(HOLDERS).join("1");
        fs::write(former.join(".tmp-x"), "half").unwrap();
        raise(store.path(), 2).unwrap();
        assert!(!former.exists());
    }
}
