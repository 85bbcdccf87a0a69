//! The driver's C types, as `cuda.h` of CUDA 12.8 and newer lays them out.
//!
//! Only what is called here. Every argument struct is 64 bytes in every driver
//! that has the interface; fields beyond those named are reserved and zero, so
//! one layout serves all of them.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

/// `CUresult`: 0 is success.
pub(super) type CuResult = c_int;

pub(super) const SUCCESS: CuResult = 0;
pub(super) const INVALID_VALUE: CuResult = 1;
pub(super) const OUT_OF_MEMORY: CuResult = 2;
pub(super) const NOT_INITIALIZED: CuResult = 3;
pub(super) const NO_DEVICE: CuResult = 100;
pub(super) const OPERATING_SYSTEM: CuResult = 304;
pub(super) const ILLEGAL_STATE: CuResult = 401;
pub(super) const NOT_READY: CuResult = 600;
pub(super) const NOT_PERMITTED: CuResult = 800;
pub(super) const NOT_SUPPORTED: CuResult = 801;
pub(super) const SYSTEM_DRIVER_MISMATCH: CuResult = 803;

/// `CUcheckpointLockArgs`.
#[repr(C)]
pub(super) struct LockArgs {
    /// Milliseconds; 0 would wait for ever.
    pub(super) timeout_ms: c_uint,
    reserved: [c_uint; 15],
}

impl LockArgs {
    pub(super) fn new(timeout_ms: c_uint) -> Self {
        Self {
            timeout_ms,
            reserved: [0; 15],
        }
    }
}

/// `CUcheckpointUnlockArgs`, all reserved, and `CUcheckpointCheckpointArgs`, which in newer
/// headers begins with a pointer to storage of the caller's; null is host memory.
#[repr(C)]
#[derive(Default)]
pub(super) struct ReservedArgs {
    reserved: [u64; 8],
}

/// `CUcheckpointRestoreArgs` with no GPU map: each GPU is restored onto itself.
#[repr(C)]
pub(super) struct RestoreArgs {
    gpu_pairs: *mut c_void,
    gpu_pairs_count: c_uint,
    padding: c_uint,
    custom_storage: *mut *mut c_void,
    reserved: [u64; 5],
}

impl RestoreArgs {
    pub(super) fn same_gpus() -> Self {
        Self {
            gpu_pairs: std::ptr::null_mut(),
            gpu_pairs_count: 0,
            padding: 0,
            custom_storage: std::ptr::null_mut(),
            reserved: [0; 5],
        }
    }
}

const _: () = {
    assert!(size_of::<LockArgs>() == 64);
    assert!(offset_of!(LockArgs, timeout_ms) == 0);
    assert!(size_of::<ReservedArgs>() == 64);
    assert!(size_of::<RestoreArgs>() == 64);
    assert!(offset_of!(RestoreArgs, gpu_pairs) == 0);
    assert!(offset_of!(RestoreArgs, gpu_pairs_count) == 8);
    assert!(offset_of!(RestoreArgs, padding) == 12);
    assert!(offset_of!(RestoreArgs, custom_storage) == 16);
    assert!(offset_of!(RestoreArgs, reserved) == 24);
};

pub(super) type Init = unsafe extern "C" fn(flags: c_uint) -> CuResult;
pub(super) type DriverGetVersion = unsafe extern "C" fn(version: *mut c_int) -> CuResult;
pub(super) type GetErrorText =
    unsafe extern "C" fn(error: CuResult, text: *mut *const c_char) -> CuResult;
pub(super) type GetState = unsafe extern "C" fn(pid: c_int, state: *mut c_int) -> CuResult;
pub(super) type GetRestoreThreadId = unsafe extern "C" fn(pid: c_int, tid: *mut c_int) -> CuResult;
pub(super) type Lock = unsafe extern "C" fn(pid: c_int, args: *mut LockArgs) -> CuResult;
pub(super) type WithReserved =
    unsafe extern "C" fn(pid: c_int, args: *mut ReservedArgs) -> CuResult;
pub(super) type Restore = unsafe extern "C" fn(pid: c_int, args: *mut RestoreArgs) -> CuResult;
