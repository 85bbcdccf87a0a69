//! The user that runs the job, according to the setting `user`.

use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use nix::unistd::{Gid, Uid, User, geteuid, getgrouplist};
use rustix::fs::FileType;

use super::protocol::Credentials;

/// A user in the machine's databases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobUser {
    name: String,
    home: PathBuf,
    shell: PathBuf,
    /// User and group ids.
    pub credentials: Credentials,
}

/// Reasons why a job cannot run as a user.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// The user does not exist.
    #[error(
        "there is no user {0:?} on this machine (user): give the name of one, as `getent passwd` lists them"
    )]
    Unknown(String),
    /// The databases cannot be queried.
    #[error("cannot look for the user {name:?} (user)")]
    Look {
        /// The name.
        name: String,
        /// The reason.
        source: io::Error,
    },
    /// The user is not the current one, and ckpt-run is not root.
    #[error(
        "cannot run the job as {0} (user): only root may; run ckpt-run by sudo, or leave the setting out"
    )]
    NotRoot(String),
}

impl JobUser {
    /// Finds the user. Returns `None` if the job runs as this process does.
    ///
    /// # Errors
    /// The user does not exist, or only root can run a job as this user.
    pub fn find(name: &str) -> Result<Option<Self>, UserError> {
        Self::find_for(geteuid(), name)
    }

    fn find_for(us: Uid, name: &str) -> Result<Option<Self>, UserError> {
        let failed = |errno: nix::Error| UserError::Look {
            name: name.to_owned(),
            source: errno.into(),
        };
        let unknown = || UserError::Unknown(name.to_owned());
        let c_name = CString::new(name).map_err(|_| unknown())?;
        let user = User::from_name(name).map_err(failed)?.ok_or_else(unknown)?;
        if user.uid == us {
            return Ok(None);
        }
        if !us.is_root() {
            return Err(UserError::NotRoot(user.name));
        }
        let groups = getgrouplist(&c_name, user.gid).map_err(failed)?;
        Ok(Some(Self {
            name: user.name,
            home: user.dir,
            shell: user.shell,
            credentials: Credentials {
                user: user.uid.as_raw(),
                group: user.gid.as_raw(),
                groups: groups.into_iter().map(Gid::as_raw).collect(),
            },
        }))
    }

    /// Returns the variables that a login would set.
    #[must_use]
    pub fn variables(&self) -> [(&'static str, OsString); 4] {
        let name = || OsString::from(&self.name);
        [
            ("HOME", self.home.clone().into()),
            ("USER", name()),
            ("LOGNAME", name()),
            ("SHELL", self.shell.clone().into()),
        ]
    }

    /// Makes the user the owner of the job's end of a stream, as login does with a terminal, so that the job can open
    /// `/dev/stdout`. Files and devices of the caller are left unchanged.
    ///
    /// # Errors
    /// The owner cannot be changed.
    pub fn own(&self, end: impl AsFd) -> io::Result<()> {
        let about = rustix::fs::fstat(&end)?;
        let is_pipe = FileType::from_raw_mode(about.st_mode) == FileType::Fifo;
        if is_pipe || rustix::termios::isatty(&end) {
            let user = rustix::fs::Uid::from_raw(self.credentials.user);
            rustix::fs::fchown(&end, Some(user), None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
impl JobUser {
    /// Returns a user that need not exist on the machine.
    pub(crate) fn of_alice() -> Self {
        Self {
            name: "alice".to_owned(),
            home: "/home/alice".into(),
            shell: "/bin/sh".into(),
            credentials: Credentials {
                user: 1000,
                group: 1000,
                groups: vec![1000],
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: Uid = Uid::from_raw(0);

    #[test]
    fn unknown_user_names_are_refused() {
        for name in ["", "no-such-user", "0", "a\0b", "root\n"] {
            let found = JobUser::find_for(ROOT, name);
            assert!(matches!(found, Err(UserError::Unknown(_))), "{name:?}");
        }
    }

    #[test]
    fn only_root_runs_a_job_as_another_user() {
        let nobody = JobUser::find_for(ROOT, "nobody").unwrap().unwrap();
        assert!(
            nobody
                .credentials
                .groups
                .contains(&nobody.credentials.group)
        );
        let us = Uid::from_raw(nobody.credentials.user);
        assert_eq!(JobUser::find_for(us, "nobody").unwrap(), None);
        let refused = JobUser::find_for(us, "daemon");
        assert!(matches!(refused, Err(UserError::NotRoot(_))), "{refused:?}");
        assert_eq!(JobUser::find_for(ROOT, "root").unwrap(), None);
    }
}
