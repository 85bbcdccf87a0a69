//! Client of the kernel's socket diagnosis: lists and destroys TCP sockets over netlink (`sock_diag(7)`; destroying
//! since Linux 4.5, with `CONFIG_INET_DIAG_DESTROY`). This module does not depend on jobs.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv, send};

/// Netlink message type that destroys a socket (`linux/sock_diag.h`).
const SOCK_DESTROY: u16 = 21;
/// Netlink message type that lists sockets (`linux/sock_diag.h`).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Size of `struct nlmsghdr`.
pub(super) const HEADER_BYTES: usize = 16;
/// Size of `struct inet_diag_sockid`.
pub(super) const ID_BYTES: usize = 48;
/// Size of `struct inet_diag_msg`.
pub(super) const REPORT_BYTES: usize = 72;
/// Size of the receive buffer. The kernel sends at most 32 KiB per datagram of a dump.
const ANSWER_BYTES: usize = 64 << 10;
const TIME_WAIT: u8 = 6;
/// `IPPROTO_TCP`, as a byte of a request.
const TCP: u8 = 6;

/// The sockets to list.
#[derive(Clone, Copy, Debug)]
pub(super) enum Which {
    /// Sockets that a process has closed.
    Closed,
    /// Connected sockets.
    Connected,
}

impl Which {
    /// Returns a bit mask of the states in `tcp_states.h`.
    fn states(self) -> u32 {
        match self {
            // FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING
            Self::Closed => 1 << 4 | 1 << 5 | 1 << TIME_WAIT | 1 << 9 | 1 << 11,
            // ESTABLISHED, SYN_SENT, SYN_RECV, CLOSE_WAIT
            Self::Connected => 1 << 1 | 1 << 2 | 1 << 3 | 1 << 8,
        }
    }
}

/// A socket that the kernel lists.
pub(in crate::job) struct Found {
    pub(super) family: u8,
    /// The kernel's `inet_diag_sockid`. Its cookie distinguishes this socket from later ones.
    pub(super) id: [u8; ID_BYTES],
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// True in state `TIME_WAIT`.
    pub(super) waits: bool,
    /// True if a process has it open.
    pub(super) owned: bool,
}

/// A netlink socket to the kernel's socket diagnosis.
pub(super) struct Diagnosis(OwnedFd);

impl Diagnosis {
    /// Uses a [`NetworkSocket::Diagnosis`](crate::network_socket::NetworkSocket).
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Returns all sockets of that kind, IPv4 and IPv6.
    pub(super) fn list(&self, which: Which) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            self.list_family(family, which, &mut found)?;
        }
        Ok(found)
    }

    fn list_family(&self, family: i32, which: Which, found: &mut Vec<Found>) -> io::Result<()> {
        self.ask(
            SOCK_DIAG_BY_FAMILY,
            libc::NLM_F_DUMP,
            u8::try_from(family).map_err(io::Error::other)?,
            which.states(),
            &[0; ID_BYTES],
        )?;
        let mut buffer = vec![0; ANSWER_BYTES];
        loop {
            let got = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = &buffer[..got];
            while let Some((kind, body)) = next_message(&mut rest) {
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(()),
                    libc::NLMSG_ERROR => refused(body)?,
                    _ => found.extend(Found::parse(body)),
                }
            }
        }
    }

    /// Destroys a socket. An owner receives an error for an aborted connection. A missing socket is not an error.
    pub(super) fn destroy(&self, found: &Found) -> io::Result<()> {
        self.ask(SOCK_DESTROY, libc::NLM_F_ACK, found.family, 0, &found.id)?;
        let mut buffer = vec![0; ANSWER_BYTES];
        let got = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        match next_message(&mut &buffer[..got]) {
            Some((_, body)) => match refused(body) {
                // The socket has disappeared meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            },
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends an `inet_diag_req_v2` for TCP.
    fn ask(
        &self,
        kind: u16,
        flags: i32,
        family: u8,
        states: u32,
        id: &[u8; ID_BYTES],
    ) -> io::Result<()> {
        let flags = u16::try_from(libc::NLM_F_REQUEST | flags).map_err(io::Error::other)?;
        let mut message = Vec::with_capacity(HEADER_BYTES + 8 + ID_BYTES);
        message.extend([0; 4]);
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend([0; 8]);
        message.extend([family, TCP, 0, 0]);
        message.extend(states.to_ne_bytes());
        message.extend(id);
        let length = u32::try_from(message.len()).map_err(io::Error::other)?;
        message[..4].copy_from_slice(&length.to_ne_bytes());
        send(self.0.as_raw_fd(), &message, MsgFlags::empty())?;
        Ok(())
    }
}

/// Returns the type and body of the next netlink message; `None` at the end.
pub(in crate::job) fn next_message<'a>(rest: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let length = u32::from_ne_bytes(rest.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(rest.get(4..6)?.try_into().ok()?);
    let body = rest.get(HEADER_BYTES..length)?;
    *rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, body))
}

/// Reads the error number of an `NLMSG_ERROR`; 0 is an acknowledgement.
pub(in crate::job) fn refused(body: &[u8]) -> io::Result<()> {
    let number = body.get(..4).and_then(|bytes| bytes.try_into().ok());
    match number.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(negative) => Err(Errno::from_raw(negative.wrapping_neg()).into()),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

impl Found {
    /// Parses an `inet_diag_msg`; returns `None` for other data.
    pub(in crate::job) fn parse(body: &[u8]) -> Option<Self> {
        let report: &[u8; REPORT_BYTES] = body.get(..REPORT_BYTES)?.try_into().ok()?;
        let (family, state) = (report[0], report[1]);
        let id: [u8; ID_BYTES] = report[4..4 + ID_BYTES].try_into().ok()?;
        let inode = u32::from_ne_bytes(report[68..72].try_into().ok()?);
        let local = address(family, &id[4..20], &id[0..2])?;
        let remote = address(family, &id[20..36], &id[2..4])?;
        Some(Self {
            family,
            id,
            local,
            remote,
            waits: state == TIME_WAIT,
            owned: inode != 0,
        })
    }
}

fn address(family: u8, ip: &[u8], port: &[u8]) -> Option<SocketAddr> {
    let ip = if i32::from(family) == libc::AF_INET {
        IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(ip.get(..4)?).ok()?))
    } else {
        IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(ip).ok()?)).to_canonical()
    };
    Some(SocketAddr::new(
        ip,
        u16::from_be_bytes(port.try_into().ok()?),
    ))
}
