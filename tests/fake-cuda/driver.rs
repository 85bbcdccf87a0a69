//! Driver as the sample jobs use it: found as the CUDA runtime does (`dlsym` of `cuGetProcAddress_v2`, all other
//! functions through that).
#![allow(
    dead_code,
    unsafe_code,
    reason = "calls the driver through C; each job uses a part of it"
)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::transmute_copy;
use std::process::exit;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}
const RTLD_NOW: c_int = 2;

/// Ends the program if a call fails.
pub fn must(call: &str, code: c_int) {
    if code != 0 {
        eprintln!("{call} answered {code}");
        exit(70);
    }
}

type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
pub type UntilFile = unsafe extern "C" fn(*const c_char) -> c_int;

/// `CUipcMemHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Handle(pub [u8; 64]);

/// Functions that jobs use.
#[derive(Clone, Copy)]
pub struct Driver {
    pub init: unsafe extern "C" fn(u32) -> c_int,
    pub count: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub retain: unsafe extern "C" fn(*mut usize, c_int) -> c_int,
    pub set_current: unsafe extern "C" fn(usize) -> c_int,
    pub alloc: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    pub free: unsafe extern "C" fn(u64) -> c_int,
    pub fill: unsafe extern "C" fn(u64, u8, usize) -> c_int,
    pub upload: unsafe extern "C" fn(u64, *const u64, usize) -> c_int,
    pub download: unsafe extern "C" fn(*mut u64, u64, usize) -> c_int,
    pub copy: unsafe extern "C" fn(u64, u64, usize) -> c_int,
    pub synchronize: unsafe extern "C" fn() -> c_int,
    pub create: unsafe extern "C" fn(*mut u64, usize, *const [i32; 8], u64) -> c_int,
    pub export: unsafe extern "C" fn(*mut c_int, u64, c_int, u64) -> c_int,
    pub import: unsafe extern "C" fn(*mut u64, *mut c_void, c_int) -> c_int,
    pub release: unsafe extern "C" fn(u64) -> c_int,
    pub kernel: UntilFile,
    pub hold: UntilFile,
    pub get_handle: unsafe extern "C" fn(*mut Handle, u64) -> c_int,
    pub open_handle: unsafe extern "C" fn(*mut u64, Handle, u32) -> c_int,
    pub close_handle: unsafe extern "C" fn(u64) -> c_int,
}

impl Driver {
    pub fn load() -> Self {
        // SAFETY: a library for any program.
        let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW) };
        let direct = |name: &str| {
            let name = CString::new(name).unwrap();
            // SAFETY: an open library, or none; then nothing is found.
            let found = unsafe { dlsym(library, name.as_ptr()) };
            if library.is_null() || found.is_null() {
                eprintln!("no {name:?}");
                exit(71);
            }
            found
        };
        // SAFETY: the type of the function of that name.
        let first: GetProcAddress = unsafe { transmute_copy(&direct("cuGetProcAddress_v2")) };
        let lookup = ask(first, "cuGetProcAddress", 12000);
        // SAFETY: the type of the function of that name since CUDA 12.0.
        let lookup: GetProcAddress = unsafe { transmute_copy(&lookup) };
        let get = |name, version| ask(lookup, name, version);
        // SAFETY: the types of the functions of these names in these versions.
        unsafe {
            Self {
                init: transmute_copy(&get("cuInit", 2000)),
                count: transmute_copy(&get("cuDeviceGetCount", 2000)),
                retain: transmute_copy(&get("cuDevicePrimaryCtxRetain", 7000)),
                set_current: transmute_copy(&get("cuCtxSetCurrent", 4000)),
                alloc: transmute_copy(&get("cuMemAlloc", 3020)),
                free: transmute_copy(&get("cuMemFree", 3020)),
                fill: transmute_copy(&get("cuMemsetD8", 3020)),
                upload: transmute_copy(&get("cuMemcpyHtoD", 3020)),
                download: transmute_copy(&get("cuMemcpyDtoH", 3020)),
                copy: transmute_copy(&get("cuMemcpyDtoD", 3020)),
                synchronize: transmute_copy(&get("cuCtxSynchronize", 2000)),
                create: transmute_copy(&get("cuMemCreate", 10020)),
                export: transmute_copy(&get("cuMemExportToShareableHandle", 10020)),
                import: transmute_copy(&get("cuMemImportFromShareableHandle", 10020)),
                release: transmute_copy(&get("cuMemRelease", 10020)),
                get_handle: transmute_copy(&get("cuIpcGetMemHandle", 4010)),
                open_handle: transmute_copy(&get("cuIpcOpenMemHandle", 11000)),
                close_handle: transmute_copy(&get("cuIpcCloseMemHandle", 4010)),
                kernel: transmute_copy(&direct("fakeKernel")),
                hold: transmute_copy(&direct("fakeHoldDriverLock")),
            }
        }
    }
}

fn ask(lookup: GetProcAddress, name: &str, version: c_int) -> *mut c_void {
    let name = CString::new(name).unwrap();
    let (mut found, mut status) = (std::ptr::null_mut(), 0);
    // SAFETY: a text and room for both results.
    let code = unsafe { lookup(name.as_ptr(), &raw mut found, version, 0, &raw mut status) };
    must("cuGetProcAddress", code);
    if found.is_null() || status != 0 {
        eprintln!("no {name:?} of {version}: {status}");
        exit(71);
    }
    found
}
