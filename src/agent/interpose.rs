//! Replacement of some driver functions by the agent's, for all ways of looking them up.
//!
//! ```text
//! dlsym(libcuda, name) ───────────▶ pick ──────▶ the agent's, if the driver's would be found
//! cuGetProcAddress(name, version) ▶ substitute ▶ the agent's, if the driver returns a known one
//! linked with -lcuda ─────────────▶ linked ────▶ the agent's, if the driver's is next; else the next one
//! ```
//! A CUDA runtime that is linked statically, one in a library, and direct users of the driver all use one of these
//! ways. Without a token in the environment, and in the child of a fork, the agent has no effect.
//!
//! A weak reference to one of these functions in a process without libcuda resolves to the agent's function, which
//! returns "not initialized". `dlsym` returns null in this case.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use super::hooks::{COUNT, HOOKS};
use super::wire::{TOKEN_LEN, TOKEN_VARIABLE};
use super::{elf, sys};

/// `dlsym` handles.
const RTLD_DEFAULT: usize = 0;
const RTLD_NEXT: usize = usize::MAX;
const RTLD_LAZY: c_int = 1;
const RTLD_NOLOAD: c_int = 4;

const LIBRARY: &CStr = c"libcuda.so.1";

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type ProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;

/// Driver function that the agent replaces.
#[derive(Clone, Copy)]
pub struct Hook {
    /// Its name in libcuda.
    pub symbol: &'static CStr,
    /// Name in `cuGetProcAddress`, and the first version that has it.
    pub base: &'static CStr,
    pub version: c_int,
    /// Replacement for callers that looked up a pointer.
    pub picked: *const (),
    /// Replacement for linked callers.
    pub linked: *const (),
}

/// Result of [`pick`]: a function, or the `dlsym` to continue with.
#[repr(C)]
pub struct Picked {
    answer: *mut c_void,
    onwards: *mut c_void,
}

type Pointers = [AtomicPtr<c_void>; COUNT];
#[allow(
    clippy::declare_interior_mutable_const,
    reason = "what three statics begin with"
)]
const NONE: Pointers = [const { AtomicPtr::new(ptr::null_mut()) }; COUNT];
/// Driver functions as found in its symbol table.
pub static OWN: Pointers = NONE;
/// Driver functions as returned by `cuGetProcAddress`.
static GIVEN: Pointers = NONE;
/// Functions for linked callers: the agent's `picked`, or another library's function of that name.
static LINKED: Pointers = NONE;

static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static LIBCUDA: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

const UNKNOWN: u8 = 0;
const ON: u8 = 1;
const OFF: u8 = 2;
static MODE: AtomicU8 = AtomicU8::new(UNKNOWN);
static TOKEN: [AtomicU8; TOKEN_LEN] = [const { AtomicU8::new(0) }; TOKEN_LEN];

/// Returns true if the agent is active in this process. Reads the environment once.
pub fn is_on() -> bool {
    match MODE.load(Ordering::Acquire) {
        ON => true,
        UNKNOWN => {
            let mode = if read_token() { ON } else { OFF };
            // The child of a fork may have switched the agent off meanwhile.
            let _ = MODE.compare_exchange(UNKNOWN, mode, Ordering::AcqRel, Ordering::Relaxed);
            MODE.load(Ordering::Acquire) == ON
        }
        _ => false,
    }
}

/// Passes every call to the driver from now on.
pub fn switch_off() {
    MODE.store(OFF, Ordering::Release);
}

fn read_token() -> bool {
    let mut name = [0u8; TOKEN_VARIABLE.len() + 1];
    name[..TOKEN_VARIABLE.len()].copy_from_slice(TOKEN_VARIABLE.as_bytes());
    // SAFETY: the name ends with a zero.
    let value = unsafe { sys::getenv(name.as_ptr().cast()) };
    if value.is_null() {
        return false;
    }
    // SAFETY: values of the environment end with a zero.
    let value = unsafe { CStr::from_ptr(value) }.to_bytes();
    let is_token = value.len() == TOKEN_LEN && value.iter().all(u8::is_ascii_hexdigit);
    for (kept, byte) in TOKEN.iter().zip(value) {
        kept.store(*byte, Ordering::Relaxed);
    }
    is_token
}

/// Returns the run's token; valid if [`is_on`].
pub fn token() -> [u8; TOKEN_LEN] {
    core::array::from_fn(|index| TOKEN[index].load(Ordering::Relaxed))
}

/// Implements the agent's `dlsym`. All other names cost two comparisons of a byte.
///
/// # Safety
/// The same as for `dlsym`.
pub unsafe extern "C" fn pick(handle: usize, name: *const c_char) -> Picked {
    let onwards = Picked {
        answer: ptr::null_mut(),
        onwards: real_dlsym() as *mut c_void,
    };
    // SAFETY: by the contract above; `||` reads the second byte only if the first is not zero.
    if unsafe {
        name.is_null() || *name != b'c'.cast_signed() || *name.add(1) != b'u'.cast_signed()
    } {
        return onwards;
    }
    // SAFETY: by the contract above.
    let name = unsafe { CStr::from_ptr(name) };
    let Some(index) = HOOKS.iter().position(|hook| hook.symbol == name) else {
        return onwards;
    };
    let own = find_own(index);
    // After switching off, the agent's symbols still exist, but must not be found.
    let ours = || if is_on() { ours(index) } else { own };
    let next = || real(RTLD_NEXT, name);
    let found = match handle {
        RTLD_NEXT if !own.is_null() => return onwards,
        RTLD_DEFAULT | RTLD_NEXT => next(),
        handle => match real(handle, name) {
            // A handle of all libraries, in which the agent comes before the driver.
            found if ptr::eq(found.cast(), HOOKS[index].linked) => match next() {
                found if found.is_null() && !own.is_null() => own,
                found => found,
            },
            found => found,
        },
    };
    let answer = match found {
        found if found.is_null() && handle == RTLD_DEFAULT && !own.is_null() => ours(),
        found if found == own && !own.is_null() => ours(),
        found => found,
    };
    Picked {
        answer,
        onwards: nothing as *mut c_void,
    }
}

/// Replacement for `dlsym` that finds nothing.
extern "C" fn nothing(_handle: usize, _name: *const c_char) -> *mut c_void {
    ptr::null_mut()
}

fn ours(index: usize) -> *mut c_void {
    HOOKS[index].picked.cast_mut().cast()
}

/// Returns the C library's `dlsym`, or a replacement that finds nothing.
fn real_dlsym() -> Dlsym {
    let mut function = DLSYM.load(Ordering::Relaxed);
    if function.is_null() {
        function = elf::find(c"dlsym");
        if function.is_null() {
            function = nothing as *mut c_void;
        } else {
            DLSYM.store(function, Ordering::Relaxed);
        }
    }
    // SAFETY: `dlsym`, which has this type.
    unsafe { transmute(function) }
}

/// Calls `dlsym` as if the agent's did not exist; `RTLD_NEXT` means after the agent.
fn real(handle: usize, name: &CStr) -> *mut c_void {
    let handle = ptr::with_exposed_provenance_mut(handle);
    // SAFETY: the name ends with a zero. An invalid handle is the caller's error, and `dlsym` reports it.
    let found = unsafe { real_dlsym()(handle, name.as_ptr()) };
    // Prevents a tail call, because the C library examines the return address.
    core::hint::black_box(found)
}

/// Returns a handle of libcuda if it is loaded.
fn libcuda() -> *mut c_void {
    let mut library = LIBCUDA.load(Ordering::Acquire);
    if !library.is_null() {
        return library;
    }
    let open = elf::find(c"dlopen");
    if open.is_null() {
        return library;
    }
    // SAFETY: `dlopen`, which has this type.
    let open: Dlopen = unsafe { transmute(open) };
    // SAFETY: the name ends with a zero. The handle is never closed, so its functions stay valid.
    library = unsafe { open(LIBRARY.as_ptr(), RTLD_LAZY | RTLD_NOLOAD) };
    if !library.is_null() {
        LIBCUDA.store(library, Ordering::Release);
    }
    library
}

/// Returns a function of the driver, or null.
pub fn symbol(name: *const c_char) -> *mut c_void {
    let library = libcuda();
    if library.is_null() {
        return library;
    }
    // SAFETY: the handle stays open, and the names are constants of the agent.
    unsafe { real_dlsym()(library, name) }
}

/// Returns the driver's function of a hook, or null.
fn find_own(index: usize) -> *mut c_void {
    let mut own = OWN[index].load(Ordering::Acquire);
    if own.is_null() {
        own = symbol(HOOKS[index].symbol.as_ptr());
        if !own.is_null() {
            OWN[index].store(own, Ordering::Release);
        }
    }
    own
}

/// Returns the driver's function behind a replacement that a caller received.
pub fn own(index: usize) -> *mut c_void {
    OWN[index].load(Ordering::Acquire)
}

/// Returns the function for a caller that is linked to the name: the agent's, another library's, or null.
pub fn linked(index: usize) -> *mut c_void {
    let known = LINKED[index].load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let (own, next) = (find_own(index), real(RTLD_NEXT, HOOKS[index].symbol));
    let target = match next {
        next if next.is_null() || next == own => own,
        next => next,
    };
    let target = if target == own && !own.is_null() {
        ours(index)
    } else {
        target
    };
    LINKED[index].store(target, Ordering::Release);
    target
}

/// Replaces a function returned by `cuGetProcAddress`, which has checked version and flags.
///
/// # Safety
/// `pointer` is null or points to such a result.
pub unsafe fn substitute(pointer: *mut *mut c_void) {
    if pointer.is_null() {
        return;
    }
    // SAFETY: by the contract above.
    let found = unsafe { *pointer };
    if found.is_null() {
        return;
    }
    for index in 0..COUNT {
        let own = find_own(index);
        if !own.is_null() && (found == own || found == given(index)) {
            // SAFETY: by the contract above.
            unsafe { *pointer = ours(index) };
            return;
        }
    }
}

/// Returns the pointer that `cuGetProcAddress` gives for a hook, if it differs from the symbol's.
fn given(index: usize) -> *mut c_void {
    let known = GIVEN[index].load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let ask = symbol(c"cuGetProcAddress".as_ptr());
    let mut found = ptr::null_mut();
    if !ask.is_null() {
        // SAFETY: the driver's function, which has this type since CUDA 11.3.
        let ask: ProcAddress = unsafe { transmute(ask) };
        let hook = &HOOKS[index];
        // SAFETY: the name ends with a zero, and `found` has room for the result.
        let code = unsafe { ask(hook.base.as_ptr(), &raw mut found, hook.version, 0) };
        if code != 0 || found.is_null() {
            found = own(index);
        }
        GIVEN[index].store(found, Ordering::Release);
    }
    found
}
