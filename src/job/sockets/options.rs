#![allow(
    unsafe_code,
    reason = "options of sockets by number, for which there are no safe wrappers"
)]
//! Options of sockets that CRIU (4.2) neither restores nor reports. Some change what a program receives: without
//! `IP_PKTINFO` a server does not learn to which of its addresses a datagram was sent, and without `SO_ZEROCOPY` a program
//! waits forever for the report that its data were sent.
//!
//! The values that differ from those of a new socket are recorded while the tasks are frozen, and given back before the
//! restored tasks run, both through duplicates of the sockets.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc::{self, socklen_t};
use serde::{Deserialize, Serialize};

use super::interfaces::{Interface, interface_in, interfaces_of, value_here};
use super::multicast::{Membership, address_of, join, joined, list};
use crate::job::descriptors::Descriptors;
use crate::job::nodes::Borrower;
use crate::job::tree::Process;

/// Longest value: the name of an algorithm of congestion control.
const VALUE_BYTES_MAX: usize = 16;

/// The C library's names, and those of `linux/socket.h`, `in.h`, `in6.h` and `tcp.h` that it lacks.
mod names {
    pub(super) use nix::libc::*;

    pub(super) const SO_WIFI_STATUS: c_int = 41;
    pub(super) const SO_NOFCS: c_int = 43;
    pub(super) const SO_LOCK_FILTER: c_int = 44;
    pub(super) const SO_SELECT_ERR_QUEUE: c_int = 45;
    pub(super) const SO_MAX_PACING_RATE: c_int = 47;
    pub(super) const SO_ZEROCOPY: c_int = 60;
    pub(super) const SO_TXTIME: c_int = 61;
    pub(super) const SO_PREFER_BUSY_POLL: c_int = 69;
    pub(super) const SO_BUSY_POLL_BUDGET: c_int = 70;
    pub(super) const SO_TXREHASH: c_int = 74;
    pub(super) const SO_RCVMARK: c_int = 75;
    pub(super) const SO_PASSPIDFD: c_int = 76;
    pub(super) const SO_RCVPRIORITY: c_int = 82;
    pub(super) const SO_PASSRIGHTS: c_int = 83;
    pub(super) const IP_RECVERR_RFC4884: c_int = 26;
    pub(super) const IP_LOCAL_PORT_RANGE: c_int = 51;
    pub(super) const IPV6_RECVERR_RFC4884: c_int = 31;
    pub(super) const TCP_RTO_MAX_MS: c_int = 44;
    pub(super) const TCP_RTO_MIN_US: c_int = 45;
}

/// An option: level, number and name.
type Known = (c_int, c_int, &'static str);

macro_rules! known {
    ($($level:ident: $($name:ident)*;)*) => {
        &[$($((names::$level, names::$name, stringify!($name)),)*)*]
    };
}

/// Options whose value can be set to what was read. Those that CRIU restores are not among them, nor those whose value the
/// kernel changes by itself.
const KNOWN: &[Known] = known! {
    SOL_SOCKET: SO_TIMESTAMP SO_TIMESTAMPNS SO_TIMESTAMPING SO_TIMESTAMP_NEW SO_TIMESTAMPNS_NEW SO_TIMESTAMPING_NEW
        SO_RXQ_OVFL SO_WIFI_STATUS SO_PEEK_OFF SO_NOFCS SO_LOCK_FILTER SO_SELECT_ERR_QUEUE SO_BUSY_POLL
        SO_MAX_PACING_RATE SO_ZEROCOPY SO_TXTIME SO_PREFER_BUSY_POLL SO_BUSY_POLL_BUDGET SO_TXREHASH SO_RCVMARK
        SO_PASSPIDFD SO_RCVPRIORITY SO_PASSRIGHTS;
    SOL_IP: IP_TOS IP_TTL IP_RECVOPTS IP_RETOPTS IP_PKTINFO IP_MTU_DISCOVER IP_RECVERR IP_RECVTTL IP_RECVTOS IP_FREEBIND
        IP_PASSSEC IP_TRANSPARENT IP_RECVORIGDSTADDR IP_MINTTL IP_NODEFRAG IP_CHECKSUM IP_BIND_ADDRESS_NO_PORT
        IP_RECVFRAGSIZE IP_RECVERR_RFC4884 IP_MULTICAST_IF IP_MULTICAST_TTL IP_MULTICAST_LOOP IP_MULTICAST_ALL
        IP_UNICAST_IF IP_LOCAL_PORT_RANGE;
    SOL_IPV6: IPV6_2292PKTINFO IPV6_2292HOPOPTS IPV6_2292DSTOPTS IPV6_2292RTHDR IPV6_2292HOPLIMIT IPV6_FLOWINFO
        IPV6_UNICAST_HOPS IPV6_MULTICAST_IF IPV6_MULTICAST_HOPS IPV6_MULTICAST_LOOP IPV6_MTU_DISCOVER IPV6_RECVERR
        IPV6_MULTICAST_ALL IPV6_ROUTER_ALERT_ISOLATE IPV6_RECVERR_RFC4884 IPV6_FLOWINFO_SEND IPV6_RECVPKTINFO
        IPV6_RECVHOPLIMIT IPV6_RECVHOPOPTS IPV6_RECVRTHDR IPV6_RECVDSTOPTS IPV6_RECVPATHMTU IPV6_DONTFRAG
        IPV6_RECVTCLASS IPV6_TCLASS IPV6_AUTOFLOWLABEL IPV6_MINHOPCOUNT IPV6_RECVORIGDSTADDR IPV6_TRANSPARENT
        IPV6_UNICAST_IF IPV6_RECVFRAGSIZE IPV6_FREEBIND;
    SOL_TCP: TCP_SYNCNT TCP_LINGER2 TCP_DEFER_ACCEPT TCP_CONGESTION TCP_THIN_LINEAR_TIMEOUTS TCP_THIN_DUPACK
        TCP_USER_TIMEOUT TCP_FASTOPEN TCP_NOTSENT_LOWAT TCP_FASTOPEN_NO_COOKIE TCP_INQ TCP_RTO_MAX_MS TCP_RTO_MIN_US;
    SOL_UDP: UDP_NO_CHECK6_TX UDP_NO_CHECK6_RX UDP_SEGMENT UDP_GRO;
    SOL_NETLINK: NETLINK_PKTINFO NETLINK_BROADCAST_ERROR NETLINK_NO_ENOBUFS NETLINK_CAP_ACK NETLINK_EXT_ACK
        NETLINK_GET_STRICT_CHK;
};

/// Options that the kernel sets in the sockets of accepted connections, and that cannot be set in these.
const NOT_OF_STREAMS: [(c_int, c_int); 6] = [
    (libc::SOL_IP, libc::IP_MULTICAST_IF),
    (libc::SOL_IP, libc::IP_MULTICAST_TTL),
    (libc::SOL_IP, libc::IP_MULTICAST_LOOP),
    (libc::SOL_IPV6, libc::IPV6_MULTICAST_IF),
    (libc::SOL_IPV6, libc::IPV6_MULTICAST_HOPS),
    (libc::SOL_IPV6, libc::IPV6_MULTICAST_LOOP),
];

/// The options of a socket that differ from those of a new one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOptions {
    /// A process that has the socket, as the job sees it.
    pub pid: i32,
    /// Its descriptor.
    pub descriptor: i32,
    /// Level, number and value of each option.
    pub options: Vec<(i32, i32, Vec<u8>)>,
    /// The multicast groups that the socket has joined.
    #[serde(default)]
    pub groups: Vec<Membership>,
    /// The interfaces that options name.
    #[serde(default)]
    pub interfaces: Vec<Interface>,
}

/// Options of the class of traffic. Their last two bits are about congestion: the kernel changes those of a stream itself.
const CLASSES: [(c_int, c_int); 2] = [
    (libc::SOL_IP, libc::IP_TOS),
    (libc::SOL_IPV6, libc::IPV6_TCLASS),
];
const CONGESTION_BITS: u8 = 0b11;

/// Family, type and protocol of a socket.
type Kind = [c_int; 3];

/// The options of a kind of sockets, and their values in a new socket, if one can be created.
type Defaults = HashMap<Kind, Vec<(c_int, c_int, Option<Value>)>>;

/// Value of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    /// The bytes after the value are zero.
    room: [u8; VALUE_BYTES_MAX],
    length: usize,
}

impl Value {
    fn bytes(&self) -> &[u8] {
        &self.room[..self.length]
    }
}

/// Records the options of the sockets among `open`. A socket that cannot be duplicated is left out.
#[must_use]
pub fn record_socket_options(open: &[Descriptors]) -> Vec<SocketOptions> {
    let (mut seen, mut defaults) = (HashSet::new(), HashMap::new());
    // They share a network namespace.
    let first = open.first().map(|one| one.process.host_pid);
    let listed = first.map_or_else(Vec::new, list);
    let mut recorded = Vec::new();
    for one in open {
        let sockets = one
            .all
            .iter()
            .filter(|it| it.socket().is_some_and(|inode| seen.insert(inode)));
        let mut sockets = sockets.peekable();
        if sockets.peek().is_none() {
            continue;
        }
        let Some(borrower) = Borrower::new(one.process.host_pid) else {
            continue;
        };
        for descriptor in sockets {
            let Some(socket) = borrower.borrow(descriptor.number) else {
                continue;
            };
            let Some(kind) = kind_of(&socket) else {
                continue;
            };
            let options = unusual(&socket, kind, &mut defaults);
            let groups = if receives_from_groups(kind) {
                joined(&socket, &listed)
            } else {
                Vec::new()
            };
            if !options.is_empty() || !groups.is_empty() {
                let named = options.iter().filter_map(interface_in);
                let listed = |index| listed.iter().find(|one| one.interface.index == index);
                let interfaces = named.filter_map(|index| Some(listed(index)?.interface.clone()));
                recorded.push(SocketOptions {
                    pid: one.process.pid,
                    descriptor: descriptor.number,
                    interfaces: interfaces.collect(),
                    options,
                    groups,
                });
            }
        }
    }
    recorded
}

/// Gives restored tasks, which do not run yet, the recorded options. Returns what could not be restored, each option once.
#[must_use]
pub fn give_back_socket_options(recorded: &[SocketOptions], processes: &[Process]) -> Vec<String> {
    let mut lost: BTreeMap<String, Vec<&SocketOptions>> = BTreeMap::new();
    for one in recorded {
        let same = processes.iter().find(|process| process.pid == one.pid);
        let given = same.and_then(|process| one.give_to(process.host_pid));
        for what in given.unwrap_or_else(|| vec!["the options".to_owned()]) {
            lost.entry(what).or_default().push(one);
        }
    }
    let message = |(what, of): (String, Vec<&SocketOptions>)| {
        let (first, others) = of.split_first()?;
        let more = match others.len() {
            0 => String::new(),
            count => format!(", and of {count} more sockets"),
        };
        let SocketOptions {
            descriptor, pid, ..
        } = first;
        Some(format!(
            "cannot restore {what} of socket {descriptor} of process {pid}{more}"
        ))
    };
    lost.into_iter().filter_map(message).collect()
}

impl SocketOptions {
    /// Gives the options to the socket of a process (a host pid). Returns what could not be restored; `None` if there is no
    /// such socket.
    fn give_to(&self, pid: i32) -> Option<Vec<String>> {
        let socket = Borrower::new(pid)?.borrow(self.descriptor)?;
        let options = self.options.iter().filter_map(|option| {
            let (level, number, _) = option;
            // Nothing else is set for an image.
            let mut known = KNOWN.iter().filter(|it| (it.0, it.1) == (*level, *number));
            let (.., name) = known.next()?;
            let value = value_here(option, &self.interfaces, || interfaces_of(pid));
            let given = value.and_then(|value| give_back(&socket, (*level, *number), &value));
            let error = given.err()?;
            Some(format!("{name} ({error})"))
        });
        let groups = self.groups.iter().filter_map(|membership| {
            let error = join(&socket, membership, pid).err()?;
            let group = address_of(membership).map_or_else(String::new, |it| it.to_string());
            Some(format!("the multicast group {group} ({error})"))
        });
        Some(options.chain(groups).collect())
    }
}

fn give_back(socket: &OwnedFd, option: (c_int, c_int), value: &[u8]) -> Result<(), Errno> {
    let is_set = || read(socket, option).is_some_and(|present| present.bytes() == value);
    if is_set() {
        return Ok(());
    }
    let priority = (libc::SOL_SOCKET, libc::SO_PRIORITY);
    let before = read(socket, priority);
    write(socket, option, value)?;
    // The kernel derives a new priority from a new class of traffic.
    if let Some(before) = before.filter(|before| read(socket, priority).as_ref() != Some(before)) {
        write(socket, priority, before.bytes())?;
    }
    // It keeps the congestion bits of a class.
    if is_set() || CLASSES.contains(&option) {
        return Ok(());
    }
    Err(Errno::EINVAL)
}

/// Reads an option of a socket of this type, without what the kernel changes itself.
fn read_own(socket: &OwnedFd, option: (c_int, c_int), style: c_int) -> Option<Value> {
    let mut value = read(socket, option)?;
    if style == libc::SOCK_STREAM && CLASSES.contains(&option) {
        value.room[0] &= !CONGESTION_BITS;
    }
    Some(value)
}

fn kind_of(socket: &OwnedFd) -> Option<Kind> {
    let number = |name| {
        let value = read(socket, (libc::SOL_SOCKET, name))?;
        Some(c_int::from_ne_bytes(value.bytes().try_into().ok()?))
    };
    Some([
        number(libc::SO_DOMAIN)?,
        number(libc::SO_TYPE)?,
        number(libc::SO_PROTOCOL)?,
    ])
}

fn receives_from_groups([domain, style, _]: Kind) -> bool {
    matches!(domain, libc::AF_INET | libc::AF_INET6) && style != libc::SOCK_STREAM
}

/// Returns the options whose values differ from those of a new socket of this kind.
fn unusual(
    socket: &OwnedFd,
    kind @ [_, style, _]: Kind,
    defaults: &mut Defaults,
) -> Vec<(i32, i32, Vec<u8>)> {
    let defaults = defaults.entry(kind).or_insert_with(|| {
        let new = new_socket(kind);
        let default = |(level, number, _): &Known| {
            let value = match &new {
                // Most options are those of other kinds.
                Some(new) => Some(read_own(new, (*level, *number), style)?),
                None => None,
            };
            Some((*level, *number, value))
        };
        let is_of_it = |(level, number, _): &&Known| {
            style != libc::SOCK_STREAM || !NOT_OF_STREAMS.contains(&(*level, *number))
        };
        KNOWN.iter().filter(is_of_it).filter_map(default).collect()
    });
    let unusual = defaults.iter().filter_map(|(level, number, default)| {
        let value = read_own(socket, (*level, *number), style)?;
        (*default != Some(value)).then(|| (*level, *number, value.bytes().to_vec()))
    });
    unusual.collect()
}

fn new_socket([domain, style, protocol]: Kind) -> Option<OwnedFd> {
    // SAFETY: takes numbers only.
    let socket = unsafe { libc::socket(domain, style | libc::SOCK_CLOEXEC, protocol) };
    let socket = Errno::result(socket).ok()?;
    // SAFETY: the kernel has opened this descriptor for this process alone.
    Some(unsafe { OwnedFd::from_raw_fd(socket) })
}

/// Reads an option of at most [`VALUE_BYTES_MAX`]; `None` if a socket of this kind does not have it.
fn read(socket: &OwnedFd, option: (c_int, c_int)) -> Option<Value> {
    let mut room = [0_u8; VALUE_BYTES_MAX];
    let length = read_into(socket, option, &mut room)?;
    (length <= VALUE_BYTES_MAX).then_some(Value { room, length })
}

/// Reads an option that may depend on what `value` contains; returns its length.
pub(super) fn read_into(
    socket: &OwnedFd,
    (level, number): (c_int, c_int),
    value: &mut [u8],
) -> Option<usize> {
    let mut length = socklen_t::try_from(value.len()).ok()?;
    let room = value.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most as many bytes as there is room for.
    let read =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, number, room, &raw mut length) };
    Errno::result(read).ok()?;
    usize::try_from(length).ok()
}

pub(super) fn write(
    socket: &OwnedFd,
    (level, number): (c_int, c_int),
    value: &[u8],
) -> Result<(), Errno> {
    let length = socklen_t::try_from(value.len()).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the kernel reads as many bytes as there are.
    let written = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            number,
            value.as_ptr().cast(),
            length,
        )
    };
    Errno::result(written).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(value: c_int) -> Vec<u8> {
        value.to_ne_bytes().to_vec()
    }

    /// Sockets of a server and a client, with a few options that differ.
    fn scene() -> Vec<OwnedFd> {
        let kinds = [
            [libc::AF_INET, libc::SOCK_STREAM, 0],
            [libc::AF_INET6, libc::SOCK_DGRAM, 0],
            [libc::AF_UNIX, libc::SOCK_DGRAM, 0],
        ];
        kinds
            .into_iter()
            .map(|kind| new_socket(kind).unwrap())
            .collect()
    }

    #[test]
    fn unusual_options_are_recorded_and_given_back() {
        let options = [
            (libc::SOL_TCP, libc::TCP_USER_TIMEOUT, number(7000)),
            (libc::SOL_IPV6, libc::IPV6_RECVPKTINFO, number(1)),
            (libc::SOL_SOCKET, libc::SO_PEEK_OFF, number(3)),
        ];
        let mut defaults = HashMap::new();
        for ((socket, other), option) in scene().iter().zip(&scene()).zip(options) {
            let kind = kind_of(socket).unwrap();
            let recorded = unusual(socket, kind, &mut defaults);
            assert_eq!(recorded, [], "a new socket");
            write(socket, (option.0, option.1), &option.2).unwrap();
            assert_eq!(
                unusual(socket, kind, &mut defaults),
                std::slice::from_ref(&option)
            );
            give_back(other, (option.0, option.1), &option.2).unwrap();
            assert_eq!(unusual(other, kind, &mut defaults), [option]);
        }
    }

    #[test]
    fn a_class_of_traffic_leaves_the_priority() {
        let priority = (libc::SOL_SOCKET, libc::SO_PRIORITY);
        let class = (libc::SOL_IP, libc::IP_TOS);
        let socket = &scene()[1];
        write(socket, priority, &number(3)).unwrap();
        give_back(socket, class, &number(0x10)).unwrap();
        assert_eq!(read(socket, class).unwrap().bytes()[0], 0x10);
        assert_eq!(read(socket, priority).unwrap().bytes(), number(3));
    }

    #[test]
    fn refused_values_are_lost_and_unknown_options_are_not_set() {
        let me = i32::try_from(std::process::id()).unwrap();
        let process = crate::job::tree::describe(me).unwrap();
        let socket = &scene()[0];
        let recorded = |options| SocketOptions {
            pid: process.pid,
            descriptor: socket.as_raw_fd(),
            options,
            groups: Vec::new(),
            interfaces: Vec::new(),
        };
        let of = |option, value| vec![(libc::SOL_SOCKET, option, value)];
        let unknown = recorded(of(libc::SO_REUSEADDR, number(1)));
        assert_eq!(give_back_socket_options(&[unknown], &[process]), [""; 0]);
        assert_eq!(
            read(socket, (libc::SOL_SOCKET, libc::SO_REUSEADDR))
                .unwrap()
                .bytes(),
            number(0)
        );
        let refused = recorded(of(names::SO_ZEROCOPY, number(77)));
        let lost = give_back_socket_options(&[refused.clone(), refused], &[process]);
        assert!(
            lost.len() == 1 && lost[0].contains("SO_ZEROCOPY") && lost[0].contains("1 more"),
            "{lost:?}"
        );
        let mut gone = recorded(Vec::new());
        gone.descriptor = i32::MAX;
        assert_eq!(give_back_socket_options(&[gone], &[process]).len(), 1);
    }
}
