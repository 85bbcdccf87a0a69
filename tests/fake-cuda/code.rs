//! Codes of `CUresult`, with their names and texts from `cuGetErrorName` and `cuGetErrorString`.

use std::ffi::{CStr, c_char, c_int};

/// Error, as the number that C sees.
pub type Code = c_int;
/// Result of a call.
pub type Answer = Result<(), Code>;

pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const NOT_INITIALIZED: Code = 3;
pub const INVALID_DEVICE: Code = 101;
pub const INVALID_CONTEXT: Code = 201;
pub const OPERATING_SYSTEM: Code = 304;
pub const INVALID_HANDLE: Code = 400;
pub const ILLEGAL_STATE: Code = 401;
pub const NOT_READY: Code = 600;
pub const NOT_SUPPORTED: Code = 801;
pub const UNKNOWN: Code = 999;

/// Number, name, text.
const TEXTS: [(Code, &CStr, &CStr); 12] = [
    (0, c"CUDA_SUCCESS", c"no error"),
    (
        INVALID_VALUE,
        c"CUDA_ERROR_INVALID_VALUE",
        c"invalid argument",
    ),
    (OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (
        NOT_INITIALIZED,
        c"CUDA_ERROR_NOT_INITIALIZED",
        c"initialization error",
    ),
    (
        INVALID_DEVICE,
        c"CUDA_ERROR_INVALID_DEVICE",
        c"invalid device ordinal",
    ),
    (
        INVALID_CONTEXT,
        c"CUDA_ERROR_INVALID_CONTEXT",
        c"invalid device context",
    ),
    (
        OPERATING_SYSTEM,
        c"CUDA_ERROR_OPERATING_SYSTEM",
        c"OS call failed or operation not supported on this OS",
    ),
    (
        INVALID_HANDLE,
        c"CUDA_ERROR_INVALID_HANDLE",
        c"invalid resource handle",
    ),
    (
        ILLEGAL_STATE,
        c"CUDA_ERROR_ILLEGAL_STATE",
        c"the operation cannot be performed in the present state",
    ),
    (NOT_READY, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (
        NOT_SUPPORTED,
        c"CUDA_ERROR_NOT_SUPPORTED",
        c"operation not supported",
    ),
    (UNKNOWN, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code {
    tell(code, text, |entry| entry.1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    tell(code, text, |entry| entry.2)
}

type Entry = (Code, &'static CStr, &'static CStr);

fn tell(code: Code, text: *mut *const c_char, of: impl Fn(&Entry) -> &'static CStr) -> Code {
    let found = TEXTS.iter().find(|entry| entry.0 == code);
    let pointer = found.map_or(std::ptr::null(), |entry| of(entry).as_ptr());
    match super::c::give(text, pointer) {
        Ok(()) if found.is_some() => 0,
        Ok(()) => INVALID_VALUE,
        Err(error) => error,
    }
}
