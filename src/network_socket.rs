//! Sockets in the job's network namespace that the supervisor uses. A socket belongs to the namespace in which it was
//! created, and keeps it when it is passed to another process. The supervisor cannot enter the namespace of an ordinary
//! user's job, because it has several threads.

use std::io;
use std::os::fd::OwnedFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use serde::{Deserialize, Serialize};

/// Kinds of sockets in the job's network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetworkSocket {
    /// Netlink socket for rules about packets.
    Netfilter,
    /// Netlink socket that lists and destroys sockets.
    Diagnosis,
    /// Unix socket for datagrams. Abstract names belong to a network namespace.
    Datagrams,
}

/// Function that creates a socket in the network namespace of the job.
pub type OpenSocket<'a> = &'a (dyn Fn(NetworkSocket) -> io::Result<OwnedFd> + Sync);

impl NetworkSocket {
    /// Creates the socket in the network namespace of this process.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn open(self) -> io::Result<OwnedFd> {
        let (family, kind, protocol) = match self {
            Self::Netfilter => (
                AddressFamily::Netlink,
                SockType::Raw,
                Some(SockProtocol::NetlinkNetFilter),
            ),
            Self::Diagnosis => (
                AddressFamily::Netlink,
                SockType::Raw,
                Some(SockProtocol::NetlinkSockDiag),
            ),
            Self::Datagrams => (AddressFamily::Unix, SockType::Datagram, None),
        };
        Ok(socket(family, kind, SockFlag::SOCK_CLOEXEC, protocol)?)
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{getsockopt, sockopt};

    use super::*;

    #[test]
    fn each_kind_of_socket_can_be_opened() {
        for (kind, expected) in [
            (NetworkSocket::Netfilter, SockType::Raw),
            (NetworkSocket::Diagnosis, SockType::Raw),
            (NetworkSocket::Datagrams, SockType::Datagram),
        ] {
            let opened = kind.open().unwrap();
            assert_eq!(getsockopt(&opened, sockopt::SockType).unwrap(), expected);
        }
    }
}
