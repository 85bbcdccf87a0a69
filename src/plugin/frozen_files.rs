#![allow(unsafe_code, reason = "called by CRIU through C")]
//! The regular files that the processes of CRIU's `/proc` have open, and the files without a name that they have mapped.
//!
//! Looked at once, when CRIU asks for the first of them: then all tasks are frozen, and none of this changes until CRIU
//! ends.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_int, c_void};
use core::ptr;

use super::inode::{Inode, Links};
use super::kernel::{ENOENT, ESRCH, O_CLOEXEC, O_DIRECTORY, close, openat};
use super::listing::{for_each_line, for_each_number};
use super::mapping::{Identity, Kind, Mapping};
use super::system_call::AT_FDCWD;
use super::text::Text;

/// Most open files that are looked at, in all processes; beyond, none is known.
const OPEN_MAX: usize = 1 << 20;
/// Most mappings of files without a name.
const MAPPED_MAX: usize = 1 << 18;
/// Stands for the program that a process executes, in the place of a descriptor.
const PROGRAM: c_int = -1;

/// A file that a process has open.
#[derive(Clone, Copy)]
pub struct OpenFile {
    pub identity: (u64, (u32, u32)),
    pid: c_int,
    descriptor: c_int,
}

impl OpenFile {
    /// Returns its path from `/proc` on.
    pub fn path(&self) -> Text {
        let mut path = Text::new();
        path.push_number(self.pid);
        if self.descriptor == PROGRAM {
            path.push(b"/exe");
        } else {
            path.push(b"/fd/");
            path.push_number(self.descriptor);
        }
        path
    }
}

/// A part of a file that a process has mapped.
#[derive(Clone, Copy)]
pub struct Part {
    pub identity: Identity,
    pub pid: c_int,
    pub start: u64,
    pub end: u64,
    pub offset: u64,
    pub is_shared: bool,
}

/// A list in memory of its own, of a fixed size.
struct List<T> {
    items: *mut T,
    len: usize,
    max: usize,
}

impl<T: Copy> List<T> {
    fn new(max: usize) -> Option<Self> {
        const PROT_READ_WRITE: c_int = 3;
        // MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE: memory is used as it is written to.
        const FLAGS: c_int = 0x4022;
        let bytes = max.checked_mul(size_of::<T>())?;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let items = unsafe { mmap(ptr::null_mut(), bytes, PROT_READ_WRITE, FLAGS, -1, 0) };
        (items.addr() != usize::MAX).then_some(Self {
            items: items.cast(),
            len: 0,
            max,
        })
    }

    fn push(&mut self, item: T) -> bool {
        if self.len == self.max {
            return false;
        }
        // SAFETY: the mapping has room for `max` items, and begins at a page.
        unsafe { self.items.add(self.len).write(item) };
        self.len += 1;
        true
    }

    fn as_slice(&self) -> &[T] {
        // SAFETY: `len` items were written, and the mapping is never removed.
        unsafe { core::slice::from_raw_parts(self.items, self.len) }
    }
}

enum State {
    NotLooked,
    Failed,
    Found(FrozenFiles),
}

struct Shared(UnsafeCell<State>);

// SAFETY: CRIU has one thread.
unsafe impl Sync for Shared {}

static STATE: Shared = Shared(UnsafeCell::new(State::NotLooked));

/// All that was found.
pub struct FrozenFiles {
    open: List<OpenFile>,
    mapped: List<Part>,
    /// Descriptor of `/proc`.
    pub folder: c_int,
}

impl FrozenFiles {
    /// Looks, or returns what the first look has found. `None` if a process could not be looked into, or there was too
    /// much.
    pub fn get() -> Option<&'static Self> {
        // SAFETY: CRIU has one thread, and nothing keeps a reference across this.
        let state = unsafe { &mut *STATE.0.get() };
        if let State::NotLooked = state {
            *state = Self::look().map_or(State::Failed, State::Found);
        }
        match state {
            State::Found(found) => Some(found),
            State::NotLooked | State::Failed => None,
        }
    }

    pub fn open(&self) -> &[OpenFile] {
        self.open.as_slice()
    }

    pub fn mapped(&self) -> &[Part] {
        self.mapped.as_slice()
    }

    fn look() -> Option<Self> {
        let folder = openat(AT_FDCWD, c"/proc", O_DIRECTORY | O_CLOEXEC).ok()?;
        let mut found = Self {
            open: List::new(OPEN_MAX)?,
            mapped: List::new(MAPPED_MAX)?,
            folder,
        };
        // SAFETY: takes nothing.
        let us = unsafe { getpid() };
        let mut is_whole = true;
        let is_listed = for_each_number(folder, |pid| {
            is_whole = pid == us || found.look_into(pid);
            is_whole
        });
        (is_listed && is_whole).then_some(found)
    }

    fn look_into(&mut self, pid: c_int) -> bool {
        if !self.has_memory(pid) {
            return true;
        }
        let mut path = Text::new();
        path.push_number(pid);
        path.push(b"/fd");
        let listed = self.with(path.as_c(), O_DIRECTORY, |found, folder| {
            let mut is_whole = true;
            let is_listed = for_each_number(folder, |descriptor| {
                let mut name = Text::new();
                name.push_number(descriptor);
                is_whole = found.note(pid, descriptor, folder, name.as_c());
                is_whole
            });
            is_listed && is_whole
        });
        let folder = self.folder;
        let mut program = Text::new();
        program.push_number(pid);
        program.push(b"/exe");
        let listed = listed && self.note(pid, PROGRAM, folder, program.as_c());
        let mut path = Text::new();
        path.push_number(pid);
        path.push(b"/maps");
        listed
            && self.with(path.as_c(), 0, |found, file| {
                let mut is_whole = true;
                let is_read = for_each_line(file, |line| {
                    is_whole =
                        Mapping::parse(line).is_some_and(|mapping| found.keep(pid, &mapping));
                    is_whole
                });
                is_read && is_whole
            })
    }

    /// Returns false for a process that exits, or has exited and was not waited for: none of the job, which is frozen. The
    /// kernel does not let an ordinary user look into it.
    fn has_memory(&mut self, pid: c_int) -> bool {
        let mut path = Text::new();
        path.push_number(pid);
        path.push(b"/status");
        let mut has_memory = false;
        let is_read = self.with(path.as_c(), 0, |_, status| {
            for_each_line(status, |line| {
                has_memory = line.starts_with(b"VmSize:");
                !has_memory
            })
        });
        has_memory || !is_read
    }

    /// Opens a file of a process and acts on it. A process that has exited has none.
    fn with(
        &mut self,
        path: &CStr,
        flags: c_int,
        act: impl FnOnce(&mut Self, c_int) -> bool,
    ) -> bool {
        let opened = match openat(self.folder, path, flags | O_CLOEXEC) {
            Ok(opened) => opened,
            Err(error) => return matches!(error, ENOENT | ESRCH),
        };
        let result = act(self, opened);
        // SAFETY: nobody else has it.
        unsafe { close(opened) };
        result
    }

    fn note(&mut self, pid: c_int, descriptor: c_int, folder: c_int, name: &CStr) -> bool {
        let inode = Inode::of_path(folder, name, Links::Followed);
        inode.filter(Inode::is_regular).is_none_or(|inode| {
            self.open.push(OpenFile {
                identity: (inode.number, inode.device()),
                pid,
                descriptor,
            })
        })
    }

    fn keep(&mut self, pid: c_int, mapping: &Mapping<'_>) -> bool {
        let is_file = mapping.kind() == Kind::Nameless;
        // Memory without a file that processes share has an inode, too.
        let is_memory = mapping.kind() == Kind::Memory && mapping.identity.inode != 0;
        !(is_file || is_memory)
            || self.mapped.push(Part {
                identity: mapping.identity,
                pid,
                start: mapping.start,
                end: mapping.end,
                offset: mapping.offset,
                is_shared: mapping.is_shared,
            })
    }
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn getpid() -> c_int;
    fn mmap(
        address: *mut c_void,
        bytes: usize,
        protection: c_int,
        flags: c_int,
        descriptor: c_int,
        offset: i64,
    ) -> *mut c_void;
}
