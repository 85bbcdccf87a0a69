//! Rules of nftables that drop packets of given TCP connections, set over netlink (`linux/netfilter/nf_tables.h`). This
//! module does not depend on jobs.
//!
//! Only incoming packets are dropped. A sending socket treats a dropped packet as lost in the network and retransmits
//! it. The kernel removes the rules when their netlink socket is closed (`NFT_TABLE_F_OWNER`, Linux 5.12), at the
//! latest when this process exits.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::libc;
use nix::sys::socket::{MsgFlags, recv, send};

use super::diagnosis::{HEADER_BYTES, next_message, refused};

/// Mark of packets that CRIU sends (`SOCCR_MARK`), such as those that close a half-restored connection.
const CRIU_MARK: u32 = 0xC114;
/// Limit on the connections in one message, because an attribute has at most 64 KiB.
const CONNECTIONS_MAX: usize = 1000;
/// Size of the receive buffer. An error message quotes the refused message, which is smaller. Acknowledgements quote
/// only its header, so `NETLINK_CAP_ACK` is not needed.
const ANSWER_BYTES: usize = 256 << 10;

/// Subsystem of nftables in netlink message types, and its message types.
const NFTABLES: u16 = 10;
const NEW_TABLE: u16 = NFTABLES << 8;
const NEW_CHAIN: u16 = NFTABLES << 8 | 3;
const NEW_RULE: u16 = NFTABLES << 8 | 6;
const NEW_SET: u16 = NFTABLES << 8 | 9;
const NEW_ELEMENTS: u16 = NFTABLES << 8 | 0xC;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// `NFPROTO_INET`: IPv4 and IPv6.
const FAMILY: u8 = 1;
/// `NFT_TABLE_F_OWNER`.
const OWNED: u32 = 2;
/// `NF_INET_LOCAL_IN`: packets for this machine.
const ARRIVING: u32 = 1;
/// First register of four bytes (`NFT_REG32_00`).
const REGISTER: u32 = 8;
const CHAIN: &str = "arriving";

/// IP version: name of its set, `NFPROTO_…`, offsets of both addresses in the packet, and address size.
struct Version {
    set: &'static str,
    protocol: u8,
    offsets: [u32; 2],
    size: u32,
}

const VERSIONS: [Version; 2] = [
    Version {
        set: "ipv4",
        protocol: 2,
        offsets: [12, 16],
        size: 4,
    },
    Version {
        set: "ipv6",
        protocol: 10,
        offsets: [8, 24],
        size: 16,
    },
];

impl Version {
    fn is_of(&self, address: &SocketAddr) -> bool {
        address.is_ipv4() == (self.size == 4)
    }
}

/// Active rules. They are removed when the value is dropped.
#[derive(Debug)]
pub(crate) struct PacketLock {
    _netlink: OwnedFd,
}

impl PacketLock {
    /// Drops incoming packets between these addresses, in both directions, in the network namespace of `netlink`, a
    /// [`NetworkSocket::Netfilter`](crate::network_socket::NetworkSocket).
    ///
    /// # Errors
    /// The kernel refuses, because `CAP_NET_ADMIN` or nftables is missing. No packets are dropped then.
    pub fn set(netlink: OwnedFd, connections: &[(SocketAddr, SocketAddr)]) -> io::Result<Self> {
        let table = table_name();
        let both: BTreeSet<_> = connections
            .iter()
            .flat_map(|&(local, remote)| [(local, remote), (remote, local)])
            .collect();
        transact(&netlink, &tables(&table))?;
        for version in &VERSIONS {
            let keys: Vec<_> = both
                .iter()
                .filter(|(from, _)| version.is_of(from))
                .collect();
            for keys in keys.chunks(CONNECTIONS_MAX) {
                transact(&netlink, &[elements(&table, version, keys)])?;
            }
        }
        // All rules become active at once.
        transact(&netlink, &rules(&table))?;
        Ok(Self { _netlink: netlink })
    }
}

/// Returns a unique table name, which users see in `nft list ruleset`.
fn table_name() -> String {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    format!("ckpt-run-{}-{serial}", std::process::id())
}

/// Type and attributes of a message.
type Message = (u16, Vec<u8>);

fn tables(table: &str) -> Vec<Message> {
    let mut messages = vec![(NEW_TABLE, [text(1, table), number(2, OWNED)].concat())];
    for (id, version) in (1..).zip(&VERSIONS) {
        // Only users' tools need the type of the keys.
        let set = [
            text(1, table),
            text(2, version.set),
            number(4, 0),
            number(5, 2 * (version.size + 4)),
            number(10, id),
        ];
        messages.push((NEW_SET, set.concat()));
    }
    messages
}

fn elements(table: &str, version: &Version, keys: &[&(SocketAddr, SocketAddr)]) -> Message {
    let element = |(from, to): &&(SocketAddr, SocketAddr)| {
        let value = [end(from), end(to)].concat();
        attribute(1, &attribute(1, &attribute(1, &value)))
    };
    let list: Vec<u8> = keys.iter().flat_map(element).collect();
    let body = [text(1, table), text(2, version.set), attribute(3, &list)];
    (NEW_ELEMENTS, body.concat())
}

/// Returns an end of a connection in the layout of the registers.
fn end(address: &SocketAddr) -> Vec<u8> {
    let mut bytes = match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    bytes.extend(address.port().to_be_bytes());
    bytes.extend([0; 2]);
    bytes
}

fn rules(table: &str) -> Vec<Message> {
    let hook = [number(1, ARRIVING), number(2, 0)].concat();
    let chain = [
        text(1, table),
        text(3, CHAIN),
        attribute(4, &hook),
        text(7, "filter"),
    ];
    let mut messages = vec![(NEW_CHAIN, chain.concat())];
    for version in &VERSIONS {
        let rule = [
            text(1, table),
            text(2, CHAIN),
            attribute(4, &expressions(version)),
        ];
        messages.push((NEW_RULE, rule.concat()));
    }
    messages
}

/// Returns the expressions of a rule: TCP of this version, not from CRIU, with addresses in the set → drop.
fn expressions(version: &Version) -> Vec<u8> {
    let port_of_remote = REGISTER + version.size / 4;
    let local = port_of_remote + 1;
    let port_of_local = local + version.size / 4;
    let tcp = [u8::try_from(libc::IPPROTO_TCP).unwrap_or_default()];
    let verdict = attribute(2, &number(1, 0));
    [
        // NFT_META_NFPROTO, NFT_META_L4PROTO, NFT_META_MARK
        meta(15),
        compare(0, &[version.protocol]),
        meta(16),
        compare(0, &tcp),
        meta(3),
        compare(1, &CRIU_MARK.to_ne_bytes()),
        // Network header, transport header.
        payload(REGISTER, 1, version.offsets[0], version.size),
        payload(port_of_remote, 2, 0, 2),
        payload(local, 1, version.offsets[1], version.size),
        payload(port_of_local, 2, 2, 2),
        expression("lookup", &[text(1, version.set), number(2, REGISTER)]),
        // NFT_REG_VERDICT, NF_DROP
        expression("immediate", &[number(1, 0), attribute(2, &verdict)]),
    ]
    .concat()
}

fn meta(key: u32) -> Vec<u8> {
    expression("meta", &[number(1, REGISTER), number(2, key)])
}

/// Compares the register: `operation` 0 continues if it is equal, 1 if it is not.
fn compare(operation: u32, value: &[u8]) -> Vec<u8> {
    let value = attribute(3, &attribute(1, value));
    expression("cmp", &[number(1, REGISTER), number(2, operation), value])
}

fn payload(register: u32, base: u32, offset: u32, size: u32) -> Vec<u8> {
    let numbers = [register, base, offset, size];
    let attributes: Vec<_> = (1..)
        .zip(numbers)
        .map(|(kind, value)| number(kind, value))
        .collect();
    expression("payload", &attributes)
}

fn expression(name: &str, attributes: &[Vec<u8>]) -> Vec<u8> {
    attribute(
        1,
        &[text(1, name), attribute(2, &attributes.concat())].concat(),
    )
}

fn text(kind: u16, value: &str) -> Vec<u8> {
    attribute(kind, &[value.as_bytes(), &[0]].concat())
}

fn number(kind: u16, value: u32) -> Vec<u8> {
    attribute(kind, &value.to_be_bytes())
}

/// Returns a netlink attribute. Its content must be below 64 KiB (see [`CONNECTIONS_MAX`]).
fn attribute(kind: u16, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + content.len()).unwrap_or(u16::MAX);
    let mut bytes = [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), content].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Sends messages as one transaction, and waits for the kernel's answer.
fn transact(netlink: &OwnedFd, messages: &[Message]) -> io::Result<()> {
    let request = libc::NLM_F_REQUEST;
    let change = request | libc::NLM_F_CREATE | libc::NLM_F_ACK;
    let mut batch = framed(BATCH_BEGIN, request, (0, NFTABLES), &[])?;
    for (kind, attributes) in messages {
        batch.extend(framed(*kind, change, (FAMILY, 0), attributes)?);
    }
    batch.extend(framed(BATCH_END, request, (0, NFTABLES), &[])?);
    send(netlink.as_raw_fd(), &batch, MsgFlags::empty())?;
    let mut answered = 0;
    let mut buffer = vec![0; ANSWER_BYTES];
    while answered < messages.len() {
        let got = recv(netlink.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let mut rest = &buffer[..got];
        while let Some((_, body)) = next_message(&mut rest) {
            refused(body)?;
            answered += 1;
        }
    }
    Ok(())
}

/// Returns a message with its `nlmsghdr` and `nfgenmsg`.
fn framed(
    kind: u16,
    flags: i32,
    (family, resource): (u8, u16),
    attributes: &[u8],
) -> io::Result<Vec<u8>> {
    let length = u32::try_from(HEADER_BYTES + 4 + attributes.len()).map_err(io::Error::other)?;
    let flags = u16::try_from(flags).map_err(io::Error::other)?;
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([family, 0]);
    message.extend(resource.to_be_bytes());
    message.extend(attributes);
    Ok(message)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;
    use crate::network_socket::NetworkSocket;

    /// Returns both ends of a connection, and its addresses.
    fn connected(address: &str) -> (TcpStream, TcpStream, (SocketAddr, SocketAddr)) {
        let listener = TcpListener::bind(address).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        (client, server, ends)
    }

    #[test]
    fn only_packets_of_the_given_connections_are_held_back() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: nftables needs root");
            return;
        }
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (mut held, mut held_end, ends) = connected(address);
            let (mut free, mut free_end, _) = connected(address);
            let lock = PacketLock::set(NetworkSocket::Netfilter.open().unwrap(), &[ends]).unwrap();
            held.write_all(b"client").unwrap();
            held_end.write_all(b"server").unwrap();
            let mut word = [0; 6];
            free.write_all(b"passes").unwrap();
            free_end.read_exact(&mut word).unwrap();
            free_end.write_all(b"passes").unwrap();
            free.read_exact(&mut word).unwrap();
            for reader in [&mut held, &mut held_end] {
                reader.set_nonblocking(true).unwrap();
                let nothing = reader.read(&mut word).unwrap_err();
                assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
                reader.set_nonblocking(false).unwrap();
            }
            drop(lock);
            // The kernel retransmits the data.
            for reader in [&mut held, &mut held_end] {
                reader
                    .set_read_timeout(Some(Duration::from_secs(30)))
                    .unwrap();
                reader.read_exact(&mut word).unwrap();
            }
            assert_eq!(&word, b"client");
        }
    }

    #[test]
    fn many_connections_can_be_held_back_at_once() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: nftables needs root");
            return;
        }
        let at = |port| SocketAddr::from(([192, 0, 2, 1], port));
        let connections: Vec<_> = (1..=10_000).map(|port| (at(port), at(1))).collect();
        PacketLock::set(NetworkSocket::Netfilter.open().unwrap(), &connections).unwrap();
    }
}
