//! Protocol between supervisor and copier: one JSON value per datagram, with descriptors.
//!
//! Every request has one reply, in order. Both ends must be the same build; the greeting checks this.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cuda::device::KEY_BYTES;
use crate::fd_passing;

/// Protocol version, changed with any change of the messages.
pub(super) const VERSION: u32 = 3;
/// Size of a lane's memory: two halves of 4 MiB, each large enough for a copy over the bus at full speed, and small
/// enough to pin. A half holds several chunks of an image.
pub(super) const LANE_BYTES: NonZeroUsize = NonZeroUsize::new(8 << 20).unwrap();
/// Size of the memory with the keys of fingerprints, in pages.
pub(super) const KEYS_BYTES: NonZeroUsize = NonZeroUsize::new(20 << 10).unwrap();
const _: () = assert!(KEYS_BYTES.get() >= KEY_BYTES);
/// Maximum number of segments in a message: their numbers have up to 20 digits.
pub(super) const BATCH_MAX: usize = 1024;
/// Maximum length of a message: a full batch, with some room; well below the default socket buffer of 208 KiB.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Maximum length of an error's text: the driver's are a few hundred bytes.
const TEXT_BYTES_MAX: usize = 4 << 10;

/// Request on the control connection.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    Hello {
        version: u32,
    },
    Initialize,
    /// Descriptor: memory with the keys of fingerprints, for GPUs that are opened from now on.
    Keys,
    Open {
        gpu: [u8; 16],
    },
    Reserve {
        gpu: [u8; 16],
        bytes: u64,
    },
    /// Descriptor: the memory.
    Import {
        gpu: [u8; 16],
        len: u64,
    },
    Create {
        gpu: [u8; 16],
        len: u64,
    },
    /// After the last batch, the rest of the reserved memory is released.
    Shadow {
        segments: Vec<u64>,
        last: bool,
    },
    Release {
        segments: Vec<u64>,
    },
    /// Descriptors: the copier's end of the lane's connection, and the lane's memory.
    Lane,
}

/// Request on a lane: a copy between GPU memory and the lane's, or fingerprints of GPU memory for the lane's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LaneRequest {
    pub(super) direction: Direction,
    pub(super) part: Part,
    /// Offset of the part in the lane's memory.
    pub(super) at: u64,
}

/// Direction of a copy, or its replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Direction {
    /// From the GPU.
    Drain,
    /// To the GPU.
    Fill,
    /// Fingerprints of the part's blocks, from the GPU.
    Fingerprint,
}

/// Part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) segment: u64,
    pub(super) start: u64,
    pub(super) end: u64,
}

/// Reply of the copier.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    Hello {
        version: u32,
    },
    Room {
        free: u64,
        total: u64,
    },
    /// Memory, in reply to Create, with a descriptor.
    Segment {
        id: u64,
    },
    /// Number of bytes in the shadow, for each named segment.
    Shadowed {
        bytes: Vec<u64>,
    },
    Done,
    Failed(Refusal),
}

/// Reason for refusing a request. The copier accepts further requests.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refusal {
    /// A GPU has too little free memory.
    OutOfMemory(String),
    /// The driver reported an error.
    Device(String),
    /// The request is invalid, or not possible at present.
    Request(String),
}

impl Refusal {
    pub(super) fn request(text: impl Into<String>) -> Self {
        Self::Request(text.into())
    }
}

impl Request {
    /// Returns the number of descriptors that belong to the message.
    pub(super) fn descriptors(&self) -> usize {
        match self {
            Self::Lane => 2,
            Self::Import { .. } | Self::Keys => 1,
            Self::Hello { .. }
            | Self::Initialize
            | Self::Open { .. }
            | Self::Reserve { .. }
            | Self::Create { .. }
            | Self::Shadow { .. }
            | Self::Release { .. } => 0,
        }
    }
}

/// End of a connection.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// Creates a connected pair, closed on exec.
    pub(super) fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        Ok((Self(one), Self(other)))
    }

    pub(super) fn send(&self, message: &impl Serialize, descriptors: &[RawFd]) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "message too long");
            return Err(error);
        }
        fd_passing::send(&self.0, &bytes, descriptors).map(drop)
    }

    /// Receives a message; `None` at the end of the connection.
    pub(super) fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let (len, descriptors) = match fd_passing::receive::<2>(&self.0, &mut bytes) {
            // Reported if the peer was killed before it had read all data.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            other => other?,
        };
        if len == 0 {
            return Ok(None);
        }
        Ok(Some((serde_json::from_slice(&bytes[..len])?, descriptors)))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Socket {
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> Self {
        socket.0
    }
}

/// Shortens a text for a message.
pub(super) fn short(mut text: String) -> String {
    let end = (0..=TEXT_BYTES_MAX)
        .rev()
        .find(|&end| text.is_char_boundary(end));
    text.truncate(end.unwrap_or(0));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_batch_fits_a_message() {
        let (left, right) = Socket::pair().unwrap();
        let full = Reply::Shadowed {
            bytes: vec![u64::MAX; BATCH_MAX],
        };
        left.send(&full, &[]).unwrap();
        let (reply, none) = right.receive::<Reply>().unwrap().unwrap();
        assert_eq!(reply, full);
        assert!(none.is_empty());
    }

    #[test]
    fn a_message_that_is_too_long_is_not_sent() {
        let (left, _right) = Socket::pair().unwrap();
        let long = Refusal::Device("x".repeat(MESSAGE_BYTES_MAX));
        let error = left.send(&long, &[]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let text = "ü".repeat(MESSAGE_BYTES_MAX);
        left.send(&Refusal::Device(short(text)), &[]).unwrap();
    }

    #[test]
    fn invalid_message_is_an_error_and_the_end_is_none() {
        let (left, right) = Socket::pair().unwrap();
        fd_passing::send(&left, b"ckpt-run: unknown verb", &[]).unwrap();
        assert!(right.receive::<Reply>().is_err());
        drop(left);
        assert!(right.receive::<Reply>().unwrap().is_none());
    }
}
