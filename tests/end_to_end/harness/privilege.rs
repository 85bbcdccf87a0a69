//! Requirements of tests. A test declares them, and the harness skips it if they are not met.

use std::cell::Cell;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nix::unistd::geteuid;

use super::program;

/// Privilege that a test needs.
#[derive(Clone, Copy)]
pub enum Privilege {
    /// Root, for namespaces, mounts and CRIU.
    Root,
    /// An ordinary user's: none.
    User,
}

/// Ids of the ordinary user, who has no account. Not 65534, by which a user namespace shows root.
const ORDINARY: u32 = 64001;

thread_local! {
    /// The test of this thread runs its programs as an ordinary user.
    static AS_USER: Cell<bool> = const { Cell::new(false) };
}

impl Privilege {
    /// Returns true if the tests can run with this privilege. If not, the test counts as skipped.
    pub fn is_granted(self) -> bool {
        match self {
            Self::Root if !geteuid().is_root() => {
                skip("end-to-end tests need root");
                false
            }
            Self::User if Ordinary::if_needed().is_some_and(|user| !user.reaches(program())) => {
                skip(
                    "an ordinary user does not reach the program: build it in a folder that all may enter",
                );
                false
            }
            Self::Root | Self::User => true,
        }
    }

    /// Runs a test with this privilege.
    pub fn run(self, test: impl FnOnce()) {
        if self.is_granted() {
            AS_USER.set(matches!(self, Self::User));
            test();
        }
    }
}

/// The user that a test's programs run as, where the tests run as root.
#[derive(Clone, Copy)]
pub struct Ordinary(u32);

impl Ordinary {
    /// Returns the user of this thread's test; `None` if its programs run as the tests do.
    pub fn of_test() -> Option<Self> {
        AS_USER.get().then(Self::if_needed).flatten()
    }

    fn if_needed() -> Option<Self> {
        geteuid().is_root().then_some(Self(ORDINARY))
    }

    /// Makes the command run as this user, without other groups and without capabilities.
    pub fn runs(self, command: &mut Command) {
        command.uid(self.0).gid(self.0).env("USER", "64001");
    }

    /// Gives a file or folder to this user.
    pub fn owns(self, path: &Path) {
        chown(path, Some(self.0), Some(self.0)).expect("the file is there");
    }

    /// Returns a line of `/etc/passwd` for this user.
    pub fn account(self, home: &Path) -> String {
        let home = home.display();
        format!("ordinary:x:{0}:{0}::{home}:/bin/bash\n", self.0)
    }

    fn reaches(self, path: &str) -> bool {
        let mut test = Command::new("test");
        self.runs(test.args(["-x", path]));
        test.status().is_ok_and(|status| status.success())
    }
}

/// Declares a test that needs root: `#[apply(as_root)]` instead of `#[test]`.
macro_rules! as_root {
    ($(#[$attribute:meta])* fn $name:ident() $body:block) => {
        #[test]
        $(#[$attribute])*
        fn $name() {
            $crate::harness::Privilege::Root.run(|| $body);
        }
    };
}
pub(crate) use as_root;

/// Declares a test that runs twice, as root and as an ordinary user: `#[apply(as_root_and_user)]` instead of `#[test]`.
macro_rules! as_root_and_user {
    ($(#[$attribute:meta])* fn $name:ident() $body:block) => {
        mod $name {
            #[allow(unused_imports, reason = "what the test uses is its module's")]
            use super::*;

            #[test]
            $(#[$attribute])*
            fn as_root() {
                $crate::harness::Privilege::Root.run(|| $body);
            }

            #[test]
            $(#[$attribute])*
            fn as_user() {
                $crate::harness::Privilege::User.run(|| $body);
            }
        }
    };
}
pub(crate) use as_root_and_user;

/// Declares a test that runs as an ordinary user: `#[apply(as_user)]` instead of `#[test]`.
macro_rules! as_user {
    ($(#[$attribute:meta])* fn $name:ident() $body:block) => {
        #[test]
        $(#[$attribute])*
        fn $name() {
            $crate::harness::Privilege::User.run(|| $body);
        }
    };
}
pub(crate) use as_user;

/// Marks a test as skipped: `scripts/test` shows the line and counts the test. The test itself has to return.
pub fn skip(reason: &str) {
    eprintln!("SKIPPED: {reason}");
}

/// Returns true if a program is installed. If not, the test counts as skipped.
pub fn installed(program: &str) -> bool {
    let found = Command::new("sh")
        .args([
            "-c",
            &format!("PATH=$PATH:/usr/sbin:/sbin; command -v {program}"),
        ])
        .output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        skip(&format!("no {program} here"));
    }
    found
}
