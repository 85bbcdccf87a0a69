#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Completion of system calls that a dump cuts short.
//!
//! A stop ends a call that has to wait in its course (`write` of more than a pipe has room for, `sendfile`, `recv` with
//! `MSG_WAITALL`): it returns what it has moved. Without signals, programs do not expect that. Therefore the thread
//! continues in code of the plugin, which moves the rest and returns the sum:
//!
//! ```text
//! page   memory of the process that only this code is in, for all its threads and snapshots:
//!            syscall, with the rest as arguments
//!            result = MOVED, and more if that is not an error
//!            gives the registers and flags back, returns to the program
//! frame  MOVED, rdi, rsi, rdx, r10, rip, rsp of the program: below the thread's stack and the 128 bytes that the program
//!        may use there
//! ```
//! A stop of such a call adds to the frame. The image has both, so a restored thread continues in the same way. While it is
//! in the page, its stack cannot be unwound.

use core::ffi::{c_int, c_long};

use super::call_dispatch::Dispatch;
use super::inode::{Inode, Links};
use super::interrupted::{Call, calls};
use super::kernel::{SO_TYPE, close, socket_option};
use super::listing::{for_each_line, with_file};
use super::mapping::range;
use super::remote_calls::Remote;
use super::system_call::{AT_FDCWD, system_call};
use super::text::Text;
use super::tracing::{
    R10, RAX, RDI, RDX, RIP, RSI, RSP, Registers, SYSCALL_BYTES, below_stack, peek, poke, poke_all,
};

/// Arguments for the rest of a call.
pub type Rest = [u64; 6];

/// Most bytes that a call moves.
const BYTES_MAX: u64 = 0x7fff_f000;
/// Most messages that `recvmmsg` and `sendmmsg` move, and the bytes of a message's description.
const MESSAGES_MAX: u64 = 1024;
const MESSAGE: u64 = 64;
/// Bytes of an event of `io_getevents`.
const EVENT: u64 = 32;

/// Returns the arguments for the rest of a call that has moved a part; `None` for one that is complete, or that may return
/// a part at any time.
pub fn rest(call: &Call, pid: c_int) -> Option<Rest> {
    let [first, _, third, fourth, fifth, _] = call.arguments;
    let moved = call.result.cast_unsigned();
    let mut rest = call.arguments;
    // The argument with the number of units and its limit; that with their place, and the bytes of one.
    let (count, most, place, size) = match call.number {
        calls::SENDTO => (2, BYTES_MAX, 1, 1),
        calls::WRITE if file(pid, first).is_some_and(|file| is_stream_like(&file)) => {
            (2, BYTES_MAX, 1, 1)
        }
        calls::READ if is_endless(pid, first) => (2, BYTES_MAX, 1, 1),
        calls::RECVFROM if fourth & RECEIVE == MSG_WAITALL && is_stream(pid, first) => {
            (2, BYTES_MAX, 1, 1)
        }
        calls::GETRANDOM => (1, BYTES_MAX, 0, 1),
        // The kernel has moved the offset on. Into a pipe it moves as much as there is room for.
        calls::SENDFILE if !file(pid, first).is_none_or(|file| file.is_pipe()) => {
            (3, BYTES_MAX, 3, 0)
        }
        calls::RECVMMSG if fourth & MSG_WAITFORONE == 0 && fifth == 0 => {
            (2, MESSAGES_MAX, 1, MESSAGE)
        }
        calls::SENDMMSG => (2, MESSAGES_MAX, 1, MESSAGE),
        calls::IO_GETEVENTS if fifth == 0 => {
            rest[2] = third.checked_sub(moved)?;
            (1, BYTES_MAX, 3, EVENT)
        }
        _ => return None,
    };
    let wanted = call.arguments[count].min(most);
    rest[count] = wanted.checked_sub(moved).filter(|left| *left > 0)?;
    rest[place] = rest[place].checked_add(moved.checked_mul(size)?)?;
    Some(rest)
}

/// Changes the registers of a thread, as they are after a part, so that it makes the call for the rest when the kernel
/// restarts it.
pub fn prepare(thread: c_int, registers: &mut Registers, rest: Rest) -> Option<()> {
    if is_in_page(thread, registers[RIP]) {
        let frame = registers[RSP];
        let moved = peek(thread, frame)?.checked_add(registers[RAX])?;
        poke(thread, frame, moved).then_some(())?;
    } else {
        // A dispatch takes calls from unknown code.
        if Dispatch::of(thread).is_some_and(|dispatch| dispatch.is_on()) {
            return None;
        }
        let frame = below_stack(registers, FRAME_BYTES)?;
        let words = [RAX, RDI, RSI, RDX, R10, RIP, RSP].map(|place| registers[place]);
        poke_all(thread, frame, &words)?;
        registers[RIP] = page(thread)? + SYSCALL_BYTES;
        registers[RSP] = frame;
    }
    [
        registers[RDI],
        registers[RSI],
        registers[RDX],
        registers[R10],
        ..,
    ] = rest;
    Some(())
}

/// The code of the page.
const CODE: [u8; 56] = [
    0x0f, 0x05, // syscall
    0x48, 0x85, 0xc0, // test rax, rax
    0x78, 0x06, // js to the second of these:
    0x48, 0x03, 0x04, 0x24, 0xeb, 0x04, // add rax, [rsp]; jmp behind the next
    0x48, 0x8b, 0x04, 0x24, // mov rax, [rsp]
    0x48, 0x8b, 0x7c, 0x24, 8, // mov rdi, [rsp + 8]
    0x48, 0x8b, 0x74, 0x24, 16, // mov rsi, [rsp + 16]
    0x48, 0x8b, 0x54, 0x24, 24, // mov rdx, [rsp + 24]
    0x4c, 0x8b, 0x54, 0x24, 32, // mov r10, [rsp + 32]
    0x48, 0x8b, 0x4c, 0x24,
    40, // mov rcx, [rsp + 40]: where a call leaves the program's address
    0x41, 0x53, 0x9d, // push r11; popfq: where a call leaves the flags
    0x48, 0x8b, 0x64, 0x24, 48, // mov rsp, [rsp + 48]
    0xff, 0xe1, // jmp rcx
    0xcc, 0xcc, 0xcc, 0xcc,
];
const FRAME_BYTES: u64 = 64;
const PAGE_BYTES: u64 = 4096;

/// Returns the page of a thread's process, which has one afterwards.
fn page(thread: c_int) -> Option<u64> {
    let mut found = None;
    let find = |file| {
        for_each_line(file, |line| {
            let mut words = line.split(|byte| *byte == b' ');
            let begin = words.next().and_then(range).map(|(begin, _)| begin);
            let is_code = words.next() == Some(b"r-xp");
            found = begin.filter(|begin| is_code && has_code(thread, *begin));
            found.is_none()
        })
    };
    with_file(thread, b"/maps", 0, find)?;
    if found.is_some() {
        return found;
    }
    let mut remote = Remote::begin(thread)?;
    let made = remote.call(SYS_MMAP, [0, PAGE_BYTES, READ_EXECUTE, PRIVATE_ANONYMOUS])?;
    drop(remote);
    let made = u64::try_from(made).ok()?;
    let (words, _) = CODE.as_chunks();
    let mut code = [0; CODE.len() / 8];
    for (word, bytes) in code.iter_mut().zip(words) {
        *word = u64::from_le_bytes(*bytes);
    }
    poke_all(thread, made, &code)?;
    Some(made)
}

/// Returns true if a thread is behind the call of the page.
fn is_in_page(thread: c_int, at: u64) -> bool {
    let begin = at.checked_sub(SYSCALL_BYTES);
    begin.is_some_and(|begin| begin % PAGE_BYTES == 0 && has_code(thread, begin))
}

fn has_code(thread: c_int, begin: u64) -> bool {
    let (words, _) = CODE.as_chunks();
    let mut places = (begin..).step_by(8).zip(words);
    places.all(|(place, word)| peek(thread, place) == Some(u64::from_le_bytes(*word)))
}

/// Returns true for a device that always has more to read: `/dev/zero`, `full`, `random`, `urandom`.
fn is_endless(pid: c_int, descriptor: u64) -> bool {
    let device = file(pid, descriptor).and_then(|file| file.character_device());
    matches!(device, Some((MEMORY, 5 | 7 | 8 | 9)))
}

/// Returns true for pipes, sockets and terminals, which take a part of a `write` when there is room, and the rest later.
fn is_stream_like(file: &Inode) -> bool {
    let is_terminal = |(major, _): (u32, u32)| TERMINALS.contains(&major);
    file.is_pipe() || file.is_socket() || file.character_device().is_some_and(is_terminal)
}

fn file(pid: c_int, descriptor: u64) -> Option<Inode> {
    let mut path = Text::new();
    path.push(b"/proc/");
    path.push_number(pid);
    path.push(b"/fd/");
    path.push_number(u32::try_from(descriptor).ok()?);
    Inode::of_path(AT_FDCWD, path.as_c(), Links::Followed)
}

/// Returns true for a socket without boundaries of messages.
fn is_stream(pid: c_int, descriptor: u64) -> bool {
    ask_socket(pid, descriptor, SO_TYPE) == [SOCK_STREAM, 0]
}

/// Returns the longer time limit of a socket in nanoseconds; 0 if it has none, and for other files.
pub fn time_limit(pid: c_int, descriptor: u64) -> u64 {
    let limit = |option| {
        let [seconds, microseconds] = ask_socket(pid, descriptor, option);
        let whole = seconds.saturating_mul(1_000_000_000);
        whole.saturating_add(microseconds.saturating_mul(1000))
    };
    limit(SO_RCVTIMEO).max(limit(SO_SNDTIMEO))
}

/// Returns the value of an option; zeros for other files than sockets.
fn ask_socket(pid: c_int, descriptor: u64, option: c_long) -> [u64; 2] {
    // SAFETY: takes numbers only; so do the following ones.
    unsafe {
        let process = system_call(PIDFD_OPEN, [pid.into(), 0, 0, 0, 0, 0]);
        let number = descriptor.cast_signed() as c_long;
        let socket = system_call(PIDFD_GETFD, [process, number, 0, 0, 0, 0]);
        let value = socket_option(socket, option);
        for file in [process, socket] {
            if let Ok(file) = c_int::try_from(file)
                && file >= 0
            {
                close(file);
            }
        }
        value
    }
}

/// Flags by which a call takes bytes from a stream in a way of its own: `MSG_OOB`, `MSG_PEEK`, `MSG_ERRQUEUE`.
const SPECIAL: u64 = 1 | 2 | 0x2000;
const MSG_WAITALL: u64 = 0x100;
const RECEIVE: u64 = SPECIAL | MSG_WAITALL;
const MSG_WAITFORONE: u64 = 0x1_0000;
/// Major numbers of terminals that programs create (`/dev/pts`).
const TERMINALS: core::ops::RangeInclusive<u32> = 136..=143;
/// Major number of the devices of `drivers/char/mem.c`.
const MEMORY: u32 = 1;
const SYS_MMAP: u64 = 9;
/// `PROT_READ | PROT_EXEC`.
const READ_EXECUTE: u64 = 1 | 4;
/// `MAP_PRIVATE | MAP_ANONYMOUS`.
const PRIVATE_ANONYMOUS: u64 = 2 | 0x20;
const PIDFD_OPEN: c_long = 434;
const PIDFD_GETFD: c_long = 438;
const SO_RCVTIMEO: c_long = 20;
const SO_SNDTIMEO: c_long = 21;
const SOCK_STREAM: u64 = 1;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::UdpSocket;
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn rest_of(number: i64, arguments: [u64; 6], result: i64) -> Option<Rest> {
        let call = Call {
            number,
            arguments,
            result,
        };
        rest(&call, nix::unistd::getpid().as_raw())
    }

    fn number(file: BorrowedFd<'_>) -> u64 {
        u64::try_from(file.as_raw_fd()).unwrap()
    }

    #[test]
    fn the_rest_of_a_call_begins_behind_its_part() {
        let (_reader, pipe) = nix::unistd::pipe().unwrap();
        let pipe = number(pipe.as_fd());
        let to_pipe = [pipe, 0x1000, 100, 7, 8, 9];
        assert_eq!(
            rest_of(calls::WRITE, to_pipe, 40),
            Some([pipe, 0x1028, 60, 7, 8, 9])
        );
        assert_eq!(rest_of(calls::WRITE, to_pipe, 100), None);
        assert_eq!(rest_of(calls::WRITE, to_pipe, 101), None);
        let write = [3, 0x1000, 100, 7, 8, 9];
        assert_eq!(
            rest_of(calls::SENDTO, write, 1),
            Some([3, 0x1001, 99, 7, 8, 9])
        );
        // More than a call moves.
        let large = [pipe, 0, 1 << 40, 0, 0, 0];
        assert_eq!(rest_of(calls::WRITE, large, 0x7fff_f000), None);
        let random = rest_of(calls::GETRANDOM, [0x1000, 600, 0, 0, 0, 0], 256);
        assert_eq!(random, Some([0x1100, 344, 0, 0, 0, 0]));
        let events = [5, 3, 8, 0x1000, 0, 0];
        let later = Some([5, 1, 6, 0x1040, 0, 0]);
        assert_eq!(rest_of(calls::IO_GETEVENTS, events, 2), later);
        assert_eq!(
            rest_of(calls::IO_GETEVENTS, [5, 3, 8, 0, 1, 0], 2),
            None,
            "with a time limit"
        );
        let messages = [3, 0x1000, 5000, 0, 0, 0];
        assert_eq!(
            rest_of(calls::SENDMMSG, messages, 2),
            Some([3, 0x1080, 1022, 0, 0, 0])
        );
        let for_one = [3, 0, 9, MSG_WAITFORONE, 0, 0];
        assert_eq!(rest_of(calls::RECVMMSG, for_one, 2), None);
        assert_eq!(rest_of(calls::READV, write, 40), None);
    }

    #[test]
    fn calls_that_may_return_a_part_are_left_alone() {
        let (stream, _other) = UnixStream::pair().unwrap();
        let datagrams = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let zero = File::open("/dev/zero").unwrap();
        let null = File::open("/dev/null").unwrap();
        let (pipe, _writer) = nix::unistd::pipe().unwrap();
        let received = |file: BorrowedFd<'_>, flags| {
            rest_of(calls::RECVFROM, [number(file), 0, 9, flags, 0, 0], 4).is_some()
        };
        assert!(received(stream.as_fd(), MSG_WAITALL));
        assert!(!received(stream.as_fd(), 0));
        assert!(!received(stream.as_fd(), MSG_WAITALL | 2));
        assert!(!received(datagrams.as_fd(), MSG_WAITALL));
        let read =
            |file: BorrowedFd<'_>| rest_of(calls::READ, [number(file), 0, 9, 0, 0, 0], 4).is_some();
        assert!(read(zero.as_fd()));
        assert!(!read(null.as_fd()) && !read(stream.as_fd()) && !read(pipe.as_fd()));
        let regular = tempfile::tempfile().unwrap();
        let written =
            |to: BorrowedFd<'_>| rest_of(calls::WRITE, [number(to), 0, 9, 0, 0, 0], 4).is_some();
        assert!(written(stream.as_fd()) && !written(regular.as_fd()) && !written(null.as_fd()));
        let sent = |to: BorrowedFd<'_>| rest_of(calls::SENDFILE, [number(to), 3, 0, 9, 0, 0], 4);
        assert_eq!(
            sent(stream.as_fd()),
            Some([number(stream.as_fd()), 3, 0, 5, 0, 0])
        );
        assert_eq!(sent(pipe.as_fd()), None);
    }
}
