#![allow(
    unsafe_code,
    reason = "receives descriptors, of which none may be lost even where there are too many"
)]
//! Socket of the supervisor: datagrams with descriptors, from a known address and user.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessage, MsgFlags, Shutdown, UnixAddr, bind, sendmsg, setsockopt, shutdown, sockopt,
};

use super::agent::Agent;
use super::datagram::REPLY_LEN_MAX;
use super::embed::Token;
use crate::network_socket::NetworkSocket;

/// Size of the receive buffer: a batch takes some 4 KiB, its descriptors nothing.
const BUFFER_LEN: usize = 4 << 20;
/// Maximum number of descriptors in a datagram on Linux (`SCM_MAX_FD`).
const DESCRIPTORS_MAX: usize = 253;
/// Words of control data: descriptors and credentials, each with a header of two words.
const CONTROL_WORDS: usize = 2 + DESCRIPTORS_MAX.div_ceil(2) + 2 + 2;

/// Socket for requests to agents, one at a time.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    /// Serial number of the last request.
    pub(super) serial: u64,
}

/// Received datagram.
pub(super) struct Datagram {
    /// Bytes, at most [`REPLY_LEN_MAX`].
    pub(super) bytes: Vec<u8>,
    /// Descriptors that came with the datagram.
    pub(super) descriptors: Vec<OwnedFd>,
    /// Abstract name of the sender.
    pub(super) from: Vec<u8>,
    /// User id of the sender.
    pub(super) uid: u32,
    /// True if the datagram was truncated, or too few numbers were free for its descriptors.
    pub(super) is_cut: bool,
}

impl Channel {
    /// Creates a channel to agents in the network namespace of this process.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn bind() -> io::Result<Self> {
        Self::of(NetworkSocket::Datagrams.open()?)
    }

    /// Gives a [`NetworkSocket::Datagrams`] of the agents' network namespace a name chosen by the kernel.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn of(socket: OwnedFd) -> io::Result<Self> {
        setsockopt(&socket, sockopt::PassCred, &true)?;
        // Exceeds the system's limit if permitted.
        if setsockopt(&socket, sockopt::RcvBufForce, &BUFFER_LEN).is_err() {
            setsockopt(&socket, sockopt::RcvBuf, &BUFFER_LEN)?;
        }
        bind(socket.as_raw_fd(), &UnixAddr::new_unnamed())?;
        Ok(Self { socket, serial: 0 })
    }

    /// Refuses further datagrams (Linux: EPIPE). Datagrams that arrived before can be received.
    pub(super) fn close(&self) {
        // It cannot fail on an open socket.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Read);
    }

    /// Returns a client for the agent of a process, by the process's pid in its own namespace. [`Agent::hello`] shows
    /// if it exists.
    pub fn agent(&mut self, token: &Token, pid_inside: i32) -> Agent<'_> {
        Agent::new(self, token, pid_inside)
    }

    /// Sends a datagram without waiting.
    pub(super) fn send(
        &self,
        to: &UnixAddr,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> nix::Result<()> {
        let numbers: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&numbers)];
        let ancillary: &[ControlMessage<'_>] = if numbers.is_empty() { &[] } else { &rights };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        loop {
            let bytes = [IoSlice::new(bytes)];
            match sendmsg(self.socket.as_raw_fd(), &bytes, ancillary, flags, Some(to)) {
                Err(Errno::EINTR) => {}
                result => return result.map(drop),
            }
        }
    }

    /// Returns the next datagram, if one arrives in time.
    pub(super) fn receive(&self, limit: Duration) -> nix::Result<Option<Datagram>> {
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        let mut polled = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut polled, limit) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(None),
            Err(errno) => return Err(errno),
        }
        match receive(self.socket.as_fd()) {
            Ok(datagram) => Ok(Some(datagram)),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

/// Receives a datagram without `nix`, which does not return the descriptors of a truncated datagram, so that they would
/// stay open.
fn receive(socket: BorrowedFd<'_>) -> nix::Result<Datagram> {
    let mut bytes = vec![0; REPLY_LEN_MAX];
    let mut control = [0u64; CONTROL_WORDS];
    let mut address = MaybeUninit::<libc::sockaddr_un>::zeroed();
    let mut piece = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: a message of zeros is an empty one.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_name = address.as_mut_ptr().cast();
    message.msg_namelen = u32::try_from(size_of_val(&address)).unwrap_or(0);
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    // SAFETY: all buffers of the message have the given lengths.
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let len = Errno::result(len)?;
    bytes.truncate(usize::try_from(len).unwrap_or(0));
    // SAFETY: zeros, and what the kernel wrote over them.
    let address = unsafe { address.assume_init() };
    let mut datagram = Datagram {
        bytes,
        descriptors: Vec::new(),
        from: abstract_name(&address, message.msg_namelen),
        uid: u32::MAX,
        is_cut: message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0,
    };
    // SAFETY: the message was filled by the kernel.
    unsafe { read_control(&message, &mut datagram) };
    Ok(datagram)
}

/// Reads descriptors and credentials.
///
/// # Safety
/// The message was filled by `recvmsg`, and its descriptors were not taken.
unsafe fn read_control(message: &libc::msghdr, datagram: &mut Datagram) {
    // SAFETY: by the contract above.
    let mut head = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !head.is_null() {
        // SAFETY: a header within the buffer, which is aligned.
        let (control, data) = unsafe { (*head, libc::CMSG_DATA(head)) };
        // SAFETY: adds up lengths.
        let empty = unsafe { libc::CMSG_LEN(0) } as usize;
        #[allow(clippy::unnecessary_cast, reason = "not a usize in every C library")]
        let len = (control.cmsg_len as usize).saturating_sub(empty);
        // SAFETY: the kernel has written this many bytes after the header.
        let body = unsafe { std::slice::from_raw_parts(data, len) };
        let (words, _) = body.as_chunks();
        match (control.cmsg_level, control.cmsg_type) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                for number in words.iter().copied().map(RawFd::from_ne_bytes) {
                    // SAFETY: the kernel has just installed it for this process.
                    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
                    datagram.descriptors.push(descriptor);
                }
            }
            // `ucred` structure: pid, uid, gid.
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) => {
                datagram.uid = words
                    .get(1)
                    .map_or(u32::MAX, |word| u32::from_ne_bytes(*word));
            }
            _ => {}
        }
        // SAFETY: by the contract above.
        head = unsafe { libc::CMSG_NXTHDR(message, head) };
    }
}

/// Returns the name without its leading zero; empty for a sender without a name.
fn abstract_name(address: &libc::sockaddr_un, len: libc::socklen_t) -> Vec<u8> {
    let begin = std::mem::offset_of!(libc::sockaddr_un, sun_path);
    let len = usize::try_from(len).unwrap_or(0).saturating_sub(begin);
    let mut path = address
        .sun_path
        .iter()
        .take(len)
        .map(|byte| byte.cast_unsigned());
    match path.next() {
        Some(0) => path.collect(),
        _ => Vec::new(),
    }
}
