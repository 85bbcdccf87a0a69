//! Waiting at descriptors that others share with us and may have set not to wait.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Writes all of it, however slowly it is taken.
pub(super) fn write_out(mut sink: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match sink.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_until(sink, PollFlags::POLLOUT);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until a descriptor is ready, or a signal comes.
pub(super) fn wait_until(descriptor: &File, ready: PollFlags) {
    let mut watched = [PollFd::new(descriptor.as_fd(), ready)];
    let _ = poll(&mut watched, PollTimeout::NONE);
}
