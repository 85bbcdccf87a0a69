//! Requirements of tests. A test declares them, and the harness skips it if they are not met.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::process::Command;

use nix::unistd::geteuid;

use super::program;

/// Privilege that a test needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Privilege {
    /// Root, for namespaces, mounts and CRIU.
    Root,
    /// An ordinary user's: none. The job uses the machine's network.
    User,
    /// An ordinary user's, and pasta: the job has a network namespace.
    UserWithNetwork,
}

/// Ids of the ordinary user, who has no account. Not 65534, by which a user namespace shows root.
const ORDINARY: u32 = 64001;

thread_local! {
    /// The privilege of this thread's test.
    static GRANTED: Cell<Privilege> = const { Cell::new(Privilege::Root) };
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
            Self::UserWithNetwork => Self::User.is_granted() && installed("pasta") && has_tun(),
            Self::Root | Self::User => true,
        }
    }

    /// Runs a test with this privilege.
    pub fn run(self, test: impl FnOnce()) {
        if !self.is_granted() {
            return;
        }
        GRANTED.set(self);
        let ended = panic::catch_unwind(AssertUnwindSafe(test));
        if let Err(cause) = ended
            && !cause.is::<Skipped>()
        {
            panic::resume_unwind(cause);
        }
    }
}

/// The user that a test's programs run as, where the tests run as root.
#[derive(Clone, Copy)]
pub struct Ordinary(u32);

impl Ordinary {
    /// Returns the user of this thread's test; `None` if its programs run as the tests do.
    pub fn of_test() -> Option<Self> {
        let granted = GRANTED.get();
        (granted != Privilege::Root).then(Self::if_needed).flatten()
    }

    fn if_needed() -> Option<Self> {
        geteuid().is_root().then_some(Self(ORDINARY))
    }

    /// Makes the command run as this user, without other groups and without capabilities.
    pub fn runs(self, command: &mut Command) {
        command.uid(self.0).gid(self.0).env("USER", "64001");
    }

    /// Returns a command that runs a program as this user in a mount namespace where all users may open the device
    /// `tun`, as on most machines.
    pub fn command_with_tun(self, program: &str, tun: &Path) -> Command {
        let script = r#"mount --bind "$0" /dev/net/tun && exec setpriv --reuid="$1" --regid="$1" --clear-groups \
            --inh-caps=-all --no-new-privs -- "${@:2}""#;
        let mut command = Command::new("unshare");
        command.args(["--mount", "bash", "-c", script]).arg(tun);
        command.arg(self.0.to_string()).arg(program);
        command
    }

    /// Returns words before a command that make root run it as this user, without other groups and without capabilities.
    pub fn prefix(self) -> [String; 4] {
        let id = self.0;
        [
            "setpriv".into(),
            format!("--reuid={id}"),
            format!("--regid={id}"),
            "--clear-groups".into(),
        ]
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

/// Returns the network of jobs in this thread's test, a value of `network.namespace`; `None` for root's jobs.
pub fn network_of_test() -> Option<&'static str> {
    match GRANTED.get() {
        Privilege::Root => None,
        Privilege::User => Some("host"),
        Privilege::UserWithNetwork => Some("own"),
    }
}

/// Returns true if a test may open the device from which pasta makes network devices, or may give it to its programs.
fn has_tun() -> bool {
    let has = Path::new(TUN).exists() && (geteuid().is_root() || is_open_to_all(TUN));
    if !has {
        skip("no /dev/net/tun that the user may open");
    }
    has
}

/// Returns true if all users may open the device.
pub fn is_open_to_all(device: &str) -> bool {
    fs::metadata(device).is_ok_and(|found| found.mode() & 0o006 == 0o006)
}

/// Device from which pasta makes network devices.
pub const TUN: &str = "/dev/net/tun";

/// Declares a test that runs with a privilege.
macro_rules! run_as {
    ($privilege:ident: $(#[$attribute:meta])* fn $name:ident() $body:block) => {
        #[test]
        $(#[$attribute])*
        fn $name() {
            $crate::harness::Privilege::$privilege.run(|| $body);
        }
    };
}
pub(crate) use run_as;

/// Declares a test that runs twice: as root, and under the second name with another privilege.
macro_rules! run_twice {
    ($second:ident, $privilege:ident: $(#[$attribute:meta])* fn $name:ident() $body:block) => {
        mod $name {
            #[allow(unused_imports, reason = "what the test uses is its module's")]
            use super::*;

            $crate::harness::run_as! { Root: $(#[$attribute])* fn as_root() $body }
            $crate::harness::run_as! { $privilege: $(#[$attribute])* fn $second() $body }
        }
    };
}
pub(crate) use run_twice;

/// Declares a test that needs root: `#[apply(as_root)]` instead of `#[test]`.
macro_rules! as_root {
    ($($test:tt)*) => { $crate::harness::run_as! { Root: $($test)* } };
}
pub(crate) use as_root;

/// Declares a test that runs as an ordinary user.
macro_rules! as_user {
    ($($test:tt)*) => { $crate::harness::run_as! { User: $($test)* } };
}
pub(crate) use as_user;

/// Declares a test that runs as an ordinary user in a network namespace.
macro_rules! in_own_network {
    ($($test:tt)*) => { $crate::harness::run_as! { UserWithNetwork: $($test)* } };
}
pub(crate) use in_own_network;

/// Declares a test that runs twice, as root and as an ordinary user.
macro_rules! as_root_and_user {
    ($($test:tt)*) => { $crate::harness::run_twice! { as_user, User: $($test)* } };
}
pub(crate) use as_root_and_user;

/// Declares a test that runs twice, as root on the machine's network and as an ordinary user in a network namespace.
macro_rules! as_root_and_in_own_network {
    ($($test:tt)*) => {
        $crate::harness::run_twice! { in_own_network, UserWithNetwork: $($test)* }
    };
}
pub(crate) use as_root_and_in_own_network;

/// Marks a test as skipped: `scripts/test` shows the line and counts the test. The test itself has to return.
pub fn skip(reason: &str) {
    eprintln!("SKIPPED: {reason}");
}

/// Payload of the panic by which [`skip_now`] ends a test.
struct Skipped;

/// Ends the test from any function that it calls; it counts as skipped.
pub fn skip_now(reason: &str) -> ! {
    skip(reason);
    panic::resume_unwind(Box::new(Skipped));
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
