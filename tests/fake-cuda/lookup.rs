//! The function `cuGetProcAddress`, by which the CUDA runtime finds every function of the driver.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::code::{Answer, INVALID_VALUE};
use super::{c, context, copy, memory, programs, virtual_memory};

/// Version of CUDA 13.0, driver 580.
pub const VERSION: c_int = 13000;
/// `CUDA_ERROR_NOT_FOUND`, which only the first version of the call returns.
const NOT_FOUND: c_int = 500;

/// Function by its name with the version suffix; `since` is in the form of `cuDriverGetVersion`.
pub struct Entry {
    pub name: &'static str,
    pub since: c_int,
    pub address: usize,
}

/// `CUdriverProcAddressQueryResult`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Success = 0,
    NoSymbol = 1,
    TooNew = 2,
}

#[unsafe(no_mangle)]
extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    c::give(version, VERSION).err().unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    _flags: u64,
) -> c_int {
    match find(symbol, function, version) {
        Ok(Found::Success) => 0,
        Ok(Found::NoSymbol | Found::TooNew) => NOT_FOUND,
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> c_int {
    match find(symbol, function, version) {
        Ok(found) => {
            c::give_if_asked(status, found as c_int);
            0
        }
        Err(code) => code,
    }
}

/// Finds the newest form of the function in the version.
fn find(symbol: *const c_char, function: *mut *mut c_void, version: c_int) -> Result<Found, c_int> {
    if symbol.is_null() || version > VERSION {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller passes a text that ends with a zero.
    let symbol = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let forms: Vec<Entry> = all()
        .into_iter()
        .filter(|entry| base(entry.name) == symbol)
        .collect();
    let best = forms
        .iter()
        .filter(|entry| entry.since <= version)
        .max_by_key(|entry| entry.since);
    let address = best.map_or(std::ptr::null_mut(), |entry| entry.address as *mut c_void);
    give(function, address)?;
    Ok(match best {
        Some(_) => Found::Success,
        None if forms.is_empty() => Found::NoSymbol,
        None => Found::TooNew,
    })
}

fn give(at: *mut *mut c_void, address: *mut c_void) -> Answer {
    c::give(at, address)
}

/// Returns the name without `_v2` and similar suffixes.
fn base(name: &str) -> &str {
    let suffixes = ["_v2", "_v3", "_v4"];
    suffixes
        .iter()
        .find_map(|suffix| name.strip_suffix(suffix))
        .unwrap_or(name)
}

fn all() -> Vec<Entry> {
    let ungated = [
        ("cuInit", 2000, context::cuInit as *const ()),
        ("cuDriverGetVersion", 2020, cuDriverGetVersion as *const ()),
        ("cuGetProcAddress", 11030, cuGetProcAddress as *const ()),
        (
            "cuGetProcAddress_v2",
            12000,
            cuGetProcAddress_v2 as *const (),
        ),
        (
            "cuGetErrorName",
            6000,
            super::code::cuGetErrorName as *const (),
        ),
        (
            "cuGetErrorString",
            6000,
            super::code::cuGetErrorString as *const (),
        ),
    ];
    let ungated = ungated.map(|(name, since, address)| Entry {
        name,
        since,
        address: address as usize,
    });
    let tables = [
        context::table(),
        memory::table(),
        virtual_memory::table(),
        copy::table(),
        programs::table(),
    ];
    ungated
        .into_iter()
        .chain(tables.into_iter().flatten())
        .collect()
}
