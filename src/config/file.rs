//! Reading of configuration files: the trust checks and the size limit.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

use super::error::Distrust;
use super::{ConfigError, ProjectFile};
use crate::trust;

/// Limit on a file's size. A configuration with every key and its comments is a hundredth of this.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The reason why a file is read; it determines the remedy if the file cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The machine's file.
    System,
    /// The user's file.
    User,
    /// The file in the working directory.
    Project,
    /// A file that the user named.
    Named,
}

impl Place {
    fn remedy(self) -> &'static str {
        match self {
            Self::System => "make it readable for all users, or remove it",
            Self::User => {
                "its folder comes from XDG_CONFIG_HOME or HOME: set one of them to a folder of your own, or make the \
                 file readable for you"
            }
            Self::Project => "make it readable for you, or name another file with --config FILE",
            Self::Named => "named by --config or CKPT_RUN_CONFIG",
        }
    }
}

/// Reads the text of a trusted file that may be missing.
pub(super) fn read_if_there(path: &Path, place: Place) -> Result<Option<String>, ConfigError> {
    match File::open(path) {
        Ok(file) => read(path, &file, place).map(Some),
        Err(error) if is_missing(&error) => Ok(None),
        Err(source) => Err(unread(path, place)(source)),
    }
}

/// Returns true if the error means a missing file. A service may have a HOME that is not a folder, such as /dev/null.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// Reads the project's file and returns its path and text.
pub(super) fn read_project(project: &ProjectFile) -> Result<Option<(&Path, String)>, ConfigError> {
    match project {
        ProjectFile::InWorkingDirectory(path) => match open_if_ours(path)? {
            Some(file) => Ok(Some((path, read(path, &file, Place::Project)?))),
            None => Ok(None),
        },
        ProjectFile::Named(path) => match read_if_there(path, Place::Named)? {
            Some(text) => Ok(Some((path, text))),
            None => Err(unread(path, Place::Named)(io::ErrorKind::NotFound.into())),
        },
    }
}

/// Opens a file in the working directory if it exists and is trusted.
fn open_if_ours(path: &Path) -> Result<Option<File>, ConfigError> {
    // A fifo of that name must not block ckpt-run.
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits())
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(unread(path, Place::Project)(source)),
    };
    // The open file's metadata, not the path's: the file cannot be exchanged in between.
    let metadata = file.metadata().map_err(unread(path, Place::Project))?;
    let us = geteuid().as_raw();
    // A link is its owner's choice of a file.
    let link = fs::symlink_metadata(path).map_err(unread(path, Place::Project))?;
    let is_private = || trust::is_private_group(metadata.gid(), metadata.uid());
    match distrust(link.uid(), 0, us, || true)
        .or_else(|| distrust(metadata.uid(), metadata.mode(), us, is_private))
    {
        None => Ok(Some(file)),
        Some(trust) => Err(ConfigError::Untrusted {
            path: path.to_owned(),
            trust,
        }),
    }
}

/// Returns the reason why a file with this owner and mode is not trusted.
fn distrust(
    owner: u32,
    mode: u32,
    us: u32,
    is_private_group: impl FnOnce() -> bool,
) -> Option<Distrust> {
    const ROOT: u32 = 0;
    const OTHERS_WRITE: u32 = 0o002;
    const GROUP_WRITES: u32 = 0o020;
    if owner != us && owner != ROOT {
        Some(Distrust::Owner(owner))
    } else if mode & OTHERS_WRITE != 0 {
        Some(Distrust::WorldWritable)
    } else if mode & GROUP_WRITES != 0 && !is_private_group() {
        Some(Distrust::GroupWritable)
    } else {
        None
    }
}

fn read(path: &Path, file: &File, place: Place) -> Result<String, ConfigError> {
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(unread(path, place))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(ConfigError::TooLarge {
            path: path.to_owned(),
            limit: FILE_BYTES_MAX,
        });
    }
    Ok(text)
}

fn unread(path: &Path, place: Place) -> impl Fn(io::Error) -> ConfigError {
    move |source| ConfigError::Read {
        path: path.to_owned(),
        remedy: place.remedy(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_below_what_is_no_folder_is_missing() {
        let path = Path::new("/dev/null/.config/ckpt-run/config.toml");
        assert_eq!(read_if_there(path, Place::User).unwrap(), None);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_told_with_what_led_to_it() {
        let folder = tempfile::tempdir().unwrap();
        for (place, word) in [
            (Place::System, "all users"),
            (Place::User, "XDG_CONFIG_HOME or HOME"),
            (Place::Project, "--config FILE"),
            (Place::Named, "CKPT_RUN_CONFIG"),
        ] {
            let text = read_if_there(folder.path(), place).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn only_our_own_and_roots_files_are_believed() {
        const US: u32 = 1000;
        for (owner, mode, private, expected) in [
            (US, 0o100_644, false, None),
            (0, 0o100_644, false, None),
            (US, 0o100_664, true, None),
            (US, 0o100_664, false, Some(Distrust::GroupWritable)),
            (1001, 0o100_600, true, Some(Distrust::Owner(1001))),
            (US, 0o100_646, true, Some(Distrust::WorldWritable)),
        ] {
            let found = distrust(owner, mode, US, || private);
            assert_eq!(found, expected, "{owner} {mode:o} {private}");
        }
        let found = distrust(1000, 0o100_644, 0, || true);
        assert_eq!(found, Some(Distrust::Owner(1000)));
    }
}
