//! Reasons why the kernel refuses a user namespace to an ordinary user, and who can change each.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;

use nix::libc;

/// Namespaces that a user's sandbox may have; `user.max_KIND_namespaces` limits their number.
const KINDS: [&str; 5] = ["user", "pid", "mnt", "ipc", "net"];

/// Cause that forbids a sandbox in a user namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Forbidden {
    /// A setting of the kernel has this value.
    Setting {
        /// Its name, as `sysctl` has it.
        name: String,
        /// The value that allows it.
        allows: &'static str,
    },
    /// `AppArmor` removes the capabilities of programs without a rule (Ubuntu 23.10 and later).
    AppArmor,
    /// A seccomp filter, as in containers.
    Seccomp,
    /// Parts of `/proc` are covered, as in containers. The kernel then refuses to mount a new one.
    CoveredProc,
    /// The kernel was built without user namespaces.
    Kernel,
    /// An unknown cause.
    Unknown,
}

impl Forbidden {
    /// Finds the reason of a refusal on this machine. `mounting` is true if the namespace was created, and a mount in it
    /// was refused.
    pub(super) fn find(refusal: &io::Error, mounting: bool) -> Self {
        let filtered = fs::read_to_string("/proc/self/status")
            .is_ok_and(|status| status.contains("\nSeccomp:\t2"));
        let covered = mounting && (!filtered || is_proc_covered());
        Self::of(refusal, covered, filtered, |path| {
            fs::read_to_string(Path::new("/proc/sys").join(path)).ok()
        })
    }

    /// `covered` is true if a new `/proc` was refused and parts of the present one are covered.
    fn of(
        refusal: &io::Error,
        covered: bool,
        filtered: bool,
        setting: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let is = |path: &str, value: &str| setting(path).is_some_and(|text| text.trim() == value);
        if is("kernel/unprivileged_userns_clone", "0") {
            return Self::Setting {
                name: "kernel.unprivileged_userns_clone".to_owned(),
                allows: "1",
            };
        }
        let limits = KINDS.map(|kind| format!("max_{kind}_namespaces"));
        if let Some(limit) = limits
            .iter()
            .find(|limit| is(&format!("user/{limit}"), "0"))
        {
            return Self::Setting {
                name: format!("user.{limit}"),
                allows: "10000",
            };
        }
        match refusal.raw_os_error() {
            Some(libc::ENOSPC | libc::EUSERS) => {
                return Self::Setting {
                    name: "user.max_user_namespaces".to_owned(),
                    allows: "a larger number",
                };
            }
            Some(libc::EINVAL) => return Self::Kernel,
            _ => {}
        }
        if is("kernel/apparmor_restrict_unprivileged_userns", "1") {
            Self::AppArmor
        } else if covered {
            Self::CoveredProc
        } else if filtered {
            Self::Seccomp
        } else {
            Self::Unknown
        }
    }
}

fn is_proc_covered() -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    mounts.lines().any(is_below_proc)
}

/// Returns true if a line of `mountinfo` is about a mount on a part of `/proc`.
fn is_below_proc(line: &str) -> bool {
    let point = line.split(' ').nth(4);
    point.is_some_and(|point| point.starts_with("/proc/"))
}

impl fmt::Display for Forbidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setting { name, allows } => write!(
                f,
                "{name} forbids it: the machine's administrator can set it to {allows} (sysctl)"
            ),
            Self::AppArmor => f.write_str(
                "AppArmor forbids it (kernel.apparmor_restrict_unprivileged_userns = 1): the machine's administrator can \
                 set that to 0, or add a profile with the rule \"userns,\" for ckpt-run to /etc/apparmor.d",
            ),
            Self::Seccomp => f.write_str(
                "a seccomp filter forbids it, as in a container: whoever starts the container can leave the filter out \
                 (--security-opt seccomp=unconfined)",
            ),
            Self::CoveredProc => f.write_str(
                "parts of /proc are covered, as in a container: whoever starts the container can uncover them \
                 (podman: --security-opt unmask=ALL; docker: --security-opt systempaths=unconfined)",
            ),
            Self::Kernel => f.write_str(
                "the kernel has no user namespaces (CONFIG_USER_NS): run as root, or on another kernel",
            ),
            Self::Unknown => f.write_str(
                "the kernel or a security module forbids it: ask the machine's administrator for unprivileged user \
                 namespaces, or run as root",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(errno: i32, covered: bool, filtered: bool, settings: &[(&str, &str)]) -> Forbidden {
        let settings = settings.to_vec();
        Forbidden::of(
            &io::Error::from_raw_os_error(errno),
            covered,
            filtered,
            |path| {
                let found = settings.iter().find(|(name, _)| *name == path);
                found.map(|(_, value)| format!("{value}\n"))
            },
        )
    }

    fn setting(name: &str, allows: &'static str) -> Forbidden {
        Forbidden::Setting {
            name: name.to_owned(),
            allows,
        }
    }

    #[test]
    fn the_setting_that_forbids_namespaces_is_named() {
        let debian = ("kernel/unprivileged_userns_clone", "0");
        let apparmor = ("kernel/apparmor_restrict_unprivileged_userns", "1");
        let none = ("user/max_user_namespaces", "0");
        let no_pid = ("user/max_pid_namespaces", "0");
        let many = ("user/max_user_namespaces", "96365");
        let cases = [
            (
                libc::EPERM,
                vec![debian, apparmor, many],
                setting("kernel.unprivileged_userns_clone", "1"),
            ),
            (
                libc::ENOSPC,
                vec![none],
                setting("user.max_user_namespaces", "10000"),
            ),
            (
                libc::ENOSPC,
                vec![many, no_pid],
                setting("user.max_pid_namespaces", "10000"),
            ),
            (
                libc::ENOSPC,
                vec![many],
                setting("user.max_user_namespaces", "a larger number"),
            ),
            (libc::EPERM, vec![many, apparmor], Forbidden::AppArmor),
            (libc::EINVAL, vec![many], Forbidden::Kernel),
            (libc::EPERM, vec![many], Forbidden::Unknown),
        ];
        for (errno, settings, expected) in cases {
            assert_eq!(
                found(errno, false, false, &settings),
                expected,
                "{settings:?}"
            );
        }
    }

    #[test]
    fn containers_are_recognized() {
        let open = [("user/max_user_namespaces", "96365")];
        assert_eq!(found(libc::EPERM, false, true, &open), Forbidden::Seccomp);
        for filtered in [false, true] {
            let found = found(libc::EPERM, true, filtered, &open);
            assert_eq!(found, Forbidden::CoveredProc);
        }
        let masked = "612 605 0:62 /null /proc/kcore rw,nosuid - tmpfs tmpfs rw";
        let whole = "605 600 0:60 / /proc rw,nosuid - proc proc rw";
        assert!(is_below_proc(masked) && !is_below_proc(whole));
    }
}
