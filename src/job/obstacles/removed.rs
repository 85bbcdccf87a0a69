//! Removed files and folders that a process has open, in whose way something else is now.
//!
//! CRIU (4.2) makes a removed folder again for the restore, at its path, opens it and removes it. If there is another folder
//! at the path, the process gets that one, and an empty one is gone afterwards; with files in it, no restore succeeds. For
//! a removed file it needs the folders above it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptors, Target};
use crate::job::files::is_deleted;

/// End of the target of a link to a removed file; a name may end in this way, too.
const REMOVED: &[u8] = b" (deleted)";

/// Searches for the first such file or folder.
pub(super) fn find(open: &[Descriptors]) -> Option<Obstacle> {
    open.iter().find_map(|Descriptors { process, all }| {
        let mut links = all.iter().filter(|one| is_deleted(&one.target));
        let of_descriptor = links.find_map(|one| of_link(&one.link()));
        let folder = || PathBuf::from(format!("/proc/{}/cwd", process.host_pid));
        let finding = of_descriptor.or_else(|| of_link(&folder()))?;
        Some(Obstacle::of(process, finding))
    })
}

fn of_link(link: &Path) -> Option<Finding> {
    // While the process computes, the link may lead elsewhere at the next look.
    let Target { held, path } = Target::of(link)?;
    let about = File::from(held).metadata().ok()?;
    // The kernel removes the names of an exited process from /proc itself.
    if about.nlink() > 0 || path.starts_with("/proc") {
        return None;
    }
    let path = path.as_os_str().as_bytes().strip_suffix(REMOVED)?;
    let path = Path::new(OsStr::from_bytes(path));
    let other = in_the_way(path, about.is_dir())?;
    Some(Finding::Removed {
        path: path.to_owned(),
        other: other.to_owned(),
    })
}

/// Returns what is in the way of a removed file or folder.
fn in_the_way(path: &Path, is_folder: bool) -> Option<&Path> {
    let kind = |path: &Path| fs::symlink_metadata(path).ok();
    if is_folder && kind(path).is_some() {
        return Some(path);
    }
    // The kernel's path has no links.
    let mut above = path.ancestors().skip(1);
    let nearest = above.find_map(|folder| Some((folder, kind(folder)?)));
    let (folder, about) = nearest?;
    (!about.is_dir()).then_some(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_has_taken_the_place_of_a_removed_folder_is_found() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        let (folder, above) = (root.join("above/folder"), root.join("above"));
        fs::create_dir_all(&folder).unwrap();
        let opened = File::open(&folder).unwrap();
        let file = File::create(folder.join("file")).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let found = || {
            let mut open = Descriptors::of(me).unwrap();
            // Other tests of this process have files open.
            open.all.retain(|one| one.target.starts_with(&root));
            match find(&[open])?.finding {
                Finding::Removed { path, other } => Some((path, other)),
                other => panic!("{other}"),
            }
        };
        assert_eq!(found(), None);
        let odd = root.join("name (deleted)");
        let _odd = File::create(&odd).unwrap();
        fs::create_dir(root.join("name")).unwrap();
        assert_eq!(found(), None);
        fs::remove_file(folder.join("file")).unwrap();
        fs::remove_dir(&folder).unwrap();
        assert_eq!(found(), None);
        fs::create_dir(&folder).unwrap();
        assert_eq!(found(), Some((folder.clone(), folder.clone())));
        drop(opened);
        assert_eq!(found(), None);
        fs::remove_dir(&folder).unwrap();
        fs::remove_dir(&above).unwrap();
        for make in [
            |path: &Path| fs::write(path, ""),
            |path: &Path| symlink("/", path),
        ] {
            make(&above).unwrap();
            assert_eq!(found(), Some((folder.join("file"), above.clone())));
            fs::remove_file(&above).unwrap();
        }
        drop(file);
    }
}
