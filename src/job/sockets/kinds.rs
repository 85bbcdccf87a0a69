//! Sockets and network devices that CRIU cannot dump, identified by their kernel names.

use std::collections::HashSet;
use std::path::Path;

use procfs::process::Process as ProcessEntry;

use crate::job::descriptors::Descriptors;
use crate::job::obstacles::{Finding, Obstacle};

/// Names of the protocols that CRIU supports (`struct proto` of Linux 4.10 to 6.18).
const KNOWN: [&str; 14] = [
    "TCP",
    "TCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UDPLITEv6",
    "PING",
    "PINGv6",
    "RAW",
    "RAWv6",
    "UNIX",
    "UNIX-STREAM",
    "NETLINK",
    "PACKET",
];
/// Extended attribute with the name of a socket's protocol (`sockfs`).
const PROTOCOL: &str = "system.sockprotoname";
/// Limit on such a name. `proto.name` has 32 bytes.
const NAME_BYTES_MAX: usize = 64;
/// Device file of tun and tap descriptors.
const TUN: &str = "/dev/net/tun";

/// Searches for a descriptor that CRIU cannot dump. A process or descriptor that disappears meanwhile is skipped.
pub(in crate::job) fn find_unknown_kind(open: &[Descriptors]) -> Option<Obstacle> {
    let mut seen = HashSet::new();
    for Descriptors { process, all } in open {
        for descriptor in all {
            let number = descriptor.number.to_string();
            if descriptor.target == Path::new(TUN) {
                return Some(Obstacle::of(process, Finding::Tun(number)));
            }
            if !descriptor.socket().is_some_and(|inode| seen.insert(inode)) {
                continue;
            }
            let kind = protocol(&descriptor.link());
            if let Some(kind) = kind.filter(|name| !KNOWN.contains(&name.as_str())) {
                let finding = Finding::Socket {
                    descriptor: number,
                    remedy: remedy(&kind),
                    kind,
                };
                return Some(Obstacle::of(process, finding));
            }
        }
    }
    None
}

fn protocol(descriptor: &Path) -> Option<String> {
    let mut name = [0; NAME_BYTES_MAX];
    let length = rustix::fs::getxattr(descriptor, PROTOCOL, &mut name[..]).ok()?;
    let name = String::from_utf8_lossy(name.get(..length)?);
    Some(name.trim_end_matches('\0').to_owned())
}

fn remedy(kind: &str) -> &'static str {
    if kind.starts_with("MPTCP") {
        "use plain TCP (programs in Go: GODEBUG=multipathtcp=0)"
    } else {
        "close it before snapshots, or use TCP, UDP or a unix socket"
    }
}

/// Returns the inodes of UDP sockets with unsent data.
pub(super) fn unsent_datagrams(pid: i32) -> procfs::ProcResult<HashSet<u64>> {
    let process = ProcessEntry::new(pid)?;
    let mut entries = process.udp()?;
    // The file is missing in a kernel without IPv6.
    entries.extend(process.udp6().unwrap_or_default());
    let unsent = entries.into_iter().filter(|entry| entry.tx_queue > 0);
    Ok(unsent.map(|entry| entry.inode).collect())
}
