//! TCP connections of the job: their record at a snapshot, and the removal of their remains when a restore needs their
//! addresses again.
//!
//! A killed job leaves sockets in `TIME_WAIT` for a minute. No process owns them, but their addresses cannot be bound,
//! so they are destroyed before a restore. Connections to other programs cannot be restored: their peers have
//! continued, or have noticed that the job died. A restored connection would be open at one end only.

pub(super) mod diagnosis;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;

use procfs::ProcError;
use procfs::net::{TcpNetEntry, TcpState};
use procfs::process::{FDTarget, Process as ProcessEntry};
use serde::{Deserialize, Serialize};

use diagnosis::{Diagnosis, Found, Which};

/// The TCP sockets of a job at a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sockets {
    /// The addresses that it listened on.
    pub listening: Vec<SocketAddr>,
    /// Connections of the job with itself, as each of both ends sees them: local, remote.
    pub connections: Vec<(SocketAddr, SocketAddr)>,
    /// Connections to other programs: local, remote.
    #[serde(default)]
    pub outside: Vec<(SocketAddr, SocketAddr)>,
    /// Number of other connected sockets: the other end was closed, or was never accepted.
    #[serde(default)]
    pub half_closed: usize,
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
    /// Records the TCP sockets of `pids` (host pids, frozen), which share one network namespace.
    ///
    /// # Errors
    /// A process has exited.
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
        let (mut listening, mut ends) = (Vec::new(), HashMap::new());
        for entry in entries {
            let local = canonical(entry.local_address);
            if entry.state == TcpState::Listen {
                listening.push(local);
            } else {
                ends.insert(
                    (local, canonical(entry.remote_address)),
                    entry.state.clone(),
                );
            }
        }
        let (mut connections, mut outside, mut half_closed) = (Vec::new(), Vec::new(), 0);
        for ((local, remote), state) in &ends {
            if ends.contains_key(&(*remote, *local)) {
                connections.push((*local, *remote));
            } else if local.ip() != remote.ip() || is_open(state) {
                outside.push((*local, *remote));
            } else {
                half_closed += 1;
            }
        }
        connections.sort_unstable();
        outside.sort_unstable();
        Self {
            listening,
            connections,
            outside,
            half_closed,
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
    /// Only sockets that no process owns any more are destroyed: ends of the recorded connections, and those in
    /// `TIME_WAIT` that occupy a recorded address on this machine alone.
    ///
    /// # Errors
    /// The kernel refuses; sockets destroyed before stay destroyed.
    pub fn destroy_leftovers(&self) -> Result<usize, SocketsError> {
        if self.listening.is_empty() && self.connections.is_empty() {
            return Ok(0);
        }
        destroy(Which::Closed, |found| !found.owned && self.claims(found))
    }

    fn claims(&self, closed: &Found) -> bool {
        let Found { local, remote, .. } = closed;
        let recorded = self.connections.binary_search(&(*local, *remote)).is_ok();
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

/// Returns true if the other end has not been closed.
fn is_open(state: &TcpState) -> bool {
    matches!(
        state,
        TcpState::Established | TcpState::SynSent | TcpState::SynRecv
    )
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
        // The kernel has no IPv6.
        Err(ProcError::NotFound(_)) => {}
        Err(error) => return Err(error),
    }
    Ok(entries)
}

/// Converts an IPv4 address in an IPv6 socket to an IPv4 address.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests;
