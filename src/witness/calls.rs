//! Replacements for the functions of the C library that create, open for writing, rename or remove files.
//!
//! Each calls the next library's function of the name, with the arguments that it was given. It reports the change before,
//! since the job may be killed in between, and withdraws the report if the call fails. It reports it again afterwards, since
//! a snapshot in between has taken the first report.

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use super::elf;
use super::report::{Act, Kind, is_on, report};
use super::sys;
use super::system_call::AT_FDCWD;

const O_ACCMODE: c_int = 3;
const O_RDWR: c_int = 2;
const O_CREAT: c_int = 0o100;
const O_TRUNC: c_int = 0o1000;
const AT_SYMLINK_NOFOLLOW: c_int = 0x100;
const O_PATH: c_int = 0o10_000_000;
const RENAME_EXCHANGE: c_uint = 2;
/// The bit by which `O_TMPFILE` differs from `O_DIRECTORY`.
const O_TMPFILE: c_int = 0o20_000_000;

/// Bytes of a unix socket's path.
const UNIX_PATH_BYTES_MAX: usize = 108;
const AF_UNIX: u16 = 1;

type Text = *const c_char;

/// A change that a call makes if it succeeds: up to two paths, relative to open folders.
struct Change {
    parts: [Option<Part>; 2],
}

#[derive(Clone, Copy)]
struct Part {
    kind: Kind,
    folder: c_int,
    path: Text,
    /// True if the call can succeed, as far as is known before.
    is_likely: bool,
    /// True if this call has reported it first.
    is_ours: bool,
}

impl Change {
    const NONE: Self = Self {
        parts: [None, None],
    };

    fn of(kind: Kind, folder: c_int, path: Text) -> Self {
        let creates = matches!(kind, Kind::Created | Kind::OpenedNew | Kind::MovedToNew);
        Self::part(
            kind,
            folder,
            path,
            sys::exists(folder, path) == Some(!creates),
        )
    }

    fn part(kind: Kind, folder: c_int, path: Text, is_likely: bool) -> Self {
        let part = Part {
            kind,
            folder,
            path,
            is_likely,
            is_ours: false,
        };
        Self {
            parts: [Some(part), None],
        }
    }

    /// Determines the change by an open with these flags.
    fn open(folder: c_int, path: Text, flags: c_int) -> Self {
        let writes = flags & O_ACCMODE != 0 || flags & (O_CREAT | O_TRUNC) != 0;
        if !writes || flags & (O_PATH | O_TMPFILE) != 0 {
            return Self::NONE;
        }
        let exists = sys::exists(folder, path);
        if flags & O_CREAT != 0 && exists == Some(false) {
            Self::part(Kind::OpenedNew, folder, path, true)
        } else {
            Self::part(Kind::Opened, folder, path, exists == Some(true))
        }
    }

    /// Determines the change by an open of the standard I/O functions.
    fn stream(path: Text, mode: Text) -> Self {
        if path.is_null() || mode.is_null() {
            return Self::NONE;
        }
        // SAFETY: modes end with a zero.
        let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
        let has = |one: u8| {
            mode.iter()
                .take_while(|byte| **byte != b',')
                .any(|byte| *byte == one)
        };
        match (has(b'w') || has(b'a'), has(b'+')) {
            (true, _) => Self::open(AT_FDCWD, path, O_CREAT),
            (false, true) => Self::of(Kind::Opened, AT_FDCWD, path),
            (false, false) => Self::NONE,
        }
    }

    fn rename(from: (c_int, Text), to: (c_int, Text)) -> Self {
        let kind = match sys::exists(to.0, to.1) {
            Some(false) => Kind::MovedToNew,
            Some(true) | None => Kind::Moved,
        };
        let [gone, _] = Self::of(Kind::Gone, from.0, from.1).parts;
        let is_likely = gone.is_some_and(|gone| gone.is_likely);
        let [moved, _] = Self::part(kind, to.0, to.1, is_likely).parts;
        Self {
            parts: [gone, moved],
        }
    }

    fn rename_with(from: (c_int, Text), to: (c_int, Text), flags: c_uint) -> Self {
        if flags & RENAME_EXCHANGE == 0 {
            return Self::rename(from, to);
        }
        let part = |(folder, path)| Self::of(Kind::Exchanged, folder, path).parts[0];
        Self {
            parts: [part(from), part(to)],
        }
    }

    fn created(path: Text) -> Self {
        Self::of(Kind::Created, AT_FDCWD, path)
    }

    /// Determines the change by a call that replaces the end of the path by the name that it creates.
    fn temporary(path: Text) -> Self {
        Self::part(Kind::OpenedNew, AT_FDCWD, path, false)
    }

    fn gone(path: Text) -> Self {
        Self::of(Kind::Gone, AT_FDCWD, path)
    }

    fn attributes(folder: c_int, path: Text, flags: c_int) -> Self {
        if path.is_null() {
            return Self::NONE;
        }
        let kind = if flags & AT_SYMLINK_NOFOLLOW == 0 {
            Kind::Opened
        } else {
            Kind::LinkChanged
        };
        Self::of(kind, folder, path)
    }

    /// Reports a change that is likely to be made, before the call.
    ///
    /// # Safety
    /// The kernel has read the likely paths.
    unsafe fn announce(&mut self) {
        for part in self.parts.iter_mut().flatten().filter(|it| it.is_likely) {
            // SAFETY: by the contract above.
            part.is_ours = unsafe { report(Act::Add, part.kind, part.folder, part.path) };
        }
    }

    /// Reports the change, or withdraws what this call has reported.
    ///
    /// # Safety
    /// The call has succeeded, or the kernel has read the likely paths.
    unsafe fn conclude(self, is_success: bool) {
        for part in self.parts.into_iter().flatten() {
            let act = match (is_success, part.is_ours) {
                (true, _) => Act::Add,
                (false, true) => Act::Withdraw,
                (false, false) => continue,
            };
            // SAFETY: by the contract above.
            unsafe { report(act, part.kind, part.folder, part.path) };
            if is_success && part.kind == Kind::OpenedNew {
                // SAFETY: the same.
                unsafe { report(act, Kind::Born, part.folder, part.path) };
            }
        }
    }
}

/// The next library's function of a name, looked up once.
struct Next(AtomicPtr<c_void>);

impl Next {
    const fn unknown() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns null if no library has it.
    fn find(&self, name: &CStr) -> *mut c_void {
        let mut found = self.0.load(Ordering::Relaxed);
        if found.is_null() {
            found = elf::find(name);
            self.0.store(found, Ordering::Relaxed);
        }
        found
    }
}

/// Result of a function.
trait Answer {
    /// The result if no library has the function, which the program could then not have called.
    const MISSING: Self;
    fn is_success(&self) -> bool;
}

impl Answer for c_int {
    const MISSING: Self = -1;
    fn is_success(&self) -> bool {
        *self >= 0
    }
}

impl Answer for *mut c_void {
    const MISSING: Self = ptr::null_mut();
    fn is_success(&self) -> bool {
        !self.is_null()
    }
}

/// Defines functions by name, arguments, result and change. The third argument of `open` is only there if the flags say
/// so; in the calling conventions of both machines it is passed on like any other.
macro_rules! replace {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty = $change:expr;)*) => { $(
        /// # Safety
        /// The same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            static NEXT: Next = Next::unknown();
            let next = NEXT.find(name(concat!(stringify!($name), "\0")));
            if next.is_null() {
                return <$result>::MISSING;
            }
            let mut change = if is_on() { $change } else { Change::NONE };
            // SAFETY: what is likely was looked up.
            unsafe { change.announce() };
            // SAFETY: a function of this name, which has this type.
            let next: unsafe extern "C" fn($($type),*) -> $result = unsafe { transmute(next) };
            // SAFETY: by the contract above.
            let result = unsafe { next($($argument),*) };
            // SAFETY: the same, or the call succeeded.
            unsafe { change.conclude(result.is_success()) };
            result
        }
    )* };
}

replace! {
    open(path: Text, flags: c_int, mode: c_uint) -> c_int = Change::open(AT_FDCWD, path, flags);
    open64(path: Text, flags: c_int, mode: c_uint) -> c_int = Change::open(AT_FDCWD, path, flags);
    __open_2(path: Text, flags: c_int) -> c_int = Change::open(AT_FDCWD, path, flags);
    __open64_2(path: Text, flags: c_int) -> c_int = Change::open(AT_FDCWD, path, flags);
    openat(folder: c_int, path: Text, flags: c_int, mode: c_uint) -> c_int = Change::open(folder, path, flags);
    openat64(folder: c_int, path: Text, flags: c_int, mode: c_uint) -> c_int = Change::open(folder, path, flags);
    __openat_2(folder: c_int, path: Text, flags: c_int) -> c_int = Change::open(folder, path, flags);
    __openat64_2(folder: c_int, path: Text, flags: c_int) -> c_int = Change::open(folder, path, flags);
    creat(path: Text, mode: c_uint) -> c_int = Change::open(AT_FDCWD, path, O_CREAT);
    creat64(path: Text, mode: c_uint) -> c_int = Change::open(AT_FDCWD, path, O_CREAT);
    fopen(path: Text, mode: Text) -> *mut c_void = Change::stream(path, mode);
    fopen64(path: Text, mode: Text) -> *mut c_void = Change::stream(path, mode);
    freopen(path: Text, mode: Text, stream: *mut c_void) -> *mut c_void = Change::stream(path, mode);
    freopen64(path: Text, mode: Text, stream: *mut c_void) -> *mut c_void = Change::stream(path, mode);
    mkstemp(path: Text) -> c_int = Change::temporary(path);
    mkstemp64(path: Text) -> c_int = Change::temporary(path);
    mkostemp(path: Text, flags: c_int) -> c_int = Change::temporary(path);
    mkostemp64(path: Text, flags: c_int) -> c_int = Change::temporary(path);
    mkstemps(path: Text, suffix: c_int) -> c_int = Change::temporary(path);
    mkstemps64(path: Text, suffix: c_int) -> c_int = Change::temporary(path);
    mkostemps(path: Text, suffix: c_int, flags: c_int) -> c_int = Change::temporary(path);
    mkostemps64(path: Text, suffix: c_int, flags: c_int) -> c_int = Change::temporary(path);
    mkdtemp(path: Text) -> *mut c_void = Change::temporary(path);
    mkdir(path: Text, mode: c_uint) -> c_int = Change::created(path);
    mkdirat(folder: c_int, path: Text, mode: c_uint) -> c_int = Change::of(Kind::Created, folder, path);
    mkfifo(path: Text, mode: c_uint) -> c_int = Change::created(path);
    mkfifoat(folder: c_int, path: Text, mode: c_uint) -> c_int = Change::of(Kind::Created, folder, path);
    mknod(path: Text, mode: c_uint, device: c_ulong) -> c_int = Change::created(path);
    mknodat(folder: c_int, path: Text, mode: c_uint, device: c_ulong) -> c_int =
        Change::of(Kind::Created, folder, path);
    symlink(text: Text, path: Text) -> c_int = Change::created(path);
    symlinkat(text: Text, folder: c_int, path: Text) -> c_int = Change::of(Kind::Created, folder, path);
    link(from: Text, path: Text) -> c_int = Change::created(path);
    linkat(base: c_int, from: Text, folder: c_int, path: Text, flags: c_int) -> c_int =
        Change::of(Kind::Created, folder, path);
    truncate(path: Text, len: c_long) -> c_int = Change::of(Kind::Opened, AT_FDCWD, path);
    truncate64(path: Text, len: c_long) -> c_int = Change::of(Kind::Opened, AT_FDCWD, path);
    rename(from: Text, to: Text) -> c_int = Change::rename((AT_FDCWD, from), (AT_FDCWD, to));
    renameat(base: c_int, from: Text, folder: c_int, to: Text) -> c_int =
        Change::rename((base, from), (folder, to));
    renameat2(base: c_int, from: Text, folder: c_int, to: Text, flags: c_uint) -> c_int =
        Change::rename_with((base, from), (folder, to), flags);
    unlink(path: Text) -> c_int = Change::gone(path);
    unlinkat(folder: c_int, path: Text, flags: c_int) -> c_int = Change::of(Kind::Gone, folder, path);
    rmdir(path: Text) -> c_int = Change::gone(path);
    remove(path: Text) -> c_int = Change::gone(path);
    chmod(path: Text, mode: c_uint) -> c_int = Change::attributes(AT_FDCWD, path, 0);
    fchmodat(folder: c_int, path: Text, mode: c_uint, flags: c_int) -> c_int =
        Change::attributes(folder, path, flags);
    utime(path: Text, times: Text) -> c_int = Change::attributes(AT_FDCWD, path, 0);
    utimes(path: Text, times: Text) -> c_int = Change::attributes(AT_FDCWD, path, 0);
    lutimes(path: Text, times: Text) -> c_int = Change::attributes(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW);
    futimesat(folder: c_int, path: Text, times: Text) -> c_int = Change::attributes(folder, path, 0);
    utimensat(folder: c_int, path: Text, times: Text, flags: c_int) -> c_int =
        Change::attributes(folder, path, flags);
    setxattr(path: Text, name: Text, value: Text, len: c_ulong, flags: c_int) -> c_int =
        Change::attributes(AT_FDCWD, path, 0);
    lsetxattr(path: Text, name: Text, value: Text, len: c_ulong, flags: c_int) -> c_int =
        Change::attributes(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW);
    removexattr(path: Text, name: Text) -> c_int = Change::attributes(AT_FDCWD, path, 0);
    lremovexattr(path: Text, name: Text) -> c_int = Change::attributes(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW);
}

/// Longest path of a file of shared memory, and of a semaphore.
const SHARED_BYTES_MAX: usize = 280;

/// Path of the file that the C library uses for shared memory or a semaphore; empty for a name that has none.
struct SharedPath([u8; SHARED_BYTES_MAX]);

impl SharedPath {
    /// # Safety
    /// The name ends with a zero, or is null.
    unsafe fn of(prefix: &[u8], name: Text) -> Self {
        let mut path = [0; SHARED_BYTES_MAX];
        let name = if name.is_null() {
            b""
        } else {
            // SAFETY: by the contract above.
            unsafe { CStr::from_ptr(name) }.to_bytes()
        };
        let start = name.iter().position(|byte| *byte != b'/');
        let name = start
            .and_then(|start| name.get(start..))
            .unwrap_or_default();
        let all = prefix.len() + name.len();
        if !name.is_empty() && all < SHARED_BYTES_MAX {
            path[..prefix.len()].copy_from_slice(prefix);
            path[prefix.len()..all].copy_from_slice(name);
        }
        Self(path)
    }

    fn text(&self) -> Text {
        self.0.as_ptr().cast()
    }
}

/// Defines functions that the C library carries out with a file of shared memory.
macro_rules! replace_shared {
    ($($name:ident($of:ident, $($argument:ident: $type:ty),*) -> $result:ty, $prefix:expr, $path:ident => $change:expr;)*) => { $(
        /// # Safety
        /// The same as for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($of: Text, $($argument: $type),*) -> $result {
            static NEXT: Next = Next::unknown();
            let next = NEXT.find(name(concat!(stringify!($name), "\0")));
            if next.is_null() {
                return <$result>::MISSING;
            }
            // SAFETY: by the contract above.
            let path = unsafe { SharedPath::of($prefix, $of) };
            let $path = path.text();
            let mut change = if is_on() && path.0[0] != 0 { $change } else { Change::NONE };
            // SAFETY: the path ends with a zero.
            unsafe { change.announce() };
            // SAFETY: a function of this name, which has this type.
            let next: unsafe extern "C" fn(Text, $($type),*) -> $result = unsafe { transmute(next) };
            // SAFETY: by the contract above.
            let result = unsafe { next($of, $($argument),*) };
            // SAFETY: the path ends with a zero.
            unsafe { change.conclude(result.is_success()) };
            result
        }
    )* };
}

// The last two arguments of `sem_open` are only there if the flags say so.
replace_shared! {
    shm_open(shared, flags: c_int, mode: c_uint) -> c_int, b"/dev/shm/", path => Change::open(AT_FDCWD, path, flags);
    shm_unlink(shared,) -> c_int, b"/dev/shm/", path => Change::gone(path);
    sem_open(shared, flags: c_int, mode: c_uint, value: c_uint) -> *mut c_void, b"/dev/shm/sem.", path =>
        Change::open(AT_FDCWD, path, flags | O_RDWR);
    sem_unlink(shared,) -> c_int, b"/dev/shm/sem.", path => Change::gone(path);
}

/// Gives a socket its address, like the C library's function, and reports the file of a unix socket.
///
/// # Safety
/// The same as for that function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(socket: c_int, address: *const u8, len: c_uint) -> c_int {
    static NEXT: Next = Next::unknown();
    let next = NEXT.find(c"bind");
    if next.is_null() {
        return c_int::MISSING;
    }
    // SAFETY: a function of this name, which has this type.
    let next: unsafe extern "C" fn(c_int, *const u8, c_uint) -> c_int = unsafe { transmute(next) };
    // SAFETY: by the contract above.
    let result = unsafe { next(socket, address, len) };
    if result == 0 && is_on() {
        // SAFETY: the kernel has read so many bytes.
        let address = unsafe { core::slice::from_raw_parts(address, len as usize) };
        let mut path = [0; UNIX_PATH_BYTES_MAX + 1];
        if let Some((family, given)) = address.split_first_chunk()
            && u16::from_ne_bytes(*family) == AF_UNIX
            && given.first().is_some_and(|first| *first != 0)
            && let Some(room) = path.get_mut(..given.len())
        {
            room.copy_from_slice(given);
            // SAFETY: the path ends with a zero.
            unsafe { report(Act::Add, Kind::Created, AT_FDCWD, path.as_ptr().cast()) };
        }
    }
    result
}

const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}
