//! Transfer of bytes and file descriptors over a unix socket of any type. The callers define the meaning of the bytes.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Sends bytes, with the descriptors attached to the first byte; returns the number of bytes sent. A closed peer is an
/// error, not a signal.
pub(crate) fn send(socket: &impl AsFd, bytes: &[u8], descriptors: &[RawFd]) -> io::Result<usize> {
    let rights = [ControlMessage::ScmRights(descriptors)];
    let ancillary: &[ControlMessage<'_>] = if descriptors.is_empty() { &[] } else { &rights };
    let socket = socket.as_fd().as_raw_fd();
    loop {
        match sendmsg::<()>(
            socket,
            &[IoSlice::new(bytes)],
            ancillary,
            MsgFlags::MSG_NOSIGNAL,
            None,
        ) {
            Err(Errno::EINTR) => {}
            other => return Ok(other?),
        }
    }
}

/// Receives the available bytes and up to `DESCRIPTORS` descriptors with them, closed on exec. Zero bytes mean the end
/// of the connection.
///
/// A datagram longer than `bytes` is an error; so are more than `DESCRIPTORS` descriptors.
pub(crate) fn receive<const DESCRIPTORS: usize>(
    socket: &impl AsFd,
    bytes: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = nix::cmsg_space!([RawFd; DESCRIPTORS]);
    let mut parts = [IoSliceMut::new(bytes)];
    let message = loop {
        match recvmsg::<()>(
            socket.as_fd().as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    let mut descriptors = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            descriptors.extend(numbers.into_iter().map(own));
        }
    }
    if message.flags.contains(MsgFlags::MSG_TRUNC) {
        let error = io::Error::new(io::ErrorKind::InvalidData, "message too long");
        return Err(error);
    }
    Ok((message.bytes, descriptors))
}

#[allow(
    unsafe_code,
    reason = "received descriptors are raw numbers until owned"
)]
fn own(number: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just installed this descriptor for this process; it has no other owner.
    unsafe { OwnedFd::from_raw_fd(number) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn too_long_datagram_is_an_error_instead_of_truncated() {
        let (left, right) = UnixDatagram::pair().unwrap();
        send(&left, &[7; 9], &[]).unwrap();
        let error = receive::<1>(&right, &mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn more_descriptors_than_there_is_place_for_are_an_error() {
        let (left, right) = UnixDatagram::pair().unwrap();
        // The kernel rounds the space up, so three descriptors exceed the space for one or two.
        send(&left, b"x", &[left.as_raw_fd(); 3]).unwrap();
        assert!(receive::<1>(&right, &mut [0; 8]).is_err());
    }
}
