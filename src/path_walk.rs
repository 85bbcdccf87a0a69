//! Resolution of a path from the root folder, one component at a time, through open descriptors.
//!
//! A plain `open` follows every symbolic link on the way, whoever created it. Here the caller approves each component
//! together with the folder that holds it, before it is entered or followed. The result is a descriptor of the last
//! folder, so later changes of the names have no effect.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

/// Limit on symbolic links in one path, equal to the kernel's.
const LINKS_MAX: usize = 40;

/// Component of a path and the folder that holds it.
pub(crate) struct Entry<'a> {
    /// Path of the folder, without symbolic links.
    pub folder: &'a Path,
    pub folder_stat: &'a Stat,
    pub name: &'a OsStr,
    /// Status of the component itself; a symbolic link is not followed.
    pub stat: &'a Stat,
}

/// Failure to resolve a path to a folder.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WalkError<R> {
    /// A system call failed.
    #[error("cannot open the folder {path}")]
    Io { path: PathBuf, source: io::Error },
    /// The caller rejected a component.
    #[error(transparent)]
    Refused(R),
}

/// Symbolic link that another user may redirect at any time.
#[derive(Debug, thiserror::Error)]
#[error("{path} is a symbolic link of user {owner}: name the folder itself")]
pub(crate) struct ForeignLink {
    path: PathBuf,
    owner: u32,
}

impl ForeignLink {
    /// Rejects a symbolic link unless root or this user owns it.
    pub fn refuse(entry: &Entry<'_>) -> Result<(), Self> {
        let owner = entry.stat.st_uid;
        let ours = owner == 0 || owner == rustix::process::geteuid().as_raw();
        if ours || FileType::from_raw_mode(entry.stat.st_mode) != FileType::Symlink {
            return Ok(());
        }
        let path = entry.folder.join(entry.name);
        Err(Self { path, owner })
    }
}

/// Opens the folder at `path` with `O_PATH`. `judge` is called for each component before it is entered or followed.
pub(crate) fn open_folder<R>(
    path: &Path,
    mut judge: impl FnMut(&Entry<'_>) -> Result<(), R>,
) -> Result<OwnedFd, WalkError<R>> {
    let failed = |path: &Path, source: io::Error| WalkError::Io {
        path: path.to_owned(),
        source,
    };
    let absolute = std::path::absolute(path).map_err(|error| failed(path, error))?;
    let mut ahead = names(&absolute);
    let (mut here, mut at) = (root(&absolute)?, PathBuf::from("/"));
    let mut links = 0;
    while let Some(name) = ahead.pop() {
        let failed = |errno: Errno| failed(&at.join(&name), errno.into());
        if name == ".." {
            here = open(&here, &name, OFlags::DIRECTORY).map_err(failed)?;
            at.pop();
            continue;
        }
        // Opening a name as a folder triggers automounts, so this comes first.
        let (found, is_folder) = match open(&here, &name, OFlags::DIRECTORY) {
            Ok(found) => (found, true),
            Err(Errno::NOTDIR) => {
                let found = open(&here, &name, OFlags::empty()).map_err(failed)?;
                (found, false)
            }
            Err(errno) => return Err(failed(errno)),
        };
        let folder_stat = rustix::fs::fstat(&here).map_err(failed)?;
        let stat = rustix::fs::fstat(&found).map_err(failed)?;
        judge(&Entry {
            folder: &at,
            folder_stat: &folder_stat,
            name: &name,
            stat: &stat,
        })
        .map_err(WalkError::Refused)?;
        if is_folder {
            here = found;
            at.push(&name);
            continue;
        }
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            return Err(failed(Errno::NOTDIR));
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(failed(Errno::LOOP));
        }
        let target = rustix::fs::readlinkat(&found, "", Vec::new()).map_err(failed)?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            (here, at) = (root(&absolute)?, PathBuf::from("/"));
        }
        ahead.extend(names(&target));
    }
    Ok(here)
}

fn root<R>(path: &Path) -> Result<OwnedFd, WalkError<R>> {
    open(CWD, OsStr::new("/"), OFlags::DIRECTORY).map_err(|errno| WalkError::Io {
        path: path.to_owned(),
        source: errno.into(),
    })
}

fn open(folder: impl AsFd, name: &OsStr, how: OFlags) -> Result<OwnedFd, Errno> {
    let how = how | OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(folder, name, how, Mode::empty())
}

/// Components of a path, the last one first.
fn names(path: &Path) -> Vec<OsString> {
    let names = path.components().rev().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, lchown, symlink};

    use super::*;

    /// Inode of the resolved folder, and the components visited below `below`.
    fn walk(path: &Path, below: &Path) -> Result<(u64, Vec<String>), WalkError<ForeignLink>> {
        let mut passed = Vec::new();
        let folder = open_folder(path, |entry| {
            if entry.folder.starts_with(below) {
                passed.push(entry.name.display().to_string());
            }
            ForeignLink::refuse(entry)
        })?;
        Ok((rustix::fs::fstat(folder).unwrap().st_ino, passed))
    }

    #[test]
    fn a_walk_comes_to_the_folder_that_the_kernel_finds() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        fs::create_dir_all(top.join("a/b")).unwrap();
        symlink("a/b", top.join("relative")).unwrap();
        symlink(top.join("relative"), top.join("absolute")).unwrap();
        for (name, expected) in [
            ("a/b", &["a", "b"][..]),
            ("a/./b/..//b", &["a", "b", "b"]),
            ("relative/..", &["relative", "a", "b"]),
            ("absolute", &["absolute", "relative", "a", "b"]),
        ] {
            let path = top.join(name);
            let (inode, passed) = walk(&path, &top).unwrap();
            assert_eq!(inode, fs::metadata(&path).unwrap().ino(), "{name}");
            assert_eq!(passed, expected, "{name}");
        }
    }

    #[test]
    fn a_file_a_loop_and_nothing_are_no_folder() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        symlink("loop", folder.path().join("loop")).unwrap();
        for (name, expected) in [
            ("file", Errno::NOTDIR),
            ("loop", Errno::LOOP),
            ("missing", Errno::NOENT),
        ] {
            match walk(&folder.path().join(name), folder.path()) {
                Err(WalkError::Io { source, .. }) => {
                    assert_eq!(source.raw_os_error(), Some(expected.raw_os_error()));
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_link_of_another_user_is_not_followed() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: only root can give a link away");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink(folder.path(), &link).unwrap();
        lchown(&link, Some(65534), None).unwrap();
        let error = walk(&link.join("more"), folder.path()).unwrap_err();
        assert!(matches!(error, WalkError::Refused(_)), "{error}");
        assert!(error.to_string().contains("link of user 65534"), "{error}");
    }
}
