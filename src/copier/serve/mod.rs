//! Main program of the copier.
//!
//! ```text
//! stdin (socket) ─▶ control: requests in order ─▶ gpus: contexts, reserved memory
//!                      │ starts                                │
//!                   lane threads ◀──────── segments ◀──────────┘  places of memory; shared by all threads
//! ```
//! All numbers are checked. A request that names something unknown is refused, and the next request is served.

mod control;
mod gpus;
mod lane;
mod segments;

use std::os::fd::AsFd;
use std::process::ExitCode;

use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{SockType, getsockopt, sockopt};
use nix::unistd::Pid;

use super::wire::{Refusal, Socket, short};
use crate::cuda::device::DeviceError;

/// Returns true if the standard input is a socket from a [`super::Copier`].
#[must_use]
pub fn started_as_one() -> bool {
    getsockopt(&std::io::stdin(), sockopt::SockType) == Ok(SockType::SeqPacket)
}

/// Serves the socket on the standard input until its end.
#[must_use]
pub fn main() -> ExitCode {
    // If the parent exits before this call, the socket is closed, which ends the process, too.
    let dies = prctl::set_pdeathsig(Signal::SIGKILL);
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    if let (Ok(()), Ok(socket)) = (dies, socket) {
        control::serve(&Socket::from(socket));
    }
    // Not by `exit`: the driver's exit handlers wait for calls in which lanes may be.
    let _ = kill(Pid::this(), Signal::SIGKILL);
    ExitCode::FAILURE
}

impl From<DeviceError> for Refusal {
    fn from(error: DeviceError) -> Self {
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(next) = cause {
            text = format!("{text}: {next}");
            cause = next.source();
        }
        let text = short(text);
        if error.is_out_of_memory() {
            Self::OutOfMemory(text)
        } else {
            Self::Device(text)
        }
    }
}
