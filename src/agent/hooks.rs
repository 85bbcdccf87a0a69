//! Replacements for driver functions, each in two forms: one returned as a pointer, and one exported as a symbol for
//! linked callers. Those that only wait at the gate are in `gate`.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::mem::transmute;

use super::driver::{Access, NOT_INITIALIZED, Properties};
use super::interpose::{self, Hook};
use super::share::{self, IpcHandle};
use super::{contexts, gate, memory, program_memory};

// SAFETY: contains only addresses of functions and of text.
unsafe impl Sync for Hook {}

macro_rules! hooks {
    ($($symbol:ident = $ours:path, $base:literal, $version:literal ($($argument:ident: $type:ty),*);)*) => {
        #[allow(non_camel_case_types, reason = "numbers of the functions")]
        enum Number { $($symbol),* }

        /// The hooks whose functions are known here, by number.
        pub const TYPED: [Hook; [$($version),*].len()] = [$(Hook {
            symbol: name(concat!(stringify!($symbol), "\0")),
            base: $base,
            version: $version,
            picked: picked::$symbol as *const (),
            linked: linked::$symbol as *const (),
        }),*];

        #[allow(non_snake_case, reason = "the driver's names")]
        mod picked {
            use super::*;
            $(
                /// # Safety
                /// The same as for the driver's function; called through a pointer that replaces it.
                pub unsafe extern "C" fn $symbol($($argument: $type),*) -> c_int {
                    let real = interpose::own(Number::$symbol as usize);
                    // SAFETY: this is the driver's function of this name, which has this type; it was found before.
                    let real: unsafe extern "C" fn($($type),*) -> c_int = unsafe { transmute(real) };
                    // SAFETY: by the contract above.
                    unsafe {
                        if interpose::is_on() { $ours(real, $($argument),*) } else { real($($argument),*) }
                    }
                }
            )*
        }

        #[allow(non_snake_case, reason = "the driver's names")]
        mod linked {
            use super::*;
            $(
                /// # Safety
                /// The same as for the driver's function.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $symbol($($argument: $type),*) -> c_int {
                    let target = interpose::linked(Number::$symbol as usize);
                    if target.is_null() {
                        return NOT_INITIALIZED;
                    }
                    // SAFETY: a function of this name and type.
                    let target: unsafe extern "C" fn($($type),*) -> c_int = unsafe { transmute(target) };
                    // SAFETY: by the contract above.
                    unsafe { target($($argument),*) }
                }
            )*
        }
    };
}

hooks! {
    cuGetProcAddress = proc_address, c"cuGetProcAddress", 11030
        (name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64);
    cuGetProcAddress_v2 = proc_address_status, c"cuGetProcAddress", 12000
        (name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int);
    cuMemAlloc_v2 = memory::allocate, c"cuMemAlloc", 3020 (out: *mut u64, len: usize);
    cuMemFree_v2 = memory::free, c"cuMemFree", 3020 (address: u64);
    cuMemGetAddressRange_v2 = memory::address_range, c"cuMemGetAddressRange", 3020
        (base: *mut u64, len: *mut usize, address: u64);
    cuCtxDestroy = contexts::destroy, c"cuCtxDestroy", 2000 (context: usize);
    cuCtxDestroy_v2 = contexts::destroy, c"cuCtxDestroy", 4000 (context: usize);
    cuDevicePrimaryCtxReset = contexts::reset, c"cuDevicePrimaryCtxReset", 7000 (device: c_int);
    cuDevicePrimaryCtxReset_v2 = contexts::reset, c"cuDevicePrimaryCtxReset", 11000 (device: c_int);
    cuDevicePrimaryCtxRelease = contexts::reset, c"cuDevicePrimaryCtxRelease", 7000 (device: c_int);
    cuDevicePrimaryCtxRelease_v2 = contexts::reset, c"cuDevicePrimaryCtxRelease", 11000 (device: c_int);
    cuCtxEnablePeerAccess = contexts::enable_peer, c"cuCtxEnablePeerAccess", 4000 (peer: usize, flags: c_uint);
    cuIpcGetMemHandle = share::get_handle, c"cuIpcGetMemHandle", 4010
        (handle: *mut IpcHandle, address: u64);
    cuIpcOpenMemHandle = share::open_handle, c"cuIpcOpenMemHandle", 4010
        (address: *mut u64, handle: IpcHandle, flags: c_uint);
    cuIpcOpenMemHandle_v2 = share::open_handle, c"cuIpcOpenMemHandle", 11000
        (address: *mut u64, handle: IpcHandle, flags: c_uint);
    cuIpcCloseMemHandle = share::close_handle, c"cuIpcCloseMemHandle", 4010 (address: u64);
    cuMemCreate = program_memory::create, c"cuMemCreate", 10020
        (handle: *mut u64, len: usize, properties: *const Properties, flags: u64);
    cuMemRelease = program_memory::release, c"cuMemRelease", 10020 (handle: u64);
    cuMemMap = program_memory::map, c"cuMemMap", 10020
        (address: u64, len: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap = program_memory::unmap, c"cuMemUnmap", 10020 (address: u64, len: usize);
    cuMemSetAccess = program_memory::set_access, c"cuMemSetAccess", 10020
        (address: u64, len: usize, access: *const Access, count: usize);
    cuMemExportToShareableHandle = program_memory::export, c"cuMemExportToShareableHandle", 10020
        (out: *mut c_void, handle: u64, kind: c_int, flags: u64);
    cuMemImportFromShareableHandle = program_memory::import, c"cuMemImportFromShareableHandle", 10020
        (out: *mut u64, handle: *mut c_void, kind: c_int);
    cuMemGetAllocationPropertiesFromHandle = program_memory::get_properties,
        c"cuMemGetAllocationPropertiesFromHandle", 10020 (out: *mut Properties, handle: u64);
    cuMemRetainAllocationHandle = program_memory::retain, c"cuMemRetainAllocationHandle", 11000
        (out: *mut u64, address: *mut c_void);
    cuMemPoolExportToShareableHandle = share::export_pool, c"cuMemPoolExportToShareableHandle", 11020
        (out: *mut c_void, pool: usize, kind: c_int, flags: u64);
    cuMemPoolImportFromShareableHandle = share::import_pool, c"cuMemPoolImportFromShareableHandle", 11020
        (out: *mut usize, handle: *mut c_void, kind: c_int, flags: u64);
    cuMulticastCreate = program_memory::create_multicast, c"cuMulticastCreate", 12010
        (out: *mut u64, properties: *const c_void);
    cuMulticastBindMem = program_memory::bind_multicast, c"cuMulticastBindMem", 12010
        (multicast: u64, at: usize, handle: u64, offset: usize, len: usize, flags: u64);
    cuMulticastBindMem_v2 = program_memory::bind_multicast_of, c"cuMulticastBindMem", 13010
        (multicast: u64, device: c_int, at: usize, handle: u64, offset: usize, len: usize, flags: u64);
}

pub const COUNT: usize = TYPED.len() + gate::GATED.len();

/// All hooks by number.
pub static HOOKS: [Hook; COUNT] = {
    let mut all = [TYPED[0]; COUNT];
    let mut number = 0;
    while number < COUNT {
        all[number] = if number < TYPED.len() {
            TYPED[number]
        } else {
            gate::GATED[number - TYPED.len()]
        };
        number += 1;
    }
    all
};

pub const fn name(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

type ProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
type ProcAddressStatus =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

/// # Safety
/// The same as for `cuGetProcAddress`, which is `real`.
unsafe fn proc_address(
    real: ProcAddress,
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: by the contract above.
    unsafe {
        let code = real(name, out, version, flags);
        if code == 0 {
            interpose::substitute(out);
        }
        code
    }
}

/// # Safety
/// The same as for `cuGetProcAddress_v2`, which is `real`.
unsafe fn proc_address_status(
    real: ProcAddressStatus,
    name: *const c_char,
    out: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: by the contract above.
    unsafe {
        let code = real(name, out, version, flags, status);
        if code == 0 {
            interpose::substitute(out);
        }
        code
    }
}
