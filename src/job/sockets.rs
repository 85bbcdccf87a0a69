//! TCP connections of the job: their record at a snapshot, and the removal of leftovers when a restore needs their
//! addresses again.
//!
//! CRIU dumps and restores one socket after the other. Meanwhile the kernel continues to send data for which a full
//! receiver had no room, the end of a connection, and retransmissions. Between the dumps of both ends, one end would
//! receive data that the other end has sent later, or has already discarded. During a restore, the kernel would answer
//! a packet for an end that does not exist yet with a reset. Therefore packets of such connections are dropped during
//! dump and restore, and the kernel retransmits them. Connections without data in transit do not need this.
//!
//! A killed job leaves sockets in `TIME_WAIT` for a minute. No process owns them, but their addresses cannot be bound,
//! so they are destroyed before a restore. Connections to other programs cannot be restored: their peers have
//! continued, or have noticed the job's death. A restored connection would be open at one end only.

pub(super) mod diagnosis;
mod interfaces;
mod kinds;
mod multicast;
mod options;
mod packet_lock;
mod tcp_table;

use std::io;
use std::net::{SocketAddr, TcpListener};

use procfs::ProcError;
use serde::{Deserialize, Serialize};

use super::Descriptors;
use super::obstacles::Obstacle;
use crate::network_socket::{NetworkSocket, OpenSocket};
use diagnosis::{Diagnosis, Found, Which};
pub(super) use kinds::find_unknown_kind;
pub use options::{SocketOptions, give_back_socket_options, record_socket_options};
pub(crate) use packet_lock::PacketLock;
use tcp_table::TcpTable;

/// The TCP sockets of a job at a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sockets {
    /// Addresses of listening sockets.
    pub listening: Vec<SocketAddr>,
    /// Connections of the job with itself, as seen by each of both ends: local, remote. Unaccepted connections have one
    /// end.
    pub connections: Vec<(SocketAddr, SocketAddr)>,
    /// Connections to other programs: local, remote.
    #[serde(default)]
    pub outside: Vec<(SocketAddr, SocketAddr)>,
    /// Number of sockets whose other end is gone: closed, reset or never accepted. Received data can still be read.
    #[serde(default)]
    pub half_closed: usize,
    /// Connections with data in transit or with a closed direction: local, remote.
    #[serde(default)]
    pub unsettled: Vec<(SocketAddr, SocketAddr)>,
    /// The image has none of the connections: a restored job finds them closed.
    #[serde(default)]
    pub closed: bool,
}

/// Treatment of connections of other programs that the job has not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backlog {
    /// The restored job never receives them, like other connections to the outside.
    Dropped,
    /// The snapshot is refused.
    Refused,
}

/// Reasons why the job's sockets could not be recorded or their leftovers not removed.
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
    /// The job has a connection or a datagram that cannot be stored in an image.
    #[error(transparent)]
    Obstacle(#[from] Obstacle),
    /// A connection that is to be kept cannot be saved.
    #[error(
        "the job's connection {local} to {remote} cannot be saved without privileges (needs CAP_NET_ADMIN over its network); run ckpt-run as root, or set network.tcp = \"close\", so that a restored job finds its connections closed"
    )]
    NotKept {
        /// The job's address.
        local: SocketAddr,
        /// The address of the other end.
        remote: SocketAddr,
    },
    /// A connection to another program that is to be kept is carried by pasta.
    #[error(
        "the job's connection {local} to {remote} cannot be saved: it leaves the job's own network through pasta, which does not restore connections; set network.tcp = \"close\", so that a restored job finds its connections to others closed"
    )]
    NotCarried {
        /// The job's address.
        local: SocketAddr,
        /// The address of the other end.
        remote: SocketAddr,
    },
    /// Packets cannot be held back.
    #[error(
        "cannot hold back packets of the job's connections with data in transit (needs CAP_NET_ADMIN, and nftables in Linux 5.12 or newer)"
    )]
    Lock(#[source] io::Error),
    /// The kernel does not list sockets.
    #[error("cannot ask the kernel for TCP sockets")]
    Ask(#[source] io::Error),
    /// The kernel refuses to destroy a socket.
    #[error(
        "cannot remove the leftover of the job's connection {local} to {remote} (needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY)"
    )]
    Destroy {
        /// The job's address.
        local: SocketAddr,
        /// The address of the other end.
        remote: SocketAddr,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

impl SocketsError {
    /// Returns the job's address that a leftover occupies which only root may remove.
    #[must_use]
    pub fn address_of_leftover(&self) -> Option<SocketAddr> {
        match self {
            Self::Destroy { local, source, .. } => {
                let is_denied = source.kind() == io::ErrorKind::PermissionDenied;
                is_denied.then_some(*local)
            }
            _ => None,
        }
    }
}

impl Sockets {
    /// Records the TCP sockets among `open`, of processes that share one network namespace.
    ///
    /// # Errors
    /// A process has exited, or a connection is in a state that cannot be stored in an image.
    pub fn record(open: &[Descriptors], backlog: Backlog) -> Result<Self, SocketsError> {
        let table = TcpTable::read(open)?;
        table.check_other_ends()?;
        table.check_datagrams(open)?;
        match backlog {
            Backlog::Dropped => {}
            Backlog::Refused => table.check_backlog()?,
        }
        Ok(table.sockets())
    }

    /// Leaves the connections out of the image: CRIU cannot save them.
    ///
    /// # Errors
    /// [`SocketsError::NotKept`] if there is one and `wanted` says that connections have to be kept.
    pub fn without_connections(mut self, wanted: bool) -> Result<Self, SocketsError> {
        let first = self.outside.iter().chain(&self.connections).next();
        match first {
            Some((local, remote)) if wanted => Err(SocketsError::NotKept {
                local: *local,
                remote: *remote,
            }),
            Some(_) | None => {
                self.closed = true;
                self.unsettled.clear();
                Ok(self)
            }
        }
    }

    /// Refuses connections to others if they have to be kept: pasta, which carries them, does not know them after a
    /// restore.
    ///
    /// # Errors
    /// [`SocketsError::NotCarried`] if there is one and `wanted` says that connections have to be kept.
    pub fn without_carried(self, wanted: bool) -> Result<Self, SocketsError> {
        match self.outside.first() {
            Some((local, remote)) if wanted => Err(SocketsError::NotCarried {
                local: *local,
                remote: *remote,
            }),
            Some(_) | None => Ok(self),
        }
    }

    /// Holds back the packets of connections of the job with itself, while its processes are frozen and dumped. Returns
    /// `None` if nothing is on its way.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn hold_for_dump(
        &self,
        open: OpenSocket<'_>,
    ) -> Result<Option<PacketLock>, SocketsError> {
        let inside = |ends: &&(SocketAddr, SocketAddr)| self.outside.binary_search(ends).is_err();
        let held: Vec<_> = self.unsettled.iter().filter(inside).copied().collect();
        if held.is_empty() {
            return Ok(None);
        }
        let lock =
            open(NetworkSocket::Netfilter).and_then(|netlink| PacketLock::set(netlink, &held));
        lock.map(Some).map_err(SocketsError::Lock)
    }

    /// Drops packets of all connections during their restore. Returns `None` if there are none, or if the kernel
    /// refuses and no data was in transit.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn hold_for_restore(
        &self,
        open: OpenSocket<'_>,
    ) -> Result<Option<PacketLock>, SocketsError> {
        let held = [&self.connections[..], &self.outside, &self.unsettled].concat();
        if held.is_empty() {
            return Ok(None);
        }
        match open(NetworkSocket::Netfilter).and_then(|netlink| PacketLock::set(netlink, &held)) {
            Ok(lock) => Ok(Some(lock)),
            Err(error) if self.unsettled.is_empty() => {
                tracing::debug!(%error, "cannot hold back packets of the job's connections");
                Ok(None)
            }
            Err(error) => Err(SocketsError::Lock(error)),
        }
    }

    /// Returns true if all connections are to other programs.
    #[must_use]
    pub fn are_outside_only(&self) -> bool {
        !self.outside.is_empty() && self.connections.is_empty() && self.half_closed == 0
    }

    /// Aborts the connections to other programs, which the restored job treats as open. Their peers have noticed the
    /// job's death, or have continued. Returns the number of connections.
    ///
    /// # Errors
    /// The kernel refuses; connections aborted before stay aborted.
    pub fn abort_outside(&self, open: OpenSocket<'_>) -> Result<usize, SocketsError> {
        if self.outside.is_empty() {
            return Ok(0);
        }
        destroy(open, Which::Connected, |found| {
            let ends = (found.local, found.remote);
            found.owned && self.outside.binary_search(&ends).is_ok()
        })
    }

    /// Destroys the leftovers of these sockets, after their processes are dead. Returns their number.
    ///
    /// Only sockets without an owning process are destroyed: ends of the recorded connections, sockets in `TIME_WAIT`
    /// of this machine's connections with itself at a recorded address, and sockets that prevent a recorded address
    /// from being bound.
    ///
    /// # Errors
    /// The kernel refuses; sockets destroyed before stay destroyed.
    pub fn destroy_leftovers(&self, open: OpenSocket<'_>) -> Result<usize, SocketsError> {
        if *self == Self::default() {
            return Ok(0);
        }
        let occupied = self.listening.iter().filter(|local| is_occupied(**local));
        let occupied: Vec<_> = occupied.collect();
        destroy(open, Which::Closed, |found| {
            let blocks = occupied.iter().any(|local| covers(local, &found.local));
            !found.owned && (blocks || self.claims(found))
        })
    }

    fn claims(&self, closed: &Found) -> bool {
        if self.closed {
            return false;
        }
        let Found { local, remote, .. } = closed;
        let ends = (*local, *remote);
        let known = [&self.connections, &self.outside, &self.unsettled];
        let recorded = known.iter().any(|list| list.binary_search(&ends).is_ok());
        // The connection was made after the snapshot. It holds no data, and none of its packets is in transit.
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

/// Destroys the chosen sockets; returns their number.
fn destroy(
    open: OpenSocket<'_>,
    which: Which,
    chosen: impl Fn(&Found) -> bool,
) -> Result<usize, SocketsError> {
    let diagnosis = open(NetworkSocket::Diagnosis).map_err(SocketsError::Ask)?;
    let diagnosis = Diagnosis::new(diagnosis);
    let mut destroyed = 0;
    for found in diagnosis.list(which).map_err(SocketsError::Ask)? {
        if chosen(&found) {
            diagnosis
                .destroy(&found)
                .map_err(|source| SocketsError::Destroy {
                    local: found.local,
                    remote: found.remote,
                    source,
                })?;
            destroyed += 1;
        }
    }
    Ok(destroyed)
}

/// Returns true if the address cannot be bound, even with `SO_REUSEADDR`, which the standard library and CRIU set.
/// Leftover connections of a server that did not set it prevent this for minutes.
fn is_occupied(local: SocketAddr) -> bool {
    TcpListener::bind(local).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

fn covers(listening: &SocketAddr, local: &SocketAddr) -> bool {
    listening.port() == local.port()
        && (listening.ip().is_unspecified() || listening.ip() == local.ip())
}

#[cfg(test)]
mod tests;
