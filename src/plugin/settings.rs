#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Kernel settings of an IPC namespace, for a CRIU without privileges on the machine. They belong to root, which is not
//! mapped in the namespace of an ordinary user, so CRIU may not change them.
//!
//! Such a setting has the kernel's default at the dump and at the restore. When CRIU opens it for writing (`EACCES`), it
//! gets a descriptor for reading. A write of the present value counts as successful; another value is an error.

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_int};

use super::kernel::{EACCES, O_CLOEXEC, openat, read_some};

/// Beginning of the path of a setting, from `/proc` on.
const SETTINGS: &[u8] = b"sys/";
/// Longest value.
const VALUE_BYTES_MAX: usize = 256;
const O_ACCMODE: c_int = 3;

/// A setting that CRIU has open and has not written yet.
struct Open {
    file: c_int,
    value: [u8; VALUE_BYTES_MAX],
    len: usize,
}

struct Shared(UnsafeCell<Option<Open>>);

// SAFETY: CRIU has one thread.
unsafe impl Sync for Shared {}

static OPEN: Shared = Shared(UnsafeCell::new(None));

/// Answers an `openat` that the kernel has refused with `EACCES`. Returns `None` if the refusal stays.
pub fn answer(folder: c_int, path: &CStr, flags: c_int) -> Option<Result<c_int, c_int>> {
    if flags & O_ACCMODE == 0 || !path.to_bytes().starts_with(SETTINGS) {
        return None;
    }
    let file = openat(folder, path, O_CLOEXEC).ok()?;
    let mut value = [0; VALUE_BYTES_MAX];
    let len = read_some(file, &mut value).unwrap_or(0);
    // SAFETY: CRIU has one thread, and nothing keeps a reference across this.
    unsafe { *OPEN.0.get() = Some(Open { file, value, len }) };
    Some(Ok(file))
}

/// Answers a `write`. Returns `None` if the file is not a setting that was opened here.
pub fn write(file: c_int, bytes: &[u8]) -> Option<Result<usize, c_int>> {
    // SAFETY: CRIU has one thread, and nothing keeps a reference across this.
    let open = unsafe { &mut *OPEN.0.get() };
    let open = open.take_if(|open| open.file == file)?;
    let is_set = open.len < VALUE_BYTES_MAX && same(&open.value[..open.len], bytes);
    Some(if is_set { Ok(bytes.len()) } else { Err(EACCES) })
}

/// Returns true if both texts have the same words.
fn same(one: &[u8], other: &[u8]) -> bool {
    words(one).next().is_some() && words(one).eq(words(other))
}

fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty())
}
