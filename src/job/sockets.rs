//! TCP connections inside the job: which there are at a snapshot, and what is
//! left of them when a restore needs their addresses again.
//!
//! A killed job leaves sockets in `TIME_WAIT` for a minute. Nobody owns them, but
//! their addresses cannot be bound, so they are destroyed before a restore by
//! the kernel's socket diagnosis (`SOCK_DESTROY`, Linux 4.5, `CONFIG_INET_DIAG_DESTROY`).

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};
use procfs::ProcError;
use procfs::net::{TcpNetEntry, TcpState};
use procfs::process::{FDTarget, Process as ProcessEntry};
use serde::{Deserialize, Serialize};

/// Netlink message type that destroys a socket (`linux/sock_diag.h`).
const SOCK_DESTROY: u16 = 21;
/// Netlink message type that asks for sockets (`linux/sock_diag.h`).
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;
/// `struct inet_diag_sockid`.
const ID_BYTES: usize = 48;
/// `struct inet_diag_msg`.
const REPORT_BYTES: usize = 72;
/// The kernel fills at most 32 KiB a datagram of a dump.
const ANSWER_BYTES: usize = 64 << 10;
/// States of a socket that its owner has closed (bits of `tcp_states.h`): `FIN_WAIT1`, `FIN_WAIT2`, `TIME_WAIT`, `LAST_ACK`, `CLOSING`.
const CLOSED_STATES: u32 = 1 << 4 | 1 << 5 | 1 << TIME_WAIT | 1 << 9 | 1 << 11;
const TIME_WAIT: u8 = 6;
/// `IPPROTO_TCP`, as a byte of a request.
const TCP: u8 = 6;

/// The TCP sockets of a job at a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sockets {
    /// Where it listened.
    pub listening: Vec<SocketAddr>,
    /// Connections of the job with itself, as each of both ends sees them: local, remote.
    pub connections: Vec<(SocketAddr, SocketAddr)>,
}

/// Why the job's sockets could not be recorded or what is left of them not removed.
#[derive(Debug, thiserror::Error)]
pub enum SocketsError {
    /// `/proc` of a process could not be read.
    #[error("cannot list the sockets of process {pid}")]
    Process {
        /// Pid as the host sees it.
        pid: i32,
        /// The reason.
        #[source]
        source: ProcError,
    },
    /// The kernel does not tell.
    #[error("cannot ask the kernel for TCP sockets")]
    Ask(#[source] io::Error),
    /// The kernel does not let us.
    #[error(
        "cannot remove what is left of the job's connection {local} to {remote} (needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY)"
    )]
    Destroy {
        /// The job's address.
        local: SocketAddr,
        /// The other end's.
        remote: SocketAddr,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl Sockets {
    /// Records the TCP sockets of `pids` (host pids, frozen), which share one network namespace.
    ///
    /// # Errors
    /// When a process is gone.
    pub fn record(pids: &[i32]) -> Result<Self, SocketsError> {
        let mut inodes = HashSet::new();
        for pid in pids {
            add_inodes(*pid, &mut inodes)
                .map_err(|source| SocketsError::Process { pid: *pid, source })?;
        }
        let Some(pid) = pids.first().filter(|_| !inodes.is_empty()) else {
            return Ok(Self::default());
        };
        let table = table(*pid).map_err(|source| SocketsError::Process { pid: *pid, source })?;
        Ok(Self::of(
            table.iter().filter(|entry| inodes.contains(&entry.inode)),
        ))
    }

    fn of<'a>(entries: impl Iterator<Item = &'a TcpNetEntry>) -> Self {
        let (mut listening, mut ends) = (Vec::new(), HashSet::new());
        for entry in entries {
            let local = canonical(entry.local_address);
            if entry.state == TcpState::Listen {
                listening.push(local);
            } else {
                ends.insert((local, canonical(entry.remote_address)));
            }
        }
        // A connection to somebody outside is not ours to end.
        let mut connections: Vec<_> = ends
            .iter()
            .copied()
            .filter(|(local, remote)| ends.contains(&(*remote, *local)))
            .collect();
        connections.sort_unstable();
        Self {
            listening,
            connections,
        }
    }

    /// Destroys what is left of these sockets, now that their processes are dead. How many there were.
    ///
    /// Only sockets that nobody owns any more are touched: ends of the recorded connections, and
    /// those in `TIME_WAIT` that occupy a recorded address on this machine alone.
    ///
    /// # Errors
    /// When the kernel refuses; those destroyed before stay so.
    pub fn destroy_leftovers(&self) -> Result<usize, SocketsError> {
        if self.listening.is_empty() && self.connections.is_empty() {
            return Ok(0);
        }
        let diagnosis = Diagnosis::open().map_err(SocketsError::Ask)?;
        let mut destroyed = 0;
        for family in [libc::AF_INET, libc::AF_INET6] {
            for closed in diagnosis.closed(family).map_err(SocketsError::Ask)? {
                if self.claims(&closed) {
                    diagnosis
                        .destroy(&closed)
                        .map_err(|source| SocketsError::Destroy {
                            local: closed.local,
                            remote: closed.remote,
                            source,
                        })?;
                    destroyed += 1;
                }
            }
        }
        Ok(destroyed)
    }

    fn claims(&self, closed: &Closed) -> bool {
        let Closed { local, remote, .. } = closed;
        let recorded = self.connections.binary_search(&(*local, *remote)).is_ok();
        // A connection that was made after the snapshot. It holds no data, and no stray packet of it is on its way.
        let blocks = closed.waits
            && local.ip() == remote.ip()
            && (self
                .listening
                .iter()
                .any(|listening| covers(listening, local))
                || self.connections.iter().any(|(ours, _)| ours == local));
        recorded || blocks
    }
}

fn covers(listening: &SocketAddr, local: &SocketAddr) -> bool {
    listening.port() == local.port()
        && (listening.ip().is_unspecified() || listening.ip() == local.ip())
}

fn add_inodes(pid: i32, inodes: &mut HashSet<u64>) -> Result<(), ProcError> {
    for descriptor in ProcessEntry::new(pid)?.fd()? {
        if let FDTarget::Socket(inode) = descriptor?.target {
            inodes.insert(inode);
        }
    }
    Ok(())
}

fn table(pid: i32) -> Result<Vec<TcpNetEntry>, ProcError> {
    let process = ProcessEntry::new(pid)?;
    let mut entries = process.tcp()?;
    match process.tcp6() {
        Ok(more) => entries.extend(more),
        // A kernel without IPv6.
        Err(ProcError::NotFound(_)) => {}
        Err(error) => return Err(error),
    }
    Ok(entries)
}

/// An IPv4 address in an IPv6 socket is an IPv4 address.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// A socket that its owner has closed.
pub(super) struct Closed {
    family: u8,
    /// The kernel's `inet_diag_sockid`, cookie included: it names this socket and no later one.
    id: [u8; ID_BYTES],
    local: SocketAddr,
    remote: SocketAddr,
    /// In `TIME_WAIT`.
    waits: bool,
}

/// A netlink socket to the kernel's socket diagnosis.
struct Diagnosis(OwnedFd);

impl Diagnosis {
    fn open() -> io::Result<Self> {
        Ok(Self(socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkSockDiag,
        )?))
    }

    fn closed(&self, family: i32) -> io::Result<Vec<Closed>> {
        self.ask(
            SOCK_DIAG_BY_FAMILY,
            libc::NLM_F_DUMP,
            u8::try_from(family).map_err(io::Error::other)?,
            &[0; ID_BYTES],
        )?;
        let (mut found, mut buffer) = (Vec::new(), vec![0; ANSWER_BYTES]);
        loop {
            let got = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut rest = &buffer[..got];
            while let Some((kind, body)) = next_message(&mut rest) {
                match i32::from(kind) {
                    libc::NLMSG_DONE => return Ok(found),
                    libc::NLMSG_ERROR => refused(body)?,
                    _ => found.extend(Closed::parse(body)),
                }
            }
        }
    }

    fn destroy(&self, closed: &Closed) -> io::Result<()> {
        self.ask(SOCK_DESTROY, libc::NLM_F_ACK, closed.family, &closed.id)?;
        let mut buffer = vec![0; ANSWER_BYTES];
        let got = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        match next_message(&mut &buffer[..got]) {
            Some((_, body)) => match refused(body) {
                // It went by itself.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            },
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends an `inet_diag_req_v2` for TCP.
    fn ask(&self, kind: u16, flags: i32, family: u8, id: &[u8; ID_BYTES]) -> io::Result<()> {
        let flags = u16::try_from(libc::NLM_F_REQUEST | flags).map_err(io::Error::other)?;
        let mut message = Vec::with_capacity(HEADER_BYTES + 8 + ID_BYTES);
        message.extend([0; 4]);
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend([0; 8]);
        message.extend([family, TCP, 0, 0]);
        message.extend(CLOSED_STATES.to_ne_bytes());
        message.extend(id);
        let length = u32::try_from(message.len()).map_err(io::Error::other)?;
        message[..4].copy_from_slice(&length.to_ne_bytes());
        send(self.0.as_raw_fd(), &message, MsgFlags::empty())?;
        Ok(())
    }
}

/// Type and body of the next netlink message; `None` at the end.
pub(super) fn next_message<'a>(rest: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let length = u32::from_ne_bytes(rest.get(..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(rest.get(4..6)?.try_into().ok()?);
    let body = rest.get(HEADER_BYTES..length)?;
    *rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, body))
}

/// The error number of an `NLMSG_ERROR`; 0 is an acknowledgement.
pub(super) fn refused(body: &[u8]) -> io::Result<()> {
    let number = body.get(..4).and_then(|bytes| bytes.try_into().ok());
    match number.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(negative) => Err(Errno::from_raw(negative.wrapping_neg()).into()),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

impl Closed {
    /// From an `inet_diag_msg`; `None` for one that has an owner.
    pub(super) fn parse(body: &[u8]) -> Option<Self> {
        let report: &[u8; REPORT_BYTES] = body.get(..REPORT_BYTES)?.try_into().ok()?;
        let (family, state) = (report[0], report[1]);
        let id: [u8; ID_BYTES] = report[4..4 + ID_BYTES].try_into().ok()?;
        let inode = u32::from_ne_bytes(report[68..72].try_into().ok()?);
        let local = address(family, &id[4..20], &id[0..2])?;
        let remote = address(family, &id[20..36], &id[2..4])?;
        (inode == 0).then_some(Self {
            family,
            id,
            local,
            remote,
            waits: state == TIME_WAIT,
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

#[cfg(test)]
mod tests;
