#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Mapped files and shared memory, for a CRIU without privileges on the machine. The kernel refuses it to follow the links
//! in `/proc/PID/map_files` (`EPERM`).
//!
//! ```text
//! a file that has its name            CRIU opens it by that
//! a file without the name that it     the same file, from a descriptor of any process, or by another name in its
//! was opened by                       folder; else a copy of what is mapped, the same one for all processes
//! shared memory without a file        a copy of what is mapped
//! ```
//! Only shared mappings are copied, because they show the file's content. In case of doubt the answer is `EIO`: after
//! `EPERM`, CRIU (4.2) would treat some mappings as private memory, or read beyond a mapping's end.
//!
//! A copy lacks the parts of a file that no process has mapped. A process can reach them only by enlarging a mapping
//! (`mremap`).

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_int, c_uint};

use super::frozen_files::{FrozenFiles, OpenFile, Part};
use super::inode::{Inode, Links};
use super::kernel::{EIO, O_CLOEXEC, O_DIRECTORY, close, openat, read_at, write_at};
use super::listing::{for_each_entry, for_each_line};
use super::mapping::{Identity, Kind, Mapping, range};
use super::system_call::{AT_FDCWD, read_link};
use super::text::Text;

/// `PROC_SUPER_MAGIC`.
const PROC: i64 = 0x9fa0;
/// Folder of the links to mapped files, in `/proc/PID`.
const MAP_FILES: &[u8] = b"map_files/";
/// CRIU's own links.
const OF_SELF: &[u8] = b"/proc/self/map_files/";
/// Error by which CRIU recognizes a file without an inode of its own.
const ENXIO: c_int = 6;
/// Limit on the copies in one dump. Each needs a descriptor.
const COPIES_MAX: usize = 4096;
/// Limit on the bytes of all copies, which are in memory twice during the dump.
const COPIED_BYTES_MAX: u64 = 64 << 30;
/// Limit on the separately mapped parts of a file.
const PARTS_MAX: usize = 64;
/// Longest path.
const PATH_BYTES_MAX: usize = 4096;
/// Longest name of a memfd.
const NAME_BYTES_MAX: usize = 249;
/// Bytes that are copied at once.
const CHUNK: usize = 16 << 10;
const PAGE: usize = 4096;

const O_ACCMODE: c_int = 3;
const O_PATH: c_int = 0o10_000_000;

/// Answers an `openat` that the kernel has refused with `EPERM`. Returns `None` if the refusal stays.
pub fn answer(folder: c_int, path: &CStr, flags: c_int) -> Option<Result<c_int, c_int>> {
    if flags & O_ACCMODE != 0 {
        return None;
    }
    find(folder, path, |process, mapping, asks_for| match asks_for {
        AsksFor::File => of_file(process, mapping, flags),
        AsksFor::Content => of_content(process, mapping),
    })
}

/// Answers a `stat` of memory without a file, which the kernel has refused with `EPERM`, with its identity. Returns `None` if
/// the refusal stays.
pub fn about(folder: c_int, path: &CStr) -> Option<Identity> {
    find(folder, path, |_, mapping, _| match mapping.kind() {
        Kind::Memory | Kind::Aio => Some(mapping.identity),
        Kind::Named | Kind::Nameless | Kind::Other => None,
    })
}

/// Purpose of CRIU's call, recognized by the folder from which it follows the link.
#[derive(Clone, Copy)]
enum AsksFor {
    /// CRIU wants the mapped file, and has the folder of links open.
    File,
    /// CRIU wants the content of shared memory, and has the folder of the process open.
    Content,
}

/// Finds the mapping that a path into `/proc/PID/map_files` names. `act` also gets the process's folder.
fn find<T>(
    folder: c_int,
    path: &CStr,
    act: impl FnOnce(c_int, &Mapping<'_>, AsksFor) -> Option<T>,
) -> Option<T> {
    let path = path.to_bytes();
    let (folder, way, name, asks_for) = if let Some(name) = path.strip_prefix(OF_SELF) {
        (AT_FDCWD, c"/proc/self", name, AsksFor::Content)
    } else if let Some(name) = path.strip_prefix(MAP_FILES) {
        (folder, c".", name, AsksFor::Content)
    } else {
        (folder, c"..", path, AsksFor::File)
    };
    let addresses = range(name)?;
    let process = openat(folder, way, O_PATH | O_DIRECTORY | O_CLOEXEC).ok()?;
    let mut act = Some(act);
    let mut answer = None;
    if is_proc(process)
        && let Ok(maps) = openat(process, c"maps", O_CLOEXEC)
    {
        for_each_line(maps, |line| {
            let mapping = Mapping::parse(line);
            let mapping = mapping.filter(|mapping| (mapping.start, mapping.end) == addresses);
            if let Some(mapping) = mapping
                && let Some(act) = act.take()
            {
                answer = act(process, &mapping, asks_for);
            }
            act.is_some()
        });
        // SAFETY: nobody else has it.
        unsafe { close(maps) };
    }
    // SAFETY: nobody else has it.
    unsafe { close(process) };
    answer
}

/// Answers a CRIU that collects mappings and asks for the mapped object.
fn of_file(process: c_int, mapping: &Mapping<'_>, flags: c_int) -> Option<Result<c_int, c_int>> {
    match mapping.kind() {
        Kind::Memory | Kind::Named => return None,
        Kind::Aio => return Some(Err(ENXIO)),
        Kind::Other => return Some(Err(EIO)),
        Kind::Nameless => {}
    }
    // SAFETY: CRIU has one thread, and this function does not call itself.
    let copies = unsafe { &mut *COPIES.0.get() };
    if let Some(copy) = copies.find(mapping.identity) {
        return Some(duplicate(copy));
    }
    let Some(files) = FrozenFiles::get() else {
        return Some(Err(EIO));
    };
    let is_open = |file: &&OpenFile| is_of(files, file, mapping);
    if let Some(file) = files.open().iter().find(is_open) {
        return Some(openat(files.folder, file.path().as_c(), flags | O_CLOEXEC).map_err(|_| EIO));
    }
    if let Some(other) = by_another_name(mapping, flags) {
        return Some(Ok(other));
    }
    if !mapping.is_shared || copies.len == COPIES_MAX {
        return Some(Err(EIO));
    }
    let copy = copy(files, process, mapping, Ends::Anywhere, &mut copies.bytes);
    Some(copy.and_then(|copy| {
        let answer = duplicate(copy)?;
        copies.push(mapping.identity, copy);
        Ok(answer)
    }))
}

/// Answers a CRIU that dumps the content of memory without a file.
fn of_content(process: c_int, mapping: &Mapping<'_>) -> Option<Result<c_int, c_int>> {
    if !mapping.is_shared {
        return None;
    }
    let Some(files) = FrozenFiles::get() else {
        return Some(Err(EIO));
    };
    // CRIU closes it soon: no other copy counts.
    let mut bytes = 0;
    Some(copy(files, process, mapping, Ends::AtTheEnd, &mut bytes))
}

/// Returns true if the open file is the mapped one. On overlays the device numbers differ.
fn is_of(files: &FrozenFiles, file: &OpenFile, mapping: &Mapping<'_>) -> bool {
    let (inode, device) = file.identity;
    if inode != mapping.identity.inode {
        return false;
    }
    if device == mapping.identity.device {
        return true;
    }
    let mut name = [0_u8; PATH_BYTES_MAX];
    read_link(files.folder, file.path().as_c(), &mut name)
        .is_some_and(|length| name.get(..length) == Some(mapping.name))
}

/// Opens the file by another name in the folder in which it was opened. Named semaphores have one.
fn by_another_name(mapping: &Mapping<'_>, flags: c_int) -> Option<c_int> {
    let former = mapping.former_name();
    let slash = former.iter().rposition(|byte| *byte == b'/')?;
    let mut path = [0_u8; PATH_BYTES_MAX];
    path.get_mut(..slash)?.copy_from_slice(&former[..slash]);
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    let folder = openat(AT_FDCWD, path, O_DIRECTORY | O_CLOEXEC).ok()?;
    let mut found = None;
    for_each_entry(folder, |inode, name| {
        if inode == mapping.identity.inode {
            let about = Inode::of_path(folder, name, Links::NotFollowed);
            let is_it = about.is_some_and(|about| {
                about.is_regular()
                    && (about.number, about.device())
                        == (mapping.identity.inode, mapping.identity.device)
            });
            if is_it {
                found = openat(folder, name, flags | O_CLOEXEC).ok();
            }
        }
        found.is_none()
    });
    // SAFETY: nobody else has it.
    unsafe { close(folder) };
    found
}

/// Possible end of a mapped object, relative to its mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// A file may be shorter than its mapping.
    Anywhere,
    /// Memory is as long as its mappings.
    AtTheEnd,
}

/// Copies the parts of a file that processes have mapped into a new file.
fn copy(
    files: &FrozenFiles,
    process: c_int,
    mapping: &Mapping<'_>,
    ends: Ends,
    bytes: &mut u64,
) -> Result<c_int, c_int> {
    let copy = new_file(mapping)?;
    let filled = fill(files, process, mapping, ends, bytes, copy);
    match filled {
        Ok(()) => Ok(copy),
        Err(error) => {
            // SAFETY: nobody else has it.
            unsafe { close(copy) };
            Err(error)
        }
    }
}

fn fill(
    files: &FrozenFiles,
    process: c_int,
    mapping: &Mapping<'_>,
    ends: Ends,
    bytes: &mut u64,
    copy: c_int,
) -> Result<(), c_int> {
    let mut target = Target {
        file: copy,
        ends,
        size: 0,
        parts: [(0, 0); PARTS_MAX],
        len: 0,
        bytes,
    };
    let memory = openat(process, c"mem", O_CLOEXEC).map_err(|_| EIO)?;
    let first = target.take(memory, mapping.start, mapping.end, mapping.offset);
    // SAFETY: nobody else has it.
    unsafe { close(memory) };
    first?;
    let is_of_it = |part: &&Part| part.identity == mapping.identity;
    for part in files.mapped().iter().filter(is_of_it) {
        let end = part.offset.saturating_add(part.end - part.start);
        if target.has(part.offset, end) {
            continue;
        }
        if !part.is_shared {
            // What the process has not written to is the file's, and nothing says which that is.
            return Err(EIO);
        }
        let mut path = Text::new();
        path.push_number(part.pid);
        path.push(b"/mem");
        let memory = openat(files.folder, path.as_c(), O_CLOEXEC).map_err(|_| EIO)?;
        let taken = target.take(memory, part.start, part.end, part.offset);
        // SAFETY: nobody else has it.
        unsafe { close(memory) };
        taken?;
    }
    let size = target.size.cast_signed();
    // SAFETY: takes numbers only.
    if unsafe { ftruncate(copy, size) } == 0 {
        Ok(())
    } else {
        Err(EIO)
    }
}

/// A copy that is being made.
struct Target<'a> {
    file: c_int,
    ends: Ends,
    size: u64,
    /// Ranges of the copy that have their content.
    parts: [(u64, u64); PARTS_MAX],
    len: usize,
    bytes: &'a mut u64,
}

impl Target<'_> {
    fn has(&self, from: u64, to: u64) -> bool {
        let mut parts = self.parts[..self.len].iter();
        parts.any(|(begin, end)| *begin <= from && to <= *end)
    }

    /// Copies the memory from `start` to `end` of a process to `offset`.
    fn take(&mut self, memory: c_int, start: u64, end: u64, offset: u64) -> Result<(), c_int> {
        let length = end - start;
        *self.bytes = self.bytes.saturating_add(length);
        let place = self.parts.get_mut(self.len).ok_or(EIO)?;
        *place = (offset, offset.checked_add(length).ok_or(EIO)?);
        self.len += 1;
        if *self.bytes > COPIED_BYTES_MAX {
            return Err(EIO);
        }
        let mut chunk = [0_u8; CHUNK];
        let mut at = 0;
        while at < length {
            let left = usize::try_from(length - at).unwrap_or(CHUNK).min(CHUNK);
            let read = match read_at(memory, &mut chunk[..left], start + at) {
                Ok(read) if read > 0 => read,
                // The kernel ends a read at a page that is not there: beyond the end of the file.
                Ok(_) | Err(EIO) if self.ends == Ends::Anywhere => break,
                Ok(_) | Err(_) => return Err(EIO),
            };
            for (number, page) in chunk[..read].chunks(PAGE).enumerate() {
                let into = offset + at + (number * PAGE) as u64;
                // Holes stay holes.
                if page.iter().any(|byte| *byte != 0)
                    && write_at(self.file, page, into) != Ok(page.len())
                {
                    return Err(EIO);
                }
            }
            at += read as u64;
        }
        self.size = self.size.max(offset + at);
        Ok(())
    }
}

/// Creates an empty file in memory, named like the mapped file without its folders.
fn new_file(mapping: &Mapping<'_>) -> Result<c_int, c_int> {
    const MFD_CLOEXEC: c_uint = 1;
    let former = mapping.former_name();
    let former = former.strip_prefix(b"/memfd:").unwrap_or_else(|| {
        let slash = former.iter().rposition(|byte| *byte == b'/');
        slash
            .and_then(|slash| former.get(slash + 1..))
            .unwrap_or(b"")
    });
    let mut name = [0_u8; NAME_BYTES_MAX + 1];
    let length = former.len().min(NAME_BYTES_MAX);
    name[..length].copy_from_slice(&former[..length]);
    // SAFETY: the name ends with a zero.
    let file = unsafe { memfd_create(name.as_ptr().cast(), MFD_CLOEXEC) };
    if file < 0 { Err(EIO) } else { Ok(file) }
}

fn duplicate(file: c_int) -> Result<c_int, c_int> {
    const F_DUPFD_CLOEXEC: c_int = 1030;
    // SAFETY: takes numbers only.
    let duplicate = unsafe { fcntl(file, F_DUPFD_CLOEXEC, 3) };
    if duplicate < 0 {
        Err(EIO)
    } else {
        Ok(duplicate)
    }
}

/// Copies made so far, for other mappings of the same files.
struct Copies {
    of: [(Identity, c_int); COPIES_MAX],
    len: usize,
    bytes: u64,
}

impl Copies {
    fn find(&self, identity: Identity) -> Option<c_int> {
        let mut all = self.of[..self.len].iter();
        all.find(|(of, _)| *of == identity).map(|(_, copy)| *copy)
    }

    fn push(&mut self, identity: Identity, copy: c_int) {
        if let Some(place) = self.of.get_mut(self.len) {
            *place = (identity, copy);
            self.len += 1;
        }
    }
}

struct Shared(UnsafeCell<Copies>);

// SAFETY: CRIU has one thread.
unsafe impl Sync for Shared {}

static COPIES: Shared = Shared(UnsafeCell::new(Copies {
    of: [(
        Identity {
            device: (0, 0),
            inode: 0,
            is_system_v: false,
        },
        0,
    ); COPIES_MAX],
    len: 0,
    bytes: 0,
}));

fn is_proc(folder: c_int) -> bool {
    // `struct statfs`, 120 bytes, begins with the kind.
    let mut about = [0_i64; 16];
    // SAFETY: there is room for what the kernel writes.
    unsafe { fstatfs(folder, about.as_mut_ptr()) == 0 && about[0] == PROC }
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn fstatfs(descriptor: c_int, about: *mut i64) -> c_int;
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    fn ftruncate(file: c_int, length: i64) -> c_int;
    fn fcntl(descriptor: c_int, command: c_int, ...) -> c_int;
}
