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

/// The text of a file that may be missing and is trusted.
pub(super) fn read_if_there(path: &Path) -> Result<Option<String>, ConfigError> {
    match File::open(path) {
        Ok(file) => read(path, &file).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(unread(path)(source)),
    }
}

/// The project's file and its text.
pub(super) fn read_project(project: &ProjectFile) -> Result<Option<(&Path, String)>, ConfigError> {
    match project {
        ProjectFile::InWorkingDirectory(path) => match open_if_ours(path)? {
            Some(file) => Ok(Some((path, read(path, &file)?))),
            None => Ok(None),
        },
        ProjectFile::Named(path) => match read_if_there(path)? {
            Some(text) => Ok(Some((path, text))),
            None => Err(unread(path)(io::ErrorKind::NotFound.into())),
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
        Err(source) => return Err(unread(path)(source)),
    };
    // Of the open file, not of the path: nobody can exchange it in between.
    let metadata = file.metadata().map_err(unread(path))?;
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

fn read(path: &Path, file: &File) -> Result<String, ConfigError> {
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(unread(path))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(ConfigError::TooLarge {
            path: path.to_owned(),
            limit: FILE_BYTES_MAX,
        });
    }
    Ok(text)
}

fn unread(path: &Path) -> impl Fn(io::Error) -> ConfigError {
    |source| ConfigError::Read {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
