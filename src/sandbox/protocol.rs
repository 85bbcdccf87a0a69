//! Protocol between supervisor and sandbox: length-prefixed JSON over a stream socket. File descriptors accompany the
//! first byte of a message.
//!
//! Both ends are the same binary, so the format has no version.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::callers_signals::CallersSignals;
use super::clocks::Clocks;
use super::seccomp::Hidden;
use crate::checked;
use crate::fd_passing;
use crate::network_socket::NetworkSocket;

/// Limit on the size of a message. A command line may have 2 MiB (`ARG_MAX`), which JSON expands several times.
const MESSAGE_BYTES_MAX: u32 = 32 << 20;
/// Limit on the descriptors of a message. The job needs three.
const DESCRIPTORS_MAX: usize = 8;

/// Request from the supervisor to pid 1.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Start the job. Descriptors: its stdin, stdout, stderr.
    Start {
        program: OsString,
        arguments: Vec<OsString>,
        hidden: Hidden,
        signals: CallersSignals,
        user: Option<Credentials>,
    },
    /// Run a tool. Descriptors: those that it inherits, from `first_descriptor` on.
    Run(ToolCommand),
    /// Run a watcher beside the job. It exists as long as the sandbox, and exits last. Descriptors as for a tool. If it
    /// is killed while the job survives, pid 1 writes `obituary` into the first of them.
    Watch {
        tool: ToolCommand,
        obituary: Vec<u8>,
    },
    /// End everything once one of the descriptors, which are timers, has expired.
    EndAt,
    /// End everything: first the job and the tools, then the watcher and the network.
    End,
    /// Send a signal to the job's process group, or to all of its processes.
    Signal { signal: i32, everyone: bool },
    /// Kill the running tools.
    KillTools,
    /// Create a socket in the sandbox's network namespace.
    Socket(NetworkSocket),
    /// Open the folder with the names of the job's POSIX message queues.
    MessageQueues,
}

/// A program to run inside the sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ToolCommand {
    /// Program and arguments.
    pub argv: Vec<OsString>,
    /// Complete environment of the tool.
    pub environment: Vec<(OsString, OsString)>,
    /// Number of the first inherited descriptor in the tool. The others follow.
    pub first_descriptor: RawFd,
    /// The job that the tool restores. If the tool succeeds, it is the sandbox's job.
    pub restores: Option<JobPids>,
    /// Features that the tool and its descendants do not see.
    pub hidden: Hidden,
    /// True if the tool gets an IPC namespace of its own, as the job's first process does.
    pub own_ipc: bool,
    /// Offsets of the clocks of the tool, of its descendants and of all later processes of the sandbox; `None` leaves the
    /// clocks as they are. If the kernel refuses that, the tool runs without it.
    pub clock_offsets: Option<Clocks>,
}

/// Ids of the job's user, if it differs from the supervisor's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// User id.
    pub user: u32,
    /// Primary group.
    pub group: u32,
    /// All groups.
    pub groups: Vec<u32>,
}

/// The job's processes as seen by pid 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobPids {
    /// First process of the tree.
    #[serde(deserialize_with = "checked::pid")]
    pub root: i32,
    /// The job's own first process, leader of its session and process group.
    #[serde(deserialize_with = "checked::pid")]
    pub job: i32,
}

/// Event from pid 1 to the supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The sandbox is ready.
    Ready,
    /// The job's program could not be executed, with the error number.
    NotStarted(i32),
    /// The sandbox or a tool could not be set up.
    Failed {
        /// The operation.
        operation: String,
        /// The system's error number.
        errno: i32,
    },
    /// The job is running.
    Started(JobPids),
    /// A tool has exited.
    ToolEnded(Ended),
    /// The requested socket or folder, as the descriptor of the message, or the system's error number.
    Opened(Option<i32>),
    /// The job's root process has exited.
    JobEnded(Ended),
}

/// End of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// The process exited with this code.
    Exited(i32),
    /// This signal killed it.
    Signaled(i32),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Signaled(signal) => write!(f, "signal {signal}"),
        }
    }
}

/// Writes one message with its descriptors.
pub(super) fn send(
    socket: &UnixStream,
    message: &impl Serialize,
    descriptors: &[RawFd],
) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len())
        .ok()
        .filter(|length| *length <= MESSAGE_BYTES_MAX)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "message too long"))?;
    // By one call, as far as it fits: pid 1 would wait for the rest of a message whose sender is stopped.
    let message = [&length.to_le_bytes()[..], &body].concat();
    let sent = fd_passing::send(socket, &message, descriptors)?;
    io::Write::write_all(&mut &*socket, &message[sent..])
}

/// Reads one message and its descriptors; `None` at the end of the connection.
pub(super) fn receive<T: DeserializeOwned>(
    socket: &UnixStream,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut head = [0u8; 4];
    let (got, descriptors) = fd_passing::receive::<DESCRIPTORS_MAX>(socket, &mut head)?;
    if got == 0 {
        return Ok(None);
    }
    (&*socket).read_exact(&mut head[got..])?;
    let length = u32::from_le_bytes(head);
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "message too long",
        ));
    }
    // The buffer grows with the received data, not with the announced length.
    let mut body = Vec::new();
    socket.take(length.into()).read_to_end(&mut body)?;
    if body.len() < length as usize {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some((serde_json::from_slice(&body)?, descriptors)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use nix::fcntl::OFlag;

    use super::*;

    #[test]
    fn a_message_keeps_its_content_and_its_descriptors() {
        let (left, right) = UnixStream::pair().unwrap();
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap();
        let request = Request::Signal {
            signal: 15,
            everyone: true,
        };
        send(&left, &request, &[writer.as_raw_fd()]).unwrap();
        drop(writer);
        let (received, descriptors) = receive::<Request>(&right).unwrap().unwrap();
        assert!(matches!(
            received,
            Request::Signal {
                signal: 15,
                everyone: true
            }
        ));
        nix::unistd::write(&descriptors[0], b"x").unwrap();
        drop(descriptors);
        let mut text = String::new();
        std::fs::File::from(reader)
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn an_oversized_length_is_refused_before_allocation() {
        let (left, right) = UnixStream::pair().unwrap();
        io::Write::write_all(&mut &left, &u32::MAX.to_le_bytes()).unwrap();
        assert_eq!(
            receive::<Event>(&right).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn the_end_of_the_connection_is_not_a_message() {
        let (left, right) = UnixStream::pair().unwrap();
        drop(left);
        assert!(receive::<Event>(&right).unwrap().is_none());
    }
}
