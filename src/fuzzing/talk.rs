//! A side of a conversation over a unix socket, made up by the fuzzer.
//!
//! ```text
//! 0 to 127      this many bytes follow and are sent
//! 128 to 254    one byte is sent, with 0 to 3 pipes that hold a few bytes (the number modulo 4)
//! 255           the action script of a dump calls
//! ```
//! Everything is sent before the other side listens, followed by the end of the stream, so no side waits forever.

use std::fs::File;
use std::io::{IoSlice, PipeReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use crate::criu::{Capture, ImagePipe, Serve};
use crate::sandbox;

/// Limit on the parts of one conversation. Parts of 127 bytes, with the kernel's overhead, fit the socket's buffer.
const PARTS_MAX: usize = 128;
/// Limit on the pipes in one conversation, far below the limit on descriptors.
const PIPES_MAX: usize = 32;

enum Part<'a> {
    Bytes(&'a [u8]),
    Pipes(usize),
    Call,
}

fn parse(mut input: &[u8]) -> Vec<Part<'_>> {
    let (mut all, mut pipes) = (Vec::new(), 0);
    while let Some((&first, rest)) = input.split_first() {
        input = rest;
        match first {
            0..128 => {
                let (bytes, rest) = input
                    .split_at_checked(usize::from(first))
                    .unwrap_or((input, &[]));
                input = rest;
                all.push(Part::Bytes(bytes));
            }
            128..255 => {
                let count = usize::from(first - 128) % 4;
                pipes += count;
                all.push(Part::Pipes(count));
            }
            255 => all.push(Part::Call),
        }
        if pipes > PIPES_MAX || all.len() >= PARTS_MAX {
            break;
        }
    }
    all
}

fn send(socket: &UnixStream, parts: &[Part<'_>]) {
    for part in parts {
        match part {
            Part::Bytes(bytes) => (&*socket).write_all(bytes).unwrap(),
            Part::Pipes(count) => send_pipes(socket, *count),
            Part::Call => {}
        }
    }
}

fn send_all(socket: &UnixStream, input: &[u8]) {
    send(socket, &parse(input));
    socket.shutdown(Shutdown::Write).unwrap();
}

fn send_pipes(socket: &UnixStream, count: usize) {
    let pipe = || {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"pages").unwrap();
        reader
    };
    let pipes: Vec<PipeReader> = (0..count).map(|_| pipe()).collect();
    let numbers: Vec<RawFd> = pipes.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights = if count == 0 { &[][..] } else { &rights[..] };
    let bytes = [IoSlice::new(&[0])];
    sendmsg::<()>(socket.as_raw_fd(), &bytes, rights, MsgFlags::empty(), None).unwrap();
}

/// Plays CRIU at a dump; returns true if a complete image was received. The parts after a call of the action script are
/// sent once the call is answered.
pub(super) fn dump(folder: &Path, input: &[u8]) -> bool {
    clear(
        folder,
        &[
            "streamer-capture.sock",
            "begin.sock",
            "frozen.sock",
            "hold.sock",
        ],
    );
    let capture = Capture::bind(folder).unwrap();
    let criu = UnixStream::connect(folder.join("streamer-capture.sock")).unwrap();
    let parts = parse(input);
    let call = parts.iter().position(|part| matches!(part, Part::Call));
    let call = call.filter(|call| are_whole_requests(&parts[..*call]));
    let (before, after) = parts.split_at(call.unwrap_or(parts.len()));
    send(&criu, before);
    let _begin = UnixStream::connect(folder.join("begin.sock")).unwrap();
    let _plugin = UnixStream::connect(folder.join("frozen.sock")).unwrap();
    let _script = call.map(|_| UnixStream::connect(folder.join("hold.sock")).unwrap());
    if call.is_none() {
        criu.shutdown(Shutdown::Write).unwrap();
    }
    let frozen = |_| {
        send(&criu, after);
        criu.shutdown(Shutdown::Write)
    };
    let (_call_off, called_off) = UnixStream::pair().unwrap();
    let received = AtomicU64::new(0);
    let receive = |_: &str, mut pipe: File| {
        let bytes = pipe.read_to_end(&mut Vec::new())? as u64;
        received.fetch_add(bytes, Ordering::Relaxed);
        Ok(bytes)
    };
    let captured = capture.run(&called_off, receive, || Ok(()), frozen);
    captured.is_ok_and(|captured| {
        assert_eq!(captured.bytes, received.into_inner());
        true
    })
}

/// Returns true if the requests are complete. The receiver of an incomplete request waits for the rest, and the fuzzer
/// would wait for the receiver.
fn are_whole_requests(parts: &[Part<'_>]) -> bool {
    let (pairs, rest) = parts.as_chunks::<2>();
    rest.is_empty()
        && pairs.iter().all(|[request, pipe]| {
            let len = match request {
                Part::Bytes(bytes) => bytes.split_first_chunk(),
                Part::Pipes(_) | Part::Call => None,
            };
            len.is_some_and(|(len, body)| u32::from_le_bytes(*len) as usize == body.len())
                && matches!(pipe, Part::Pipes(_))
        })
}

/// Plays CRIU at a restore; returns true if the conversation ended regularly.
pub(super) fn restore(folder: &Path, input: &[u8]) -> bool {
    clear(folder, &["streamer-serve.sock", "restored.sock"]);
    let serve = Serve::bind(folder).unwrap();
    let criu = UnixStream::connect(folder.join("streamer-serve.sock")).unwrap();
    send_all(&criu, input);
    criu.set_nonblocking(true).unwrap();
    let (_call_off, called_off) = UnixStream::pair().unwrap();
    let exists = |name: &str| {
        // Reads the earlier answers, so that they do not fill the socket.
        while (&criu).read(&mut [0; 64]).is_ok_and(|got| got > 0) {}
        name.len() % 4 != 1
    };
    let send = |_: &str, _: Result<&ImagePipe<'_>, std::io::Error>| ();
    serve.run(&called_off, exists, send, || ()).is_ok()
}

/// Plays the supervisor towards the sandbox; returns true if every request was understood.
pub(super) fn requests(input: &[u8]) -> bool {
    let (ours, theirs) = UnixStream::pair().unwrap();
    send_all(&ours, input);
    sandbox::fuzz_sandbox::requests(&theirs)
}

/// Plays the sandbox towards the supervisor; returns true if every event was understood.
pub(super) fn events(input: &[u8]) -> bool {
    let (ours, theirs) = UnixStream::pair().unwrap();
    send_all(&ours, input);
    sandbox::fuzz_sandbox::events(&theirs)
}

fn clear(folder: &Path, names: &[&str]) {
    for name in names {
        // The first time, the file does not exist.
        let _ = std::fs::remove_file(folder.join(name));
    }
}
