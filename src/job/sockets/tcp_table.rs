//! The kernel's TCP sockets and their owners among the job's processes, and the parts that an image can contain.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use procfs::ProcError;
use procfs::net::{TcpNetEntry, TcpState};
use procfs::process::Process as ProcessEntry;

use super::kinds::unsent_datagrams;
use super::{Sockets, SocketsError, covers};
use crate::job::Process;
use crate::job::descriptors::{Descriptor, Descriptors};
use crate::job::obstacles::{Finding, Obstacle};

/// Limit on the checks for datagrams that a network device still holds.
const CHECKS_MAX: u32 = 5;
/// Interval between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// Both ends of a connection: local, remote.
type Ends = (SocketAddr, SocketAddr);

/// The kernel's TCP sockets.
pub(super) struct TcpTable {
    /// Sockets with a connection, or the rest of one.
    connected: HashMap<Ends, TcpNetEntry>,
    /// Listening sockets of the job.
    listening: Vec<(SocketAddr, TcpNetEntry)>,
    /// Inodes of the sockets that the job has open.
    owners: HashMap<u64, Process>,
}

impl TcpTable {
    /// Reads the table of the job, whose processes have these descriptors and share one network namespace.
    pub fn read(open: &[Descriptors]) -> Result<Self, SocketsError> {
        let mut owners = HashMap::new();
        for Descriptors { process, all } in open {
            for inode in all.iter().filter_map(Descriptor::socket) {
                owners.entry(inode).or_insert(*process);
            }
        }
        let first = open.first().filter(|_| !owners.is_empty());
        let entries = first.map_or(Ok(Vec::new()), |Descriptors { process, .. }| {
            let pid = process.host_pid;
            entries(pid).map_err(|source| SocketsError::Process { pid, source })
        })?;
        Ok(Self::new(entries, owners))
    }

    fn new(entries: Vec<TcpNetEntry>, owners: HashMap<u64, Process>) -> Self {
        let (mut connected, mut listening) = (HashMap::new(), Vec::new());
        for entry in entries {
            let local = canonical(entry.local_address);
            if entry.state != TcpState::Listen {
                connected.insert((local, canonical(entry.remote_address)), entry);
            } else if owners.contains_key(&entry.inode) {
                listening.push((local, entry));
            }
        }
        Self {
            connected,
            listening,
            owners,
        }
    }

    /// Restricts the job to these sockets.
    #[cfg(test)]
    pub fn keep_owners(&mut self, inodes: &[u64]) {
        self.owners.retain(|inode, _| inodes.contains(inode));
        self.listening
            .retain(|(_, entry)| inodes.contains(&entry.inode));
    }

    fn owner(&self, entry: &TcpNetEntry) -> Option<&Process> {
        self.owners.get(&entry.inode)
    }

    /// Returns the job's ends of connections, each with the socket at the other end if that is on this machine.
    fn ends(&self) -> impl Iterator<Item = (&Ends, &TcpNetEntry, Option<&TcpNetEntry>)> {
        let owned = self.connected.iter();
        let owned = owned.filter(|(_, entry)| self.owner(entry).is_some());
        owned.map(|(ends, entry)| (ends, entry, self.connected.get(&(ends.1, ends.0))))
    }

    /// Returns the facts about the job's sockets.
    pub fn sockets(&self) -> Sockets {
        let mut sockets = Sockets {
            listening: self.listening.iter().map(|(local, _)| *local).collect(),
            ..Sockets::default()
        };
        for (&(local, remote), entry, other) in self.ends() {
            let other = other.filter(|other| self.owner(other).is_some());
            if !is_settled(entry) || !other.is_none_or(is_settled) {
                sockets.unsettled.push((local, remote));
            }
            let stays_here = local.ip() == remote.ip();
            let waits_for_the_job =
                entry.state == TcpState::SynSent && stays_here && self.listens(&remote);
            if other.is_some() || waits_for_the_job {
                sockets.connections.push((local, remote));
            } else if !stays_here || is_open(&entry.state) {
                sockets.outside.push((local, remote));
                // The connection is being reset, or the other end is behind address translation.
                let is_lost = entry.state == TcpState::Established
                    && !self.connected.contains_key(&(remote, local));
                sockets.half_closed += usize::from(stays_here && is_lost);
            } else {
                sockets.half_closed += 1;
            }
        }
        sockets.connections.sort_unstable();
        sockets.outside.sort_unstable();
        sockets.unsettled.sort_unstable();
        sockets
    }

    /// Searches for a connection within the job whose other end is closed by all processes but still has an effect.
    /// CRIU cannot dump such a socket.
    pub fn check_other_ends(&self) -> Result<(), Obstacle> {
        for (&(local, remote), entry, other) in self.ends() {
            let (Some(process), Some(other)) = (self.owner(entry), other) else {
                continue;
            };
            if other.inode != 0 {
                continue;
            }
            // Ends closed by another program cannot be distinguished from those closed by the job. Ends of a program
            // that the job connected to are irrelevant here.
            match other.state {
                TcpState::Established | TcpState::SynRecv | TcpState::CloseWait
                    if self.listens(&remote) =>
                {
                    let finding = Finding::NotAccepted { local, remote };
                    return Err(Obstacle::of(process, finding));
                }
                TcpState::FinWait1 | TcpState::Closing | TcpState::LastAck
                    if self.listens(&remote) || self.listens(&local) =>
                {
                    let finding = Finding::NotRead { local, remote };
                    return Err(Obstacle::of(process, finding));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Searches for a UDP socket of the job with unsent data. Data still held by a network device is sent soon.
    pub fn check_datagrams(&self, open: &[Descriptors]) -> Result<(), SocketsError> {
        let Some(first) = open.first().filter(|_| !self.owners.is_empty()) else {
            return Ok(());
        };
        let pid = first.process.host_pid;
        for look in 1.. {
            let unsent =
                unsent_datagrams(pid).map_err(|source| SocketsError::Process { pid, source })?;
            let Some(process) = unsent.iter().find_map(|inode| self.owners.get(inode)) else {
                break;
            };
            if look == CHECKS_MAX {
                return Err(Obstacle::of(process, Finding::Datagram).into());
            }
            thread::sleep(CHECK_INTERVAL);
        }
        Ok(())
    }

    fn listens(&self, local: &SocketAddr) -> bool {
        self.listening.iter().any(|(one, _)| covers(one, local))
    }

    /// Searches for a connection from another program that the job has not accepted.
    pub fn check_backlog(&self) -> Result<(), Obstacle> {
        let waits = self.listening.iter().find(|(_, entry)| entry.rx_queue > 0);
        let Some((local, entry)) = waits else {
            return Ok(());
        };
        self.owner(entry).map_or(Ok(()), |process| {
            Err(Obstacle::of(process, Finding::Backlog(*local)))
        })
    }
}

/// Returns true if the kernel sends nothing more at this end, and a restore of it sends nothing: all data was received,
/// and both directions are open.
fn is_settled(entry: &TcpNetEntry) -> bool {
    entry.state == TcpState::Established && entry.tx_queue == 0
}

/// Returns true if the other end is open.
fn is_open(state: &TcpState) -> bool {
    matches!(
        state,
        TcpState::Established | TcpState::SynSent | TcpState::SynRecv
    )
}

fn entries(pid: i32) -> Result<Vec<TcpNetEntry>, ProcError> {
    let process = ProcessEntry::new(pid)?;
    let mut entries = process.tcp()?;
    match process.tcp6() {
        Ok(more) => entries.extend(more),
        // The kernel has no IPv6 support.
        Err(ProcError::NotFound(_)) => {}
        Err(error) => return Err(error),
    }
    Ok(entries)
}

/// Converts an IPv4 address in an IPv6 socket to an IPv4 address.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
