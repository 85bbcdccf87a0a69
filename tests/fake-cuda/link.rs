//! Communication between a program that suspends and the restore thread of a process: datagrams, and the lookup of the
//! socket.
//!
//! The thread's socket has the abstract name `fake-cuda/<pid>/<unique>`, with the pid in the process's own namespace:
//! CRIU dumps a bound datagram socket and restores it under its name, whatever the host pid is then. The caller looks
//! for it among the open sockets of the process; a forked child has its parent's socket, with another pid.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::code::{Code, INVALID_VALUE, NOT_INITIALIZED, OPERATING_SYSTEM};

/// Time between two checks if a process that does not reply still exists.
const PATIENCE: Duration = Duration::from_millis(20);
/// Maximum number of GPU pairs.
pub const PAIRS_MAX: usize = 64;
const HEAD: usize = 12;
/// Maximum length of a request.
pub const REQUEST_MAX: usize = HEAD + PAIRS_MAX * size_of::<Pair>();
const REPLY: usize = 8;

/// Old and new UUID of a GPU.
pub type Pair = [[u8; 16]; 2];

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    State = 1,
    Thread = 2,
    Lock = 3,
    Checkpoint = 4,
    Restore = 5,
    Unlock = 6,
}

const VERBS: [Verb; 6] = [
    Verb::State,
    Verb::Thread,
    Verb::Lock,
    Verb::Checkpoint,
    Verb::Restore,
    Verb::Unlock,
];

pub struct Request {
    pub verb: Verb,
    pub timeout_ms: u32,
    pub pairs: Vec<Pair>,
}

impl Request {
    pub fn of(verb: Verb) -> Self {
        Self {
            verb,
            timeout_ms: 0,
            pairs: Vec::new(),
        }
    }

    fn encode(&self) -> Vec<u8> {
        let words = [self.verb as u32, self.timeout_ms, self.pairs.len() as u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend(self.pairs.as_flattened().as_flattened());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEAD)?;
        let (verb, timeout_ms, count) = (word(head, 0)?, word(head, 4)?, word(head, 8)?);
        let (halves, _) = rest.as_chunks::<16>();
        let (pairs, _) = halves.as_chunks::<2>();
        let verb = VERBS.into_iter().find(|one| *one as u32 == verb)?;
        (pairs.len() == count as usize).then(|| Self {
            verb,
            timeout_ms,
            pairs: pairs.to_vec(),
        })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub fn encode_reply(answer: Result<i32, Code>) -> [u8; REPLY] {
    let (code, value) = answer.map_or_else(|code| (code, 0), |value| (0, value));
    let mut bytes = [0; REPLY];
    bytes[..4].copy_from_slice(&code.to_ne_bytes());
    bytes[4..].copy_from_slice(&value.to_ne_bytes());
    bytes
}

fn decode_reply(bytes: [u8; REPLY]) -> Result<i32, Code> {
    let code = word(&bytes, 0).unwrap_or(0).cast_signed();
    let value = word(&bytes, 4).unwrap_or(0).cast_signed();
    if code == 0 { Ok(value) } else { Err(code) }
}

/// Opens the socket of this process's restore thread.
pub fn listen() -> io::Result<UnixDatagram> {
    bind("fake-cuda")
}

/// Binds a socket to a unique name.
fn bind(kind: &str) -> io::Result<UnixDatagram> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let time = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_nanos();
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let name = format!("{kind}/{}/{time:x}.{serial:x}", std::process::id());
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Sends a request to the restore thread of a process and waits for its reply as long as the process exists: a stopped
/// process replies when it continues.
pub fn ask(pid: i32, request: &Request) -> Result<i32, Code> {
    if request.pairs.len() > PAIRS_MAX {
        return Err(INVALID_VALUE);
    }
    let gone = |_: io::Error| OPERATING_SYSTEM;
    if !exists(pid) {
        return Err(OPERATING_SYSTEM);
    }
    let name = name_of(pid).map_err(gone)?.ok_or(NOT_INITIALIZED)?;
    let address = SocketAddr::from_abstract_name(name).map_err(gone)?;
    let socket = bind("fake-cuda-caller").map_err(gone)?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(gone)?;
    socket
        .send_to_addr(&request.encode(), &address)
        .map_err(gone)?;
    let mut bytes = [0; REPLY];
    loop {
        match socket.recv(&mut bytes) {
            Ok(_) => return decode_reply(bytes),
            Err(_) if exists(pid) => {}
            Err(_) => return Err(OPERATING_SYSTEM),
        }
    }
}

/// Returns true if a process exists and is no zombie.
fn exists(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'Z' && state != 'X')
}

/// Returns the process's or thread's id in its own namespace.
pub fn inner_id(status: &str) -> Option<&str> {
    status
        .lines()
        .find(|line| line.starts_with("NSpid:"))?
        .split_whitespace()
        .last()
}

fn name_of(pid: i32) -> io::Result<Option<String>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let Some(inner) = inner_id(&status) else {
        return Ok(None);
    };
    let mut open = HashSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let target = target.to_string_lossy();
        let inode = target
            .strip_prefix("socket:[")
            .and_then(|rest| rest.strip_suffix(']'));
        open.extend(inode.map(str::to_owned));
    }
    let prefix = format!("@fake-cuda/{inner}/");
    let sockets = fs::read_to_string(format!("/proc/{pid}/net/unix"))?;
    let found = sockets.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(6);
        let (inode, name) = (words.next()?, words.next()?);
        (open.contains(inode) && name.starts_with(&prefix)).then(|| name[1..].to_owned())
    });
    Ok(found)
}
