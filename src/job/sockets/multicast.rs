//! Multicast groups that a socket has joined, which CRIU (4.2) neither restores nor reports: the restored socket would
//! receive nothing more from them.
//!
//! The kernel lists the groups of each interface, but not who has joined them. A socket answers for one group, by
//! `MCAST_MSFILTER`, with its sources.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::libc::{self, c_int};
use serde::{Deserialize, Serialize};

use super::interfaces::{Interface, interfaces_of};
use super::options::{read_into, write};

/// Families of addresses (`AF_INET`, `AF_INET6`).
const IPV4: u16 = 2;
const IPV6: u16 = 10;
/// Size of an address in the kernel's structures (`sockaddr_storage`).
const ADDRESS_BYTES: usize = 128;
/// Place of the group in `struct group_req` and `struct group_filter`. The index of the interface is at 0.
const GROUP_AT: usize = 8;
/// Size of `struct group_req`. In `struct group_filter`, the mode is there, then the number of sources.
const REQUEST_BYTES: usize = GROUP_AT + ADDRESS_BYTES;
/// Place of the sources in `struct group_filter`.
const SOURCES_AT: usize = REQUEST_BYTES + 8;
/// Limit of the kernel on the sources of a group (`mld_max_msf`, `igmp_max_msf`).
const SOURCES_MAX: u32 = 64;
/// Groups that the kernel joins itself on every interface.
const KERNELS: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(224, 0, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xff01, 0, 0, 0, 0, 0, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1)),
];

/// A group that a socket has joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Name of the interface.
    pub interface: String,
    /// The kernel's `struct group_filter`: interface, group, mode and sources.
    pub filter: Vec<u8>,
}

/// A group of an interface, for any socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) interface: Interface,
    address: IpAddr,
}

/// Returns which of the groups a socket has joined. Those that the kernel joins itself are left out.
pub(super) fn joined(socket: &OwnedFd, groups: &[Group]) -> Vec<Membership> {
    let of = |group: &Group| {
        let mut filter = vec![0; SOURCES_AT + SOURCES_MAX as usize * ADDRESS_BYTES];
        filter[..4].copy_from_slice(&group.interface.index.to_ne_bytes());
        put_address(&mut filter[GROUP_AT..REQUEST_BYTES], group.address);
        filter[REQUEST_BYTES + 4..SOURCES_AT].copy_from_slice(&SOURCES_MAX.to_ne_bytes());
        read_into(socket, (level(&filter)?, libc::MCAST_MSFILTER), &mut filter)?;
        filter.truncate(length(&filter)?);
        Some(Membership {
            interface: group.interface.name.clone(),
            filter,
        })
    };
    let can_be_joined = |group: &&Group| !KERNELS.contains(&group.address);
    groups.iter().filter(can_be_joined).filter_map(of).collect()
}

/// Lets a socket join a group again. `pid` is a process (a host pid) in its network namespace.
pub(super) fn join(socket: &OwnedFd, membership: &Membership, pid: i32) -> Result<(), Errno> {
    let mut filter = membership.filter.clone();
    let (Some(level), Some(length)) = (level(&filter), length(&filter)) else {
        return Err(Errno::EINVAL);
    };
    if filter.len() != length {
        return Err(Errno::EINVAL);
    }
    let interfaces = interfaces_of(pid).into_iter();
    let mut same = interfaces.filter(|interface| interface.name == membership.interface);
    let index = same.next().ok_or(Errno::ENODEV)?.index;
    filter[..4].copy_from_slice(&index.to_ne_bytes());
    write(
        socket,
        (level, libc::MCAST_JOIN_GROUP),
        &filter[..REQUEST_BYTES],
    )?;
    // Without sources and with mode 0 (`MCAST_EXCLUDE`), the socket receives from all, as after the join.
    if filter[REQUEST_BYTES..SOURCES_AT]
        .iter()
        .all(|byte| *byte == 0)
    {
        return Ok(());
    }
    write(socket, (level, libc::MCAST_MSFILTER), &filter)
}

/// Returns the address of the group, for messages.
pub(super) fn address_of(membership: &Membership) -> Option<IpAddr> {
    let group = membership.filter.get(GROUP_AT..REQUEST_BYTES)?;
    match family(group)? {
        IPV4 => Some(<[u8; 4]>::try_from(&group[4..8]).ok()?.into()),
        IPV6 => Some(<[u8; 16]>::try_from(&group[8..24]).ok()?.into()),
        _ => None,
    }
}

/// Returns the level of the options of a group.
fn level(filter: &[u8]) -> Option<c_int> {
    match family(filter.get(GROUP_AT..)?)? {
        IPV4 => Some(libc::SOL_IP),
        IPV6 => Some(libc::SOL_IPV6),
        _ => None,
    }
}

fn family(address: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(*address.first_chunk()?))
}

/// Returns the length of a filter with its sources.
fn length(filter: &[u8]) -> Option<usize> {
    let count = filter.get(REQUEST_BYTES + 4..SOURCES_AT)?.first_chunk()?;
    let count = u32::from_ne_bytes(*count);
    (count <= SOURCES_MAX).then(|| SOURCES_AT + count as usize * ADDRESS_BYTES)
}

/// Writes a `sockaddr_in` or `sockaddr_in6`.
fn put_address(room: &mut [u8], address: IpAddr) {
    match address {
        IpAddr::V4(address) => {
            room[..2].copy_from_slice(&IPV4.to_ne_bytes());
            room[4..8].copy_from_slice(&address.octets());
        }
        IpAddr::V6(address) => {
            room[..2].copy_from_slice(&IPV6.to_ne_bytes());
            room[8..24].copy_from_slice(&address.octets());
        }
    }
}

/// Lists the groups of all interfaces in the network namespace of a process (a host pid). Each interface that is up has at
/// least one.
pub(super) fn list(pid: i32) -> Vec<Group> {
    // A kernel without IPv6 does not have the second one.
    let read = |name| fs::read_to_string(format!("/proc/{pid}/net/{name}")).unwrap_or_default();
    let mut groups = parse_igmp(&read("igmp"));
    groups.extend(parse_igmp6(&read("igmp6")));
    groups
}

/// Parses `/proc/net/igmp`: a line for each interface, then one for each of its groups, in hexadecimal digits as in memory.
fn parse_igmp(list: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    let mut interface = None;
    for line in list.lines().skip(1) {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else {
            continue;
        };
        if line.starts_with(char::is_whitespace) {
            let address = u32::from_str_radix(first, 16).ok();
            let group = interface
                .clone()
                .zip(address)
                .map(|(interface, address)| Group {
                    interface,
                    address: Ipv4Addr::from(address.to_ne_bytes()).into(),
                });
            groups.extend(group);
        } else {
            let name = words
                .next()
                .map(|name| name.trim_end_matches(':').to_owned());
            interface = first
                .parse()
                .ok()
                .zip(name)
                .map(|(index, name)| Interface { index, name });
        }
    }
    groups
}

/// Parses `/proc/net/igmp6`: index and name of the interface, then the group, in each line.
fn parse_igmp6(list: &str) -> Vec<Group> {
    let group = |line: &str| {
        let mut words = line.split_whitespace();
        let (index, name) = (words.next()?.parse().ok()?, words.next()?.to_owned());
        let address = u128::from_str_radix(words.next()?, 16).ok()?;
        Some(Group {
            interface: Interface { index, name },
            address: Ipv6Addr::from(address).into(),
        })
    };
    list.lines().filter_map(group).collect()
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn lists_of_the_kernel_are_parsed() {
        let igmp = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                    1\tlo        :     1      V3\n\t\t\t\t010000E0     1 0:00000000\t\t0\n\
                    2\teth0      :     2      V3\n\t\t\t\t030201EF     1 0:00000000\t\t0\n";
        let igmp6 = "2    eth0            ff0200000000000000000000000000fb     1 00000004 0\n";
        let mut groups = parse_igmp(igmp);
        groups.extend(parse_igmp6(igmp6));
        let text: Vec<String> = groups
            .iter()
            .map(|group| {
                format!(
                    "{} {} {}",
                    group.interface.index, group.interface.name, group.address
                )
            })
            .collect();
        assert_eq!(
            text,
            ["1 lo 224.0.0.1", "2 eth0 239.1.2.3", "2 eth0 ff02::fb"]
        );
    }

    #[test]
    fn a_group_is_found_and_joined_again() {
        let me = i32::try_from(std::process::id()).unwrap();
        let group = Ipv4Addr::new(239, 86, 7, 5);
        let [member, other] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        member
            .join_multicast_v4(&group, &Ipv4Addr::LOCALHOST)
            .unwrap();
        let [member, other] = [member, other].map(OwnedFd::from);
        let found = joined(&member, &list(me));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (&*found[0].interface, address_of(&found[0])),
            ("lo", Some(group.into()))
        );
        assert_eq!(joined(&other, &list(me)), []);
        join(&other, &found[0], me).unwrap();
        assert_eq!(joined(&other, &list(me)), found);
    }

    #[test]
    fn a_damaged_membership_is_refused() {
        let me = i32::try_from(std::process::id()).unwrap();
        let socket = OwnedFd::from(UdpSocket::bind("127.0.0.1:0").unwrap());
        let mut filter = vec![0; SOURCES_AT];
        put_address(
            &mut filter[GROUP_AT..REQUEST_BYTES],
            Ipv4Addr::new(239, 1, 1, 1).into(),
        );
        let refused = |interface: &str, filter: &[u8]| {
            let (interface, filter) = (interface.to_owned(), filter.to_vec());
            join(&socket, &Membership { interface, filter }, me).unwrap_err()
        };
        assert_eq!(refused("missing", &filter), Errno::ENODEV);
        assert_eq!(refused("lo", &filter[..SOURCES_AT - 1]), Errno::EINVAL);
        filter[REQUEST_BYTES + 4] = 1;
        assert_eq!(refused("lo", &filter), Errno::EINVAL, "no source follows");
        filter[REQUEST_BYTES + 4..].fill(0xff);
        assert_eq!(refused("lo", &filter), Errno::EINVAL);
        assert_eq!(refused("lo", &[]), Errno::EINVAL);
    }
}
