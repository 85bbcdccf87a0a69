//! The search for the job's program before anything is started, as the shell would do it.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::exit_code::{NOT_EXECUTABLE, NOT_FOUND, OURS};

/// The reason why the command cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// No command was given.
    #[error("no command: give one after --, as in: ckpt-run -- ./train")]
    Missing,
    /// The program does not exist.
    #[error("cannot find {}: there is no such file or program on PATH that this user can reach", .0.display())]
    NotFound(PathBuf),
    /// The file is not a program.
    #[error("cannot run {}: it is not executable (chmod +x?)", .0.display())]
    NotRunnable(PathBuf),
    /// The kernel refused the program, for instance because its interpreter does not exist.
    #[error("cannot run {}", program.display())]
    NotStarted {
        /// The program.
        program: PathBuf,
        /// The kernel's reason.
        #[source]
        source: std::io::Error,
    },
}

impl ProgramError {
    /// Returns the exit code that a shell uses for the error.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Missing => OURS,
            Self::NotFound(_) => NOT_FOUND,
            Self::NotRunnable(_) => NOT_EXECUTABLE,
            Self::NotStarted { source, .. } => match source.kind() {
                std::io::ErrorKind::NotFound => NOT_FOUND,
                _ => NOT_EXECUTABLE,
            },
        }
    }
}

/// Checks that `program` can be run.
pub(crate) fn check(program: &OsStr) -> Result<(), ProgramError> {
    let search = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    check_in(program, &search)
}

fn check_in(program: &OsStr, search: &OsStr) -> Result<(), ProgramError> {
    let path = PathBuf::from(program);
    let places: Vec<PathBuf> = if program.as_bytes().contains(&b'/') {
        vec![path.clone()]
    } else {
        std::env::split_paths(search)
            .map(|folder| folder.join(&path))
            .collect()
    };
    let found: Vec<&PathBuf> = places.iter().filter(|place| place.exists()).collect();
    match found.first() {
        None => Err(ProgramError::NotFound(path)),
        Some(_) if found.iter().any(|place| runnable(place)) => Ok(()),
        Some(place) => Err(ProgramError::NotRunnable((*place).clone())),
    }
}

fn runnable(path: &Path) -> bool {
    path.is_file() && access(path, AccessFlags::X_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_missing_program_is_127_and_a_file_that_is_none_is_126() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("train");
        std::fs::write(&file, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        let search = folder.path().as_os_str();
        let code = |program: &str| {
            check_in(OsStr::new(program), search)
                .unwrap_err()
                .exit_code()
        };
        assert_eq!(code("nothing"), 127);
        assert_eq!(code("train"), 126);
        assert_eq!(code("/no/such/program"), 127);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert!(check_in(OsStr::new("train"), search).is_ok());
    }
}
