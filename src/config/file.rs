//! Reading configuration files: which are believed, and how much of them is read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

use super::error::Distrust;
use super::{ConfigError, ProjectFile};

/// A configuration with every key and its comments is a hundredth of this.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// How a file came to be read, which tells what to do where it cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// The machine's.
    System,
    /// The user's.
    User,
    /// In the working directory.
    Project,
    /// Where the user said.
    Named,
}

impl Place {
    fn remedy(self) -> &'static str {
        match self {
            Self::System => "let everybody read it, or remove it",
            Self::User => {
                "found by XDG_CONFIG_HOME, else HOME: set one of them to a folder of your own, or let yourself read it"
            }
            Self::Project => "let yourself read it, or name another one by --config FILE",
            Self::Named => "named by --config or CKPT_RUN_CONFIG",
        }
    }
}

/// The text of a file that may be missing and is trusted.
pub(super) fn read_if_there(path: &Path, place: Place) -> Result<Option<String>, ConfigError> {
    match File::open(path) {
        Ok(file) => read(path, &file, place).map(Some),
        Err(error) if is_missing(&error) => Ok(None),
        Err(source) => Err(unread(path, place)(source)),
    }
}

/// Services have a HOME that is no folder, such as /dev/null.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// The project's file and its text.
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

/// Opens a file that lies in the working directory, if it is there and trusted.
fn open_if_ours(path: &Path) -> Result<Option<File>, ConfigError> {
    // A fifo of that name must not hang us.
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits())
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(unread(path, Place::Project)(source)),
    };
    // Of the open file, not of the path: nobody can exchange it in between.
    let metadata = file.metadata().map_err(unread(path, Place::Project))?;
    match distrust(metadata.uid(), metadata.mode(), geteuid().as_raw()) {
        None => Ok(Some(file)),
        Some(trust) => Err(ConfigError::Untrusted {
            path: path.to_owned(),
            trust,
        }),
    }
}

/// Why a file with this owner and mode is not ours to believe.
fn distrust(owner: u32, mode: u32, us: u32) -> Option<Distrust> {
    const ROOT: u32 = 0;
    const OTHERS_WRITE: u32 = 0o002;
    if owner != us && owner != ROOT {
        Some(Distrust::Owner(owner))
    } else if mode & OTHERS_WRITE != 0 {
        Some(Distrust::WorldWritable)
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
            (Place::System, "everybody"),
            (Place::User, "XDG_CONFIG_HOME, else HOME"),
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
        for (owner, mode, expected) in [
            (US, 0o100_644, None),
            (0, 0o100_644, None),
            (US, 0o100_664, None),
            (1001, 0o100_600, Some(Distrust::Owner(1001))),
            (US, 0o100_646, Some(Distrust::WorldWritable)),
        ] {
            assert_eq!(distrust(owner, mode, US), expected, "{owner} {mode:o}");
        }
        assert_eq!(distrust(1000, 0o100_644, 0), Some(Distrust::Owner(1000)));
    }
}
