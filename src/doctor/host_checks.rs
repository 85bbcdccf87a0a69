//! The checks of the kernel, namespaces, privileges and pipes.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use bytesize::ByteSize;
use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use procfs::process::Process;

use super::checks::Check;
use super::seccomp;
use super::user_sandbox::UserSandbox;
use crate::doctor::capabilities::missing;
use crate::job::PacketLock;
use crate::network_socket::NetworkSocket;
use crate::run::format::chain;
use crate::sandbox::Network;
use crate::sandbox::is_in_user_namespace;

/// The oldest kernel tried. Linux 5.9 added `CAP_CHECKPOINT_RESTORE` and with it the interfaces that CRIU 4 prefers.
const OLDEST_KERNEL: (u8, u8) = (5, 9);

/// The first kernel on which mounts can be made to follow no links while CRIU restores (`MOUNT_ATTR_NOSYMFOLLOW`).
const NO_LINKS_KERNEL: (u8, u8) = (5, 14);

/// Size of the pipes for image streams: with 64 KiB the streams take three times as long.
const PIPE_BYTES: u64 = 1 << 20;

/// Value of `kernel.yama.ptrace_scope` that forbids tracing even to root.
const PTRACE_FORBIDDEN: &str = "3";

/// Name of the checks of a job's TCP connections.
const CONNECTIONS: &str = "connections";

/// Remedy for what an ordinary user does not have.
const WITHOUT_ROOT: &str =
    "no action is needed; docs/guide/without-root.md lists the features that need root";

/// Runs all checks of this file. Returns the sandbox of an ordinary user as well, where jobs will have that.
pub(super) fn checks() -> (Vec<Check>, Option<UserSandbox>) {
    let (namespaces, sandbox) = namespaces();
    let unprivileged = sandbox.is_some() || is_in_user_namespace();
    let mut checks = vec![kernel(), checkpoint_restore(), namespaces];
    match Process::myself().and_then(|process| process.status()) {
        Ok(status) => {
            let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
            let scope = scope.unwrap_or_default();
            checks.push(privileges(status.capeff, scope.trim(), unprivileged));
            checks.push(seccomp::check(&status));
        }
        Err(error) => {
            let detail = format!("cannot read /proc/self/status: {error}");
            checks.push(Check::problem("privileges", detail, "mount /proc"));
        }
    }
    checks.push(if sandbox.is_some() {
        connections_of_user()
    } else {
        connections()
    });
    checks.push(pipes(&fs::read_to_string("/proc/sys/fs/pipe-max-size")));
    (checks, sandbox)
}

fn kernel() -> Check {
    const NAME: &str = "kernel";
    match procfs::KernelVersion::current() {
        Ok(version) => {
            let detail = format!(
                "Linux {}.{}.{}",
                version.major, version.minor, version.patch
            );
            let version = (version.major, version.minor);
            if version >= NO_LINKS_KERNEL {
                Check::ok(NAME, detail)
            } else if version >= OLDEST_KERNEL {
                let remedy = "use Linux 5.14 or newer where jobs run as users that you do not trust: see the security page of the guide";
                Check::note(NAME, detail, remedy)
            } else {
                let (major, minor) = OLDEST_KERNEL;
                let remedy = format!("use Linux {major}.{minor} or newer; older ones are untested");
                Check::note(NAME, detail, remedy)
            }
        }
        Err(error) => Check::problem(NAME, format!("version unknown: {error}"), "mount /proc"),
    }
}

/// Checks for the kernel options that CRIU needs and that leave a trace in /proc.
fn checkpoint_restore() -> Check {
    const NAME: &str = "checkpoint";
    let children = format!("/proc/self/task/{}/children", std::process::id());
    let needed = [
        ("CONFIG_CHECKPOINT_RESTORE", "/proc/sys/kernel/ns_last_pid"),
        ("CONFIG_PROC_CHILDREN", &children),
    ];
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(_, path)| !Path::new(path).exists())
        .map(|(name, _)| *name)
        .collect();
    if missing.is_empty() {
        return Check::ok(NAME, "the kernel can checkpoint and restore");
    }
    let list = missing.join(", ");
    Check::problem(
        NAME,
        format!("the kernel lacks {list}"),
        format!("use a kernel built with {list}"),
    )
}

/// Tries to create the namespaces: kernels, containers and security modules each have a way to refuse them.
fn namespaces() -> (Check, Option<UserSandbox>) {
    const NAME: &str = "namespaces";
    let (step, error) = match thread::spawn(enter_and_run).join() {
        Ok(Ok(())) => {
            let check = Check::ok(NAME, "PID and mount namespaces can be created");
            return (check, None);
        }
        Ok(Err(refusal)) => refusal,
        Err(_) => {
            let check = Check::note(NAME, "the test was aborted", "report this as a bug");
            return (check, None);
        }
    };
    match UserSandbox::start(Network::Host) {
        Ok(sandbox) => {
            let detail = "PID and mount namespaces can be created in a user namespace";
            (Check::ok(NAME, detail), Some(sandbox))
        }
        Err(forbidden) => {
            let check = Check::note(
                NAME,
                format!("cannot {step}: {error}; {forbidden}"),
                "run as root with CAP_SYS_ADMIN, or allow user namespaces; without either, jobs run unisolated and \
                 cannot be snapshotted",
            );
            (check, None)
        }
    }
}

/// Tries to give a sandbox a network namespace.
fn connections_of_user() -> Check {
    match UserSandbox::start(Network::Own) {
        Ok(_) => Check::ok(
            CONNECTIONS,
            "connections inside a job are restored, in its own network (pasta)",
        ),
        Err(error) => Check::note(
            CONNECTIONS,
            format!(
                "a restored job finds its TCP connections closed: {}",
                chain(&error)
            ),
            "install the package passt for the program pasta, and give users access to /dev/net/tun, or set \
             network.namespace = \"host\": see the guide, \"Without root\"",
        ),
    }
}

/// Tries the rules that hold packets back while connections are dumped or restored, for no connection.
fn connections() -> Check {
    let set = NetworkSocket::Netfilter.open();
    match set.and_then(|netlink| PacketLock::set(netlink, &[])) {
        Ok(_) => Check::ok(CONNECTIONS, "packets of a job's connections can be blocked"),
        Err(error) => Check::note(
            CONNECTIONS,
            format!("packets of a job's TCP connections cannot be blocked: {error}"),
            "use a kernel with nftables (Linux 5.12 or newer), as root or with CAP_NET_ADMIN; without it, snapshots \
             fail while data is in transit in a job's connection",
        ),
    }
}

/// Creates the namespaces on the calling thread, which exits afterwards. Namespaces belong to a thread, so the rest of
/// the process keeps its own.
fn enter_and_run() -> Result<(), Refusal> {
    enter(CloneFlags::CLONE_NEWPID)?;
    let start = |error| ("start a process in a PID namespace", error);
    let mut first = Command::new("/bin/true");
    let status = first
        .env_clear()
        .stdin(Stdio::null())
        .status()
        .map_err(start)?;
    if status.success() {
        return Ok(());
    }
    Err(start(io::Error::other(status.to_string())))
}

/// The refused step and the error.
pub(crate) type Refusal = (&'static str, io::Error);

/// Moves the calling thread into a new mount namespace with a fresh /proc, as in the sandbox: the /proc of a container
/// is partly read-only. `others` are additional namespaces.
pub(crate) fn enter(others: CloneFlags) -> Result<(), Refusal> {
    let because = |step| move |errno: Errno| (step, io::Error::from(errno));
    unshare(CloneFlags::CLONE_NEWNS | others)
        .map_err(because("create a PID and a mount namespace"))?;
    let nothing = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(nothing, "/", nothing, private, nothing)
        .map_err(because("make the mounts of a namespace private"))?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, nothing)
        .map_err(because("mount /proc in a namespace"))
}

fn privileges(effective: u64, ptrace_scope: &str, unprivileged: bool) -> Check {
    const NAME: &str = "privileges";
    if ptrace_scope == PTRACE_FORBIDDEN {
        let detail = "kernel.yama.ptrace_scope is 3: nobody may trace a process";
        return Check::problem(NAME, detail, "set it to 2 or less; this needs a reboot");
    }
    if unprivileged {
        let detail = "none on the machine: jobs run in a user namespace";
        return Check::note(NAME, detail, WITHOUT_ROOT);
    }
    let missing = missing(effective);
    if !missing.is_empty() {
        let list = missing.join(", ");
        let remedy = format!("run as root; in a container add {list}");
        return Check::problem(NAME, format!("missing {list}"), remedy);
    }
    Check::ok(NAME, "all needed capabilities")
}

fn pipes(text: &io::Result<String>) -> Check {
    const NAME: &str = "pipes";
    let limit = text
        .as_ref()
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok());
    let remedy = format!("sysctl fs.pipe-max-size={PIPE_BYTES}");
    match limit {
        Some(limit) if limit >= PIPE_BYTES => Check::ok(NAME, format!("up to {}", ByteSize(limit))),
        Some(limit) => {
            let detail = format!(
                "at most {}: snapshots freeze the job for longer",
                ByteSize(limit)
            );
            Check::note(NAME, detail, remedy)
        }
        None => Check::note(NAME, "cannot read fs.pipe-max-size", remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::checks::Status;

    #[test]
    fn missing_capabilities_are_named() {
        let check = privileges(!(1 << 25), "1", false);
        assert_eq!(check.status, Status::Problem);
        assert_eq!(check.detail, "missing CAP_SYS_TIME");
    }

    #[test]
    fn a_user_without_privileges_is_told_what_is_weaker() {
        let check = privileges(0, "1", true);
        assert_eq!(check.status, Status::Note);
        assert!(check.detail.contains("user namespace"), "{check:?}");
        assert_eq!(privileges(0, "1", false).status, Status::Problem);
    }

    #[test]
    fn forbidden_tracing_is_a_problem_even_for_root() {
        assert_eq!(privileges(u64::MAX, "3", false).status, Status::Problem);
        assert_eq!(privileges(u64::MAX, "2", false).status, Status::Ok);
    }

    #[test]
    fn small_or_unknown_pipes_are_noted() {
        assert_eq!(pipes(&Ok("1048576\n".into())).status, Status::Ok);
        assert_eq!(pipes(&Ok("65536\n".into())).status, Status::Note);
        assert_eq!(pipes(&Ok("many\n".into())).status, Status::Note);
        assert_eq!(
            pipes(&Err(io::Error::from(io::ErrorKind::NotFound))).status,
            Status::Note
        );
    }

    #[test]
    fn trial_of_namespaces_leaves_the_caller_in_its_own() {
        let namespaces_of_this = || {
            ["mnt", "pid_for_children"]
                .map(|name| fs::read_link(format!("/proc/thread-self/ns/{name}")).unwrap())
        };
        let mounts = || fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let before = (namespaces_of_this(), mounts());
        let (check, _) = namespaces();
        assert_eq!((namespaces_of_this(), mounts()), before);
        if nix::unistd::geteuid().is_root() {
            assert_eq!(check.status, Status::Ok, "{check:?}");
        }
    }
}
