//! A sandbox's own network namespace, inside of which pid 1 makes the settings as on the machine (name servers, low
//! ports, ping) and, at the end, waits until the job's last data have left it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use procfs::net::{TcpNetEntry, TcpState, tcp, tcp6};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsmount, fsopen, move_mount, open_tree,
};

use crate::clock;

/// Address at which pasta forwards names to the machine's first name server, as podman has it.
pub(super) const NAME_SERVER: &str = "169.254.1.1";
const RESOLVER: &str = "/etc/resolv.conf";
/// Name of the file that is mounted over [`RESOLVER`].
const RESOLVER_COPY: &str = "ckpt-run-resolv.conf";
/// First port that users may bind.
const FIRST_PORT: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
/// Groups that may send pings.
const PING_GROUPS: &str = "/proc/sys/net/ipv4/ping_group_range";
/// Search for other owners of an IPv6 address, which cannot be bound meanwhile. Only pasta is on the other side.
const DUPLICATES: &str = "/proc/sys/net/ipv6/conf/default/accept_dad";

/// Time limit for the delivery of the job's last data. It passes only if a receiver does not read them.
const DELIVERY_LIMIT: Duration = Duration::from_secs(5);
/// Interval between two checks of the connections.
const DELIVERY_POLL: Duration = Duration::from_millis(5);

/// Returns the argument of pid 1 that contains the machine's settings.
pub(super) fn of_machine() -> OsString {
    let port = fs::read_to_string(FIRST_PORT).unwrap_or_default();
    port.trim().into()
}

/// Applies the machine's settings to the network namespace of this process, and makes the machine's name servers
/// reachable. A setting that the kernel refuses keeps its default.
///
/// # Errors
/// The file with the name servers cannot be replaced.
pub(super) fn set_up(of_machine: &str, group: u32) -> io::Result<()> {
    let _ = fs::write(FIRST_PORT, of_machine);
    let _ = fs::write(PING_GROUPS, format!("{group} {group}"));
    let _ = fs::write(DUPLICATES, "0");
    let text = fs::read_to_string(RESOLVER).unwrap_or_default();
    match reachable(&text) {
        Some(text) => replace_resolver(&text),
        None => Ok(()),
    }
}

/// Returns true if a name server of the machine is on its loopback, which is another one in the namespace.
pub(super) fn needs_name_server() -> bool {
    fs::read_to_string(RESOLVER).is_ok_and(|text| reachable(&text).is_some())
}

/// Returns the text with one name server in place of those on the loopback; `None` if there are none.
fn reachable(text: &str) -> Option<String> {
    let is_local = |line: &&str| {
        let mut words = line.split_whitespace();
        let address = (words.next() == Some("nameserver"))
            .then(|| words.next())
            .flatten();
        address.is_some_and(|address| {
            address
                .parse::<IpAddr>()
                .is_ok_and(|address| address.is_loopback())
        })
    };
    text.lines().find(is_local)?;
    let others = text.lines().filter(|line| !is_local(line));
    let lines = [format!("nameserver {NAME_SERVER}")];
    let lines = lines.into_iter().chain(others.map(str::to_owned));
    Some(lines.map(|line| line + "\n").collect())
}

/// Mounts a file with this text over [`RESOLVER`].
fn replace_resolver(text: &str) -> io::Result<()> {
    let filesystem = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&filesystem)?;
    let mounted = fsmount(
        &filesystem,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )?;
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = openat(&mounted, RESOLVER_COPY, flags, Mode::from_raw_mode(0o644))?;
    File::from(file).write_all(text.as_bytes())?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(&mounted, RESOLVER_COPY, flags)?;
    let target = fs::canonicalize(Path::new(RESOLVER))?;
    let from_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(move_mount(&tree, "", CWD, &target, from_descriptor)?)
}

/// Waits until pasta has passed on what the killed processes have sent by TCP, as the kernel of the machine would do
/// without a network namespace. What is in the namespace when it ends is lost.
pub(super) fn await_delivery() {
    let deadline = clock::now() + DELIVERY_LIMIT;
    while is_sending() && clock::now() < deadline {
        thread::sleep(DELIVERY_POLL);
    }
}

/// Returns true if data or the end of a connection are on their way. Connections to the machine's loopback end in a
/// socket of pasta within the namespace, which must read them.
fn is_sending() -> bool {
    let is_pending = |connection: &TcpNetEntry| match connection.state {
        TcpState::FinWait1 | TcpState::Closing | TcpState::LastAck => true,
        TcpState::Established | TcpState::CloseWait => connection.rx_queue > 0,
        _ => false,
    };
    let tables = [tcp(), tcp6()];
    tables
        .into_iter()
        .flatten()
        .flatten()
        .any(|one| is_pending(&one))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_on_the_loopback_are_replaced() {
        let others = "# made by hand\nnameserver 192.0.2.1\nsearch example.org\n";
        assert_eq!(reachable(others), None);
        let stub = "# 127.0.0.53\nnameserver 127.0.0.53\nnameserver ::1\noptions edns0\n";
        let expected = "nameserver 169.254.1.1\n# 127.0.0.53\noptions edns0\n";
        assert_eq!(reachable(stub).as_deref(), Some(expected));
    }
}
