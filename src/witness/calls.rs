//! Replacements for the functions of the C library that create, open for writing, rename or remove files.
//!
//! Each calls the next library's function of the name, with the arguments that it was given, and reports the change if it
//! succeeded. A job that is killed in between has changed a file without a report, and its restore is refused.

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use super::elf;
use super::report::{Kind, is_on, report};
use super::sys::{AT_FDCWD, is_missing};

const O_ACCMODE: c_int = 3;
const O_CREAT: c_int = 0o100;
const O_TRUNC: c_int = 0o1000;
const O_PATH: c_int = 0o10_000_000;
/// The bit by which `O_TMPFILE` differs from `O_DIRECTORY`.
const O_TMPFILE: c_int = 0o20_000_000;

type Text = *const c_char;

/// A change that a call makes if it succeeds.
enum Change {
    None,
    One(Kind, c_int, Text),
    Renamed((c_int, Text), Kind, (c_int, Text)),
}

impl Change {
    /// Determines the change by an open with these flags.
    fn open(folder: c_int, path: Text, flags: c_int) -> Self {
        let writes = flags & O_ACCMODE != 0 || flags & (O_CREAT | O_TRUNC) != 0;
        if !writes || flags & (O_PATH | O_TMPFILE) != 0 {
            return Self::None;
        }
        if flags & O_CREAT != 0 && is_missing(folder, path) {
            Self::One(Kind::Created, folder, path)
        } else {
            Self::One(Kind::Opened, folder, path)
        }
    }

    /// Determines the change by an open of the standard I/O functions.
    fn stream(path: Text, mode: Text) -> Self {
        if path.is_null() || mode.is_null() {
            return Self::None;
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
            (false, true) => Self::One(Kind::Opened, AT_FDCWD, path),
            (false, false) => Self::None,
        }
    }

    fn rename(from: (c_int, Text), to: (c_int, Text)) -> Self {
        let kind = if is_missing(to.0, to.1) {
            Kind::MovedToNew
        } else {
            Kind::Moved
        };
        Self::Renamed(from, kind, to)
    }

    fn created(path: Text) -> Self {
        Self::One(Kind::Created, AT_FDCWD, path)
    }

    fn gone(path: Text) -> Self {
        Self::One(Kind::Gone, AT_FDCWD, path)
    }

    /// # Safety
    /// The call succeeded, so its paths end with a zero.
    unsafe fn report(self) {
        // SAFETY: by the contract above.
        unsafe {
            match self {
                Self::None => {}
                Self::One(kind, folder, path) => report(kind, folder, path),
                Self::Renamed(from, kind, to) => {
                    report(Kind::Gone, from.0, from.1);
                    report(kind, to.0, to.1);
                }
            }
        }
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
            static NEXT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            let mut next = NEXT.load(Ordering::Relaxed);
            if next.is_null() {
                next = elf::find(name(concat!(stringify!($name), "\0")));
                NEXT.store(next, Ordering::Relaxed);
            }
            if next.is_null() {
                return <$result>::MISSING;
            }
            let change = if is_on() { $change } else { Change::None };
            // SAFETY: a function of this name, which has this type.
            let next: unsafe extern "C" fn($($type),*) -> $result = unsafe { transmute(next) };
            // SAFETY: by the contract above.
            let result = unsafe { next($($argument),*) };
            if result.is_success() {
                // SAFETY: the call succeeded.
                unsafe { change.report() };
            }
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
    mkstemp(path: Text) -> c_int = Change::created(path);
    mkstemp64(path: Text) -> c_int = Change::created(path);
    mkostemp(path: Text, flags: c_int) -> c_int = Change::created(path);
    mkostemp64(path: Text, flags: c_int) -> c_int = Change::created(path);
    mkstemps(path: Text, suffix: c_int) -> c_int = Change::created(path);
    mkstemps64(path: Text, suffix: c_int) -> c_int = Change::created(path);
    mkostemps(path: Text, suffix: c_int, flags: c_int) -> c_int = Change::created(path);
    mkostemps64(path: Text, suffix: c_int, flags: c_int) -> c_int = Change::created(path);
    mkdtemp(path: Text) -> *mut c_void = Change::created(path);
    mkdir(path: Text, mode: c_uint) -> c_int = Change::created(path);
    mkdirat(folder: c_int, path: Text, mode: c_uint) -> c_int = Change::One(Kind::Created, folder, path);
    symlink(text: Text, path: Text) -> c_int = Change::created(path);
    symlinkat(text: Text, folder: c_int, path: Text) -> c_int = Change::One(Kind::Created, folder, path);
    link(from: Text, path: Text) -> c_int = Change::created(path);
    linkat(base: c_int, from: Text, folder: c_int, path: Text, flags: c_int) -> c_int =
        Change::One(Kind::Created, folder, path);
    truncate(path: Text, len: c_long) -> c_int = Change::One(Kind::Opened, AT_FDCWD, path);
    truncate64(path: Text, len: c_long) -> c_int = Change::One(Kind::Opened, AT_FDCWD, path);
    rename(from: Text, to: Text) -> c_int = Change::rename((AT_FDCWD, from), (AT_FDCWD, to));
    renameat(base: c_int, from: Text, folder: c_int, to: Text) -> c_int =
        Change::rename((base, from), (folder, to));
    renameat2(base: c_int, from: Text, folder: c_int, to: Text, flags: c_uint) -> c_int =
        Change::rename((base, from), (folder, to));
    unlink(path: Text) -> c_int = Change::gone(path);
    unlinkat(folder: c_int, path: Text, flags: c_int) -> c_int = Change::One(Kind::Gone, folder, path);
    rmdir(path: Text) -> c_int = Change::gone(path);
    remove(path: Text) -> c_int = Change::gone(path);
}

const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}
