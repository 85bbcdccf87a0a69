//! Reports of changes, each a symbolic link in a folder of the store.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicUsize, Ordering};

use super::sys;
use super::system_call::{AT_FDCWD, read_link};

/// Name of the variable with the path of the folder. `files::record::evidence` sets it.
const FOLDER_VARIABLE: &CStr = c"_CKPT_RUN_WRITES";
/// Name of the variable with the mount points of the file systems of which changes are reported, each after a plus sign, and of
/// others, after a minus sign, in lines. Without it, all changes are reported.
const MOUNTS_VARIABLE: &CStr = c"_CKPT_RUN_MOUNTS";
/// Room for these lines. Longer ones are ignored.
const MOUNTS_BYTES_MAX: usize = 4096;
/// Room for the folder's path. In a folder with a longer one, nothing is reported.
const FOLDER_BYTES_MAX: usize = 512;
/// Room for the text of a report. Buffers are on the job's stack, which is small in signal handlers.
const TEXT_BYTES_MAX: usize = 2048;
/// Room for the path of a report.
const NAME_BYTES_MAX: usize = FOLDER_BYTES_MAX + 32;
/// Room for the path of a descriptor.
const LINK_BYTES_MAX: usize = 32;
/// Hexadecimal digits of a number.
const DIGITS: usize = 16;
/// End of the kernel's path of a removed file or folder.
const REMOVED: &[u8] = b" (deleted)";
/// Places with device files and the kernel's own, and those of files within them.
const NOT_FILES: [&[u8]; 3] = [b"/dev/", b"/proc/", b"/sys/"];
const BUT_FILES: [&[u8]; 2] = [b"/dev/shm/", b"/dev/hugepages/"];

/// Kind of a change; the first byte of a report.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A name was created: a folder, a link, a temporary file.
    Created = b'c',
    /// A file did not exist, and was created by opening it.
    OpenedNew = b'o',
    /// An existing file was opened for writing, was truncated, or got other attributes.
    Opened = b'w',
    /// The same as `Opened`, for attributes of a link itself.
    LinkChanged = b'l',
    /// A file or folder was renamed to a path that did not exist.
    MovedToNew = b'n',
    /// A file or folder was renamed to a path that may have existed.
    Moved = b'm',
    /// The file or folder at the path was exchanged for another.
    Exchanged = b'x',
    /// The path was removed, or renamed to another one.
    Gone = b'g',
    /// Identity of a file that was created by opening it. Programs with system calls of their own (Rust's `rustix`) may
    /// rename it without a report.
    Born = b'i',
}

impl Kind {
    /// Returns true if the call follows a link at the path itself.
    fn follows_links(self) -> bool {
        matches!(self, Self::OpenedNew | Self::Opened | Self::Born)
    }
}

/// An action on a report.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Add,
    Withdraw,
}

/// Value of a variable and its length, set before `main`; 0 if there is none.
struct Value<const ROOM: usize>(UnsafeCell<[u8; ROOM]>, AtomicUsize);
// SAFETY: written once, before the length is set.
unsafe impl<const ROOM: usize> Sync for Value<ROOM> {}

impl<const ROOM: usize> Value<ROOM> {
    const fn none() -> Self {
        Self(UnsafeCell::new([0; ROOM]), AtomicUsize::new(0))
    }

    fn read(&self, name: &CStr) {
        // SAFETY: the name ends with a zero.
        let value = unsafe { sys::getenv(name.as_ptr()) };
        if value.is_null() {
            return;
        }
        // SAFETY: values of the environment end with a zero.
        let value = unsafe { CStr::from_ptr(value) }.to_bytes();
        // SAFETY: nothing reads it before the length is set, and this function runs once for each.
        let room = unsafe { &mut *self.0.get() };
        if let Some(room) = room.get_mut(..value.len()) {
            room.copy_from_slice(value);
            self.1.store(value.len(), Ordering::Release);
        }
    }

    fn bytes(&self) -> &[u8] {
        let len = self.1.load(Ordering::Acquire);
        // SAFETY: it does not change after the length was set.
        unsafe { &(&*self.0.get())[..len] }
    }
}

/// Path of the folder. Nothing is reported without one.
static FOLDER: Value<FOLDER_BYTES_MAX> = Value::none();
static MOUNTS: Value<MOUNTS_BYTES_MAX> = Value::none();

/// Function called when the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    MOUNTS.read(MOUNTS_VARIABLE);
    FOLDER.read(FOLDER_VARIABLE);
}

/// Returns true if changes are reported.
pub fn is_on() -> bool {
    !FOLDER.bytes().is_empty()
}

/// Returns true if changes are reported on the file system of a path.
fn is_reported(path: &[u8]) -> bool {
    let mut nearest: Option<(&[u8], bool)> = None;
    for line in MOUNTS.bytes().split(|byte| *byte == b'\n') {
        let Some((sign, mount)) = line.split_first() else {
            continue;
        };
        let below = path.strip_prefix(mount);
        let is_below =
            below.is_some_and(|rest| mount == b"/" || matches!(rest.first(), None | Some(b'/')));
        if is_below && nearest.is_none_or(|(known, _)| known.len() <= mount.len()) {
            nearest = Some((mount, *sign == b'+'));
        }
    }
    nearest.is_none_or(|(_, is_reported)| is_reported)
}

/// Adds or removes the report of a change of the path, which is relative to the folder with this descriptor. Returns true
/// if the report is new.
///
/// # Safety
/// The path ends with a zero.
pub unsafe fn report(act: Act, kind: Kind, base: c_int, path: *const c_char) -> bool {
    if path.is_null() || !is_on() {
        return false;
    }
    // SAFETY: by the contract above.
    let c_path = unsafe { CStr::from_ptr(path) };
    let path = c_path.to_bytes();
    let mut text = Text::<TEXT_BYTES_MAX>::new();
    // The time replaces these digits below: the name of a report does not depend on it.
    text.add(&[kind as u8]);
    text.add(&[b'0'; DIGITS]);
    if kind == Kind::Born {
        let Some(identity) = sys::identity(base, c_path.as_ptr()) else {
            return false;
        };
        for number in identity {
            text.add(&hexadecimal(number));
        }
    }
    let start = text.len;
    // The job may change links on the path later.
    if !text.add_real(kind, base, c_path) {
        if !path.starts_with(b"/") && !text.add_folder(base) {
            return false;
        }
        text.add(path);
    }
    let Some(bytes) = text.bytes() else {
        return false;
    };
    let is_in = |places: &[&[u8]]| places.iter().any(|place| bytes[start..].starts_with(place));
    if is_in(&NOT_FILES) && !is_in(&BUT_FILES) || !is_reported(&bytes[start..]) {
        return false;
    }
    let mut name = Text::<NAME_BYTES_MAX>::new();
    name.add(FOLDER.bytes());
    name.add(b"/");
    name.add(&hexadecimal(hash(bytes)));
    text.bytes[1..=DIGITS].copy_from_slice(&hexadecimal(sys::now_ns()));
    let (Some(text), Some(name)) = (text.c_str(), name.c_str()) else {
        return false;
    };
    match act {
        Act::Add => sys::make_link(text, name),
        Act::Withdraw => {
            sys::remove_link(name);
            false
        }
    }
}

/// Text of a limited length, which ends with a zero.
struct Text<const ROOM: usize> {
    bytes: [u8; ROOM],
    len: usize,
    is_cut: bool,
}

impl<const ROOM: usize> Text<ROOM> {
    fn new() -> Self {
        Self {
            bytes: [0; ROOM],
            len: 0,
            is_cut: false,
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        match self.bytes.get_mut(self.len..end) {
            Some(room) if end < ROOM => {
                room.copy_from_slice(bytes);
                self.len = end;
            }
            _ => self.is_cut = true,
        }
    }

    /// Adds the path without links that a path leads to. Returns false, and adds nothing, if it is not known.
    fn add_real(&mut self, kind: Kind, base: c_int, path: &CStr) -> bool {
        let add = |text: &mut Self, path: &CStr| {
            sys::with_opened(base, path, |opened| text.add_open(opened)) == Some(true)
        };
        if kind.follows_links() && add(self, path) {
            return true;
        }
        let bytes = path.to_bytes();
        let slash = bytes.iter().rposition(|byte| *byte == b'/');
        let (folder, name) = bytes.split_at(slash.map_or(0, |slash| slash + 1));
        if matches!(name, b"" | b"." | b"..") {
            return false;
        }
        let mut above = Text::<TEXT_BYTES_MAX>::new();
        above.add(if folder.is_empty() { b"." } else { folder });
        let start = self.len;
        let is_added = above.c_str().is_some_and(|above| add(self, above));
        if is_added {
            self.add(if self.len == start + 1 { b"" } else { b"/" });
            self.add(name);
        }
        is_added
    }

    /// Adds the path of an open file or folder. Returns false, and adds nothing, if it has none.
    fn add_open(&mut self, descriptor: c_int) -> bool {
        let mut link = Text::<LINK_BYTES_MAX>::new();
        link.add(b"/proc/self/fd/");
        link.add_decimal(descriptor.unsigned_abs());
        let room = self.bytes.get_mut(self.len..).unwrap_or_default();
        let len = link
            .c_str()
            .and_then(|link| read_link(AT_FDCWD, link, room))
            .filter(|len| {
                let path = room.get(..*len).unwrap_or_default();
                path.starts_with(b"/") && !path.ends_with(REMOVED)
            });
        self.len += len.unwrap_or(0);
        len.is_some()
    }

    /// Adds the path of an open folder and a slash. Returns false if it has none.
    fn add_folder(&mut self, base: c_int) -> bool {
        let is_added = if base == AT_FDCWD {
            let room = self.bytes.get_mut(self.len..).unwrap_or_default();
            // The kernel's text for a folder that cannot be reached begins differently.
            let len = sys::working_folder(room).filter(|_| room.starts_with(b"/"));
            self.len += len.unwrap_or(0);
            len.is_some()
        } else {
            self.add_open(base)
        };
        self.add(b"/");
        is_added
    }

    fn add_decimal(&mut self, number: u32) {
        if number >= 10 {
            self.add_decimal(number / 10);
        }
        self.add(&[b'0' + (number % 10) as u8]);
    }

    fn bytes(&self) -> Option<&[u8]> {
        self.bytes.get(..self.len).filter(|_| !self.is_cut)
    }

    fn c_str(&self) -> Option<&CStr> {
        let text = self.bytes.get(..=self.len).filter(|_| !self.is_cut)?;
        CStr::from_bytes_until_nul(text).ok()
    }
}

/// FNV-1a. Of two reports with one hash the second is lost.
fn hash(bytes: &[u8]) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, mix)
}

fn hexadecimal(number: u64) -> [u8; DIGITS] {
    core::array::from_fn(|index| {
        let digit = (number >> (60 - 4 * index) & 15) as u8;
        if digit < 10 {
            b'0' + digit
        } else {
            b'a' + digit - 10
        }
    })
}
