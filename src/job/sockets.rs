//! TCP connections of the job: their record at a snapshot, and the removal of their remains when a restore needs their
//! addresses again.
//!
//! CRIU dumps and restores one socket after the other, and the kernel sends by itself: what a full receiver had no room
//! for, the end of a connection, lost packets again. Between the dumps of both ends, one end would have received data
//! that the other has sent only later, or has forgotten since. At a restore, a packet for an end that does not exist yet
//! is answered with a reset. So packets of such connections are discarded meanwhile; the kernel sends them again later.
//! Connections in which nothing is on its way need none of that.
//!
//! A killed job leaves sockets in `TIME_WAIT` for a minute. No process owns them, but their addresses cannot be bound,
//! so they are destroyed before a restore. Connections to other programs cannot be restored: their peers have
//! continued, or have noticed that the job died. A restored connection would be open at one end only.

pub(super) mod diagnosis;
mod kinds;
mod packet_lock;
mod tcp_table;

use std::io;
use std::net::{SocketAddr, TcpListener};

use procfs::ProcError;
use serde::{Deserialize, Serialize};

use super::Descriptors;
use super::obstacles::Obstacle;
use diagnosis::{Diagnosis, Found, Which};
pub(super) use kinds::find_unknown_kind;
pub(crate) use packet_lock::PacketLock;
use tcp_table::TcpTable;

/// The TCP sockets of a job at a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sockets {
    /// The addresses that it listened on.
    pub listening: Vec<SocketAddr>,
    /// Connections of the job with itself, as each of both ends sees them: local, remote. Those that wait to be made have
    /// one end.
    pub connections: Vec<(SocketAddr, SocketAddr)>,
    /// Connections to other programs: local, remote.
    #[serde(default)]
    pub outside: Vec<(SocketAddr, SocketAddr)>,
    /// Number of sockets whose other end is gone: it was closed, reset or never accepted. What they have received can
    /// still be read.
    #[serde(default)]
    pub half_closed: usize,
    /// Connections in which data is on its way, or a direction is not open: local, remote.
    #[serde(default)]
    pub unsettled: Vec<(SocketAddr, SocketAddr)>,
}

/// Connections of other programs that the job has not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backlog {
    /// A restored job never sees them, like other connections to the outside.
    Dropped,
    /// The snapshot is refused.
    Refused,
}

/// The reason why the job's sockets could not be recorded or their remains not removed.
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
    /// The job has a connection or a datagram that no image can hold.
    #[error(transparent)]
    Obstacle(#[from] Obstacle),
    /// Packets cannot be held back.
    #[error(
        "cannot hold back the packets of the job's connections, in which data is on its way (needs CAP_NET_ADMIN, and nftables in Linux 5.12 or newer)"
    )]
    Lock(#[source] io::Error),
    /// The kernel does not list sockets.
    #[error("cannot ask the kernel for TCP sockets")]
    Ask(#[source] io::Error),
    /// The kernel refuses to destroy a socket.
    #[error(
        "cannot remove what is left of the job's connection {local} to {remote} (needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY)"
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

impl Sockets {
    /// Records the TCP sockets among `open`, of processes that share one network namespace.
    ///
    /// # Errors
    /// A process has exited, or a connection is in a state that no image can hold.
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

    /// Holds back the packets of connections of the job with itself, while its processes are frozen and dumped. Returns
    /// `None` if nothing is on its way.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn hold_for_dump(&self) -> Result<Option<PacketLock>, SocketsError> {
        let inside = |ends: &&(SocketAddr, SocketAddr)| self.outside.binary_search(ends).is_err();
        let held: Vec<_> = self.unsettled.iter().filter(inside).copied().collect();
        if held.is_empty() {
            return Ok(None);
        }
        PacketLock::set(&held).map(Some).map_err(SocketsError::Lock)
    }

    /// Holds back the packets of all connections while they are restored. Returns `None` if there are none, or if the
    /// kernel refuses and nothing was on its way.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn hold_for_restore(&self) -> Result<Option<PacketLock>, SocketsError> {
        let held = [&self.connections[..], &self.outside, &self.unsettled].concat();
        if held.is_empty() {
            return Ok(None);
        }
        match PacketLock::set(&held) {
            Ok(lock) => Ok(Some(lock)),
            Err(error) if self.unsettled.is_empty() => {
                tracing::debug!(%error, "packets of the job's connections are not held back");
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

    /// Aborts the connections to other programs, which the restored job treats as open: their peers have noticed its
    /// death, or continue without it. Returns their number.
    ///
    /// # Errors
    /// The kernel refuses; connections aborted before stay aborted.
    pub fn abort_outside(&self) -> Result<usize, SocketsError> {
        if self.outside.is_empty() {
            return Ok(0);
        }
        destroy(Which::Connected, |found| {
            let ends = (found.local, found.remote);
            found.owned && self.outside.binary_search(&ends).is_ok()
        })
    }

    /// Destroys the remains of these sockets, after their processes are dead. Returns their number.
    ///
    /// Only sockets that no process owns any more are destroyed: ends of the recorded connections, those in `TIME_WAIT`
    /// that occupy a recorded address on this machine alone, and all that keep a recorded address from being bound.
    ///
    /// # Errors
    /// The kernel refuses; sockets destroyed before stay destroyed.
    pub fn destroy_leftovers(&self) -> Result<usize, SocketsError> {
        if *self == Self::default() {
            return Ok(0);
        }
        let occupied = self.listening.iter().filter(|local| is_occupied(**local));
        let occupied: Vec<_> = occupied.collect();
        destroy(Which::Closed, |found| {
            let blocks = occupied.iter().any(|local| covers(local, &found.local));
            !found.owned && (blocks || self.claims(found))
        })
    }

    fn claims(&self, closed: &Found) -> bool {
        let Found { local, remote, .. } = closed;
        let ends = (*local, *remote);
        let known = [&self.connections, &self.outside, &self.unsettled];
        let recorded = known.iter().any(|list| list.binary_search(&ends).is_ok());
        // A connection that was made after the snapshot. It holds no data, and no stray packet of it is in transit.
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
fn destroy(which: Which, chosen: impl Fn(&Found) -> bool) -> Result<usize, SocketsError> {
    let diagnosis = Diagnosis::open().map_err(SocketsError::Ask)?;
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

/// Returns true if the address cannot be bound, not even by a socket that may share it with what is left of connections
/// (`SO_REUSEADDR`, set by the standard library and by CRIU). Those of a server that did not set it prevent that for minutes.
fn is_occupied(local: SocketAddr) -> bool {
    TcpListener::bind(local).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

fn covers(listening: &SocketAddr, local: &SocketAddr) -> bool {
    listening.port() == local.port()
        && (listening.ip().is_unspecified() || listening.ip() == local.ip())
}

#[cfg(test)]
mod tests;
