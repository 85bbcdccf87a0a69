//! Messages of CRIU's image stream: a length (little-endian `u32`), then protobuf. Pipes are passed separately with one
//! dummy byte.

use std::fs::File;
use std::io::{self, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use prost::Message;

/// Limit on the size of a request, which contains the name of an image file.
const REQUEST_BYTES_MAX: u32 = 4096;
/// Size of the pipes of large image files, the most that an unprivileged process may request. The default of 64 KiB is
/// slower by a factor of 5 to 10.
const PIPE_BYTES: i32 = 1 << 20;
/// Beginnings of the names of large image files. About 40 small ones are open at once, and a user's pipes may have 64 MiB
/// in all (`fs.pipe-user-pages-soft`), beyond which CRIU cannot read a job's pipes.
const LARGE: [&str; 2] = [MEMORY_FILES, "ghost-file-"];
/// Beginning of the names of image files with memory, which CRIU reads to their ends.
pub const MEMORY_FILES: &str = "pages-";

/// Descriptors that the kernel passes with one message (`SCM_MAX_FD`). One is expected. If the buffer had room for
/// fewer than were sent, the received ones would stay open unnoticed.
const DESCRIPTORS_MAX: usize = 253;

/// CRIU's `img_streamer_request_entry`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct FileRequest {
    #[prost(string, required, tag = "1")]
    pub filename: String,
}

/// CRIU's `img_streamer_reply_entry`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct FileReply {
    #[prost(bool, required, tag = "1")]
    pub exists: bool,
}

/// Reads the name of the next image file; `None` at the end of the stream.
pub(super) fn read_request(mut connection: &UnixStream) -> io::Result<Option<String>> {
    let mut head = [0; 4];
    let got = connection.read(&mut head)?;
    if got == 0 {
        return Ok(None);
    }
    connection.read_exact(&mut head[got..])?;
    let length = u32::from_le_bytes(head);
    if length > REQUEST_BYTES_MAX {
        return Err(invalid("image stream request too long"));
    }
    let mut body = vec![0; length as usize];
    connection.read_exact(&mut body)?;
    let request =
        FileRequest::decode(body.as_slice()).map_err(|error| invalid(&error.to_string()))?;
    Ok(Some(request.filename))
}

/// Reports to CRIU if the image file exists.
pub(super) fn write_reply(mut connection: &UnixStream, exists: bool) -> io::Result<()> {
    let body = FileReply { exists }.encode_to_vec();
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    connection.write_all(&[&length.to_le_bytes(), body.as_slice()].concat())
}

/// Receives the pipe of the image file with this name, and enlarges that of a large one.
pub(super) fn receive_pipe(connection: &UnixStream, name: &str) -> io::Result<File> {
    let mut dummy = [0; 1];
    let mut space = nix::cmsg_space!([RawFd; DESCRIPTORS_MAX]);
    let mut parts = [IoSliceMut::new(&mut dummy)];
    let message = recvmsg::<()>(
        connection.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let mut received = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = control {
            received.extend(numbers.into_iter().map(own));
        }
    }
    let mut received = received.into_iter();
    let pipe = received
        .next()
        .map(File::from)
        .ok_or_else(|| invalid("image stream request without a pipe"))?;
    if LARGE.iter().any(|large| name.starts_with(large)) {
        // A smaller pipe works too, but is slower.
        let _ = fcntl(&pipe, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
    }
    Ok(pipe)
}

#[allow(
    unsafe_code,
    reason = "a received descriptor is a raw number until owned"
)]
fn own(number: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just installed this descriptor for this process; it has no other owner.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Waits until one of `watched` is readable or closed. Returns a flag for each.
pub(super) fn wait_readable<const N: usize>(
    watched: [&dyn AsFd; N],
    limit: PollTimeout,
) -> io::Result<[bool; N]> {
    let mut polled = watched.map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN));
    loop {
        match poll(&mut polled, limit) {
            Ok(_) => return Ok(polled.map(|one| one.any().unwrap_or(true))),
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, PipeWriter};

    use nix::sys::socket::{ControlMessage, sendmsg};

    use super::*;

    #[test]
    fn only_pipes_of_large_files_are_enlarged() {
        for (name, is_large) in [
            ("core-1.img", false),
            ("pagemap-1.img", false),
            ("pages-1.img", true),
            ("ghost-file-3.img", true),
        ] {
            let (criu, ours) = UnixStream::pair().unwrap();
            let (reader, _writer) = io::pipe().unwrap();
            let before = fcntl(&reader, FcntlArg::F_GETPIPE_SZ).unwrap();
            let rights = [reader.as_raw_fd()];
            let rights = [ControlMessage::ScmRights(&rights)];
            let bytes = [IoSlice::new(&[0])];
            sendmsg::<()>(criu.as_raw_fd(), &bytes, &rights, MsgFlags::empty(), None).unwrap();
            let pipe = receive_pipe(&ours, name).unwrap();
            let after = fcntl(&pipe, FcntlArg::F_GETPIPE_SZ).unwrap();
            assert_eq!(after > before, is_large, "{name}");
        }
    }

    #[test]
    fn of_several_descriptors_only_the_first_stays_open() {
        let (criu, ours) = UnixStream::pair().unwrap();
        let (readers, writers): (Vec<_>, Vec<PipeWriter>) =
            (0..3).map(|_| io::pipe().unwrap()).unzip();
        let numbers: Vec<RawFd> = readers.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&numbers)];
        let bytes = [IoSlice::new(&[0])];
        sendmsg::<()>(criu.as_raw_fd(), &bytes, &rights, MsgFlags::empty(), None).unwrap();
        drop(readers);
        let _first = receive_pipe(&ours, "core-1.img").unwrap();
        // A child of another test may have copies of all of them for a moment.
        for writer in &writers[1..] {
            let limit = PollTimeout::try_from(60_000).unwrap();
            let mut polled = [PollFd::new(writer.as_fd(), PollFlags::empty())];
            assert_eq!(poll(&mut polled, limit), Ok(1), "no reader is left");
        }
        assert!((&writers[0]).write(b"x").is_ok());
    }
}
