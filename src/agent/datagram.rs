//! Datagrams with descriptors and the sender's credentials over a Unix socket.
//!
//! Received descriptors are closed with the datagram unless they are taken out.

use core::ffi::c_int;
use core::mem::{self, MaybeUninit};
use core::ptr;

use super::sys::{self, Address, ControlHead, Credentials, Limit, Message, Piece};
use super::wire::{BATCH_MAX, NAME_PREFIX, Reply, Request, Segment};

/// Lowest descriptor number for the agent: high enough to stay clear of a job that closes or duplicates low numbers,
/// and low enough to keep the kernel's descriptor table small, which extends to the highest number.
const NUMBER_MAX: u64 = 16_384;
/// Maximum number of attempts, 1 ms apart, to send descriptors while the user has too many in flight (without
/// privileges: the limit on open files).
const TRIES_MAX: u32 = 5_000;
/// Words of control data: `SCM_RIGHTS` for a batch and `SCM_CREDENTIALS`, each with its header.
const CONTROL_WORDS: usize = 2 + BATCH_MAX / 2 + 2 + 2;

/// Maximum length of a datagram: a reply with a segment.
const SHARED_LEN: usize = size_of::<Reply>() + size_of::<Segment>();
/// Placeholder for a missing segment.
pub const NO_SEGMENT: Segment = Segment {
    address: 0,
    len: 0,
    device: [0; 16],
};

/// Address of a socket.
#[derive(Clone, Copy)]
pub struct Peer {
    pub address: Address,
    pub len: u32,
}

/// Received datagram.
pub struct Incoming {
    bytes: [u8; SHARED_LEN],
    /// Number of bytes; 0 if the datagram was too long.
    len: usize,
    pub from: Peer,
    pub sender: Option<Credentials>,
    descriptors: [c_int; BATCH_MAX],
    count: usize,
    /// True if descriptors were lost because no numbers were free.
    pub is_cut: bool,
}

impl Incoming {
    /// Returns the request if the datagram has its length.
    pub fn request(&self) -> Option<Request> {
        // SAFETY: plain numbers of this length, of any value.
        (self.len == size_of::<Request>())
            .then(|| unsafe { ptr::read_unaligned(self.bytes.as_ptr().cast()) })
    }

    /// Returns a reply with a segment if the datagram has that length.
    pub fn shared(&self) -> Option<(Reply, Segment)> {
        if self.len != SHARED_LEN {
            return self.answer().map(|reply| (reply, NO_SEGMENT));
        }
        let segment = self.bytes.as_ptr().wrapping_add(size_of::<Reply>());
        // SAFETY: plain numbers of these lengths, of any value.
        Some(unsafe {
            (
                ptr::read_unaligned(self.bytes.as_ptr().cast()),
                ptr::read_unaligned(segment.cast()),
            )
        })
    }

    fn answer(&self) -> Option<Reply> {
        // SAFETY: plain numbers of this length, of any value.
        (self.len == size_of::<Reply>())
            .then(|| unsafe { ptr::read_unaligned(self.bytes.as_ptr().cast()) })
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes out the descriptor at an index; the caller owns it. Returns -1 if there is none.
    pub fn take(&mut self, index: usize) -> c_int {
        self.descriptors
            .get_mut(index)
            .map_or(-1, |descriptor| mem::replace(descriptor, -1))
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        for descriptor in self.descriptors {
            if descriptor >= 0 {
                // SAFETY: received and not taken out.
                unsafe { sys::close(descriptor) };
            }
        }
    }
}

/// Reply with up to a batch of segments, which have a descriptor each or none.
pub struct Outgoing {
    pub reply: Reply,
    pub segments: [Segment; BATCH_MAX],
    pub descriptors: [c_int; BATCH_MAX],
}

/// Waits for a datagram. Returns the error number on failure.
pub fn receive(socket: c_int) -> Result<Incoming, c_int> {
    let mut incoming = Incoming {
        bytes: [0; SHARED_LEN],
        len: 0,
        from: Peer {
            address: Address {
                family: 0,
                path: [0; 108],
            },
            len: 0,
        },
        sender: None,
        descriptors: [-1; BATCH_MAX],
        count: 0,
        is_cut: false,
    };
    let mut piece = Piece {
        start: incoming.bytes.as_mut_ptr().cast(),
        len: incoming.bytes.len(),
    };
    let mut control = [0u64; CONTROL_WORDS];
    let mut message = Message {
        name: (&raw mut incoming.from.address).cast(),
        name_len: sys::ADDRESS_LEN,
        pieces: &raw mut piece,
        pieces_len: 1,
        control: control.as_mut_ptr().cast(),
        control_len: size_of_val(&control),
        flags: 0,
    };
    // SAFETY: all buffers of the message have the given lengths.
    let len = unsafe { sys::recvmsg(socket, &raw mut message, sys::MSG_CMSG_CLOEXEC) };
    if len < 0 {
        return Err(sys::errno());
    }
    incoming.from.len = message.name_len;
    incoming.is_cut = message.flags & sys::MSG_CTRUNC != 0;
    if message.flags & sys::MSG_TRUNC == 0 {
        incoming.len = usize::try_from(len).unwrap_or(0);
    }
    let used = message.control_len / 8;
    read_control(control.get(..used).unwrap_or(&control), &mut incoming);
    Ok(incoming)
}

/// Extracts descriptors and credentials from the control data of a datagram.
fn read_control(mut words: &[u64], incoming: &mut Incoming) {
    const HEAD: usize = size_of::<ControlHead>();
    while words.len() * 8 >= HEAD {
        // SAFETY: there is a complete header.
        let head = unsafe { *words.as_ptr().cast::<ControlHead>() };
        let Some(len) = head.len.checked_sub(HEAD) else {
            return;
        };
        let body = &words[HEAD / 8..];
        let len = len.min(size_of_val(body));
        if head.level == sys::SOL_SOCKET && head.kind == sys::SCM_RIGHTS {
            for index in 0..len / 4 {
                // SAFETY: within the body.
                let number = unsafe { *body.as_ptr().cast::<c_int>().add(index) };
                if let Some(place) = incoming.descriptors.get_mut(incoming.count) {
                    *place = number;
                    incoming.count += 1;
                } else {
                    // SAFETY: received with this datagram.
                    unsafe { sys::close(number) };
                }
            }
        }
        if head.level == sys::SOL_SOCKET
            && head.kind == sys::SCM_CREDENTIALS
            && len >= size_of::<Credentials>()
        {
            // SAFETY: within the body.
            incoming.sender = Some(unsafe { *body.as_ptr().cast() });
        }
        words = body.get(len.div_ceil(8)..).unwrap_or(&[]);
    }
}

/// Sends a reply; returns true on success.
pub fn send(socket: c_int, to: &Peer, answer: &Outgoing) -> bool {
    let count = (answer.reply.count as usize).min(BATCH_MAX);
    let mut pieces = [
        Piece::of(&answer.reply),
        Piece {
            start: answer.segments.as_ptr().cast_mut().cast(),
            len: count * size_of::<Segment>(),
        },
    ];
    let given = answer.descriptors.iter().take(count);
    let given = given.take_while(|descriptor| **descriptor >= 0).count();
    send_pieces(socket, to, &mut pieces, &answer.descriptors[..given])
}

/// Sends a request; returns true on success.
pub fn send_request(socket: c_int, to: &Peer, request: &Request) -> bool {
    send_pieces(socket, to, &mut [Piece::of(request)], &[])
}

/// Sends a message. The pieces are only read, and there are at most as many descriptors as in a batch.
fn send_pieces(socket: c_int, to: &Peer, pieces: &mut [Piece], descriptors: &[c_int]) -> bool {
    let count = descriptors.len();
    let mut control = MaybeUninit::<[u64; CONTROL_WORDS]>::zeroed();
    let control: *mut u64 = control.as_mut_ptr().cast();
    let head = ControlHead {
        len: size_of::<ControlHead>() + 4 * count,
        level: sys::SOL_SOCKET,
        kind: sys::SCM_RIGHTS,
    };
    // SAFETY: there is room for a header.
    unsafe { control.cast::<ControlHead>().write(head) };
    // SAFETY: and after it for the numbers of a batch.
    unsafe {
        let place = control.cast::<ControlHead>().add(1).cast();
        ptr::copy_nonoverlapping(descriptors.as_ptr(), place, count);
    };
    let message = Message {
        name: (&raw const to.address).cast_mut().cast(),
        name_len: to.len,
        pieces: pieces.as_mut_ptr(),
        pieces_len: pieces.len(),
        control: if count == 0 {
            ptr::null_mut()
        } else {
            control.cast()
        },
        control_len: if count == 0 { 0 } else { (head.len + 7) & !7 },
        flags: 0,
    };
    for _ in 0..TRIES_MAX {
        // SAFETY: all buffers of the message have the given lengths.
        if unsafe { sys::sendmsg(socket, &raw const message, sys::MSG_NOSIGNAL) } >= 0 {
            return true;
        }
        match sys::errno() {
            sys::EINTR => {}
            sys::ETOOMANYREFS => sys::pause_ms(1),
            _ => return false,
        }
    }
    false
}

/// Moves the descriptor to a high number; returns it unchanged if none is free.
pub fn move_up(descriptor: c_int) -> c_int {
    let mut limit = Limit { soft: 0, hard: 0 };
    // SAFETY: there is room for the result.
    if unsafe { sys::getrlimit(sys::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return descriptor;
    }
    let from = (limit.soft / 2).min(NUMBER_MAX);
    let high = sys::duplicate_from(descriptor, c_int::try_from(from).unwrap_or(0));
    if high < 0 {
        return descriptor;
    }
    // SAFETY: replaced by the copy.
    unsafe { sys::close(descriptor) };
    high
}

/// Raises the soft limit on descriptors to the hard limit, because no number was free. Existing descriptors keep their
/// low numbers.
pub fn make_room() {
    let mut limit = Limit { soft: 0, hard: 0 };
    // SAFETY: there is room for the result.
    if unsafe { sys::getrlimit(sys::RLIMIT_NOFILE, &raw mut limit) } == 0 && limit.soft < limit.hard
    {
        limit.soft = limit.hard;
        // SAFETY: the limit is complete.
        unsafe { sys::setrlimit(sys::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// Socket name under construction.
struct Name {
    address: Address,
    len: usize,
}

impl Name {
    /// Appends bytes; `None` if there is no room.
    fn push(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.len.checked_add(bytes.len())?;
        self.address
            .path
            .get_mut(self.len..end)?
            .copy_from_slice(bytes);
        self.len = end;
        Some(())
    }

    /// Appends a number in decimal.
    fn push_number(&mut self, number: u32) -> Option<()> {
        if number >= 10 {
            self.push_number(number / 10)?;
        }
        self.push(&[b'0' + u8::try_from(number % 10).ok()?])
    }
}

/// Returns the address of an agent's socket.
pub fn agent(token: &[u8], pid: u32) -> Option<Peer> {
    let mut name = Name {
        address: Address {
            family: u16::try_from(sys::AF_UNIX).ok()?,
            path: [0; 108],
        },
        // The leading zero makes the name abstract.
        len: 1,
    };
    name.push(NAME_PREFIX.as_bytes())?;
    name.push(token)?;
    name.push(b"/")?;
    name.push_number(pid)?;
    Some(Peer {
        address: name.address,
        len: u32::try_from(size_of::<u16>() + name.len).ok()?,
    })
}
