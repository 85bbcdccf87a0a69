//! Requirements of tests. A test declares them, and the harness skips it if they are not met.

use std::process::Command;

use nix::unistd::geteuid;

/// Privilege that a test needs.
#[derive(Clone, Copy)]
pub enum Privilege {
    /// Root, for namespaces, mounts and CRIU.
    Root,
}

impl Privilege {
    /// Returns true if the tests run with this privilege. If not, the test counts as skipped.
    pub fn is_granted(self) -> bool {
        let granted = match self {
            Self::Root => geteuid().is_root(),
        };
        if !granted {
            skip("end-to-end tests need root");
        }
        granted
    }
}

/// Declares a test that needs root: `#[apply(as_root)]` instead of `#[test]`.
macro_rules! as_root {
    ($(#[$attribute:meta])* fn $name:ident() $body:block) => {
        #[test]
        $(#[$attribute])*
        fn $name() {
            if $crate::harness::Privilege::Root.is_granted() $body
        }
    };
}
pub(crate) use as_root;

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
