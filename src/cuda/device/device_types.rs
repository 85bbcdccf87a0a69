//! The driver's C types for device memory, as laid out by `cuda.h` of CUDA 11 and newer.
//!
//! Handles are pointers or numbers that only the driver understands; they are stored as numbers, because this code must
//! not follow them.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::mem::{offset_of, size_of};

use crate::cuda::sys::CuResult;

/// `CUdevice`: an ordinal.
pub(super) type Device = c_int;
/// `CUcontext`, `CUstream`: pointers of the driver.
pub(super) type Opaque = usize;
/// `CUmemGenericAllocationHandle`.
pub(super) type Allocation = c_ulonglong;
/// `CUdeviceptr`.
pub(super) type Address = c_ulonglong;

/// `CU_CTX_SCHED_BLOCKING_SYNC`: a thread that waits for the GPU sleeps and leaves the core to other threads.
pub(super) const SCHEDULE_BLOCKING: c_uint = 4;
/// `CU_STREAM_NON_BLOCKING`: the stream does not synchronize with the default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for all contexts.
pub(super) const HOST_PORTABLE: c_uint = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(super) const GRANULARITY_MINIMUM: c_uint = 0;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const HANDLE_DESCRIPTOR: c_uint = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const ALLOCATION_PINNED: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_DEVICE: c_uint = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const ACCESS_READ_WRITE: c_uint = 3;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Location {
    kind: c_uint,
    device: Device,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(super) struct AllocationProperties {
    kind: c_uint,
    handles: c_uint,
    location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

impl AllocationProperties {
    /// Returns the properties of GPU memory that can be exported as a descriptor.
    pub(super) fn exportable(device: Device) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handles: HANDLE_DESCRIPTOR,
            location: Location {
                kind: LOCATION_DEVICE,
                device,
            },
            windows: std::ptr::null_mut(),
            flags: [0; 8],
        }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(super) struct AccessDescription {
    location: Location,
    flags: c_uint,
}

impl AccessDescription {
    /// Returns read and write access for that GPU.
    pub(super) fn of(device: Device) -> Self {
        Self {
            location: Location {
                kind: LOCATION_DEVICE,
                device,
            },
            flags: ACCESS_READ_WRITE,
        }
    }
}

const _: () = {
    assert!(size_of::<AllocationProperties>() == 32);
    assert!(offset_of!(AllocationProperties, handles) == 4);
    assert!(offset_of!(AllocationProperties, location) == 8);
    assert!(offset_of!(AllocationProperties, windows) == 16);
    assert!(offset_of!(AllocationProperties, flags) == 24);
    assert!(size_of::<AccessDescription>() == 12);
    assert!(offset_of!(AccessDescription, flags) == 8);
};

pub(super) type DeviceGetCount = unsafe extern "C" fn(count: *mut c_int) -> CuResult;
pub(super) type DeviceGet = unsafe extern "C" fn(device: *mut Device, ordinal: c_int) -> CuResult;
pub(super) type DeviceGetUuid =
    unsafe extern "C" fn(uuid: *mut [u8; 16], device: Device) -> CuResult;
pub(super) type PrimaryCtxSetFlags =
    unsafe extern "C" fn(device: Device, flags: c_uint) -> CuResult;
pub(super) type PrimaryCtxRetain =
    unsafe extern "C" fn(context: *mut Opaque, device: Device) -> CuResult;
pub(super) type PrimaryCtxRelease = unsafe extern "C" fn(device: Device) -> CuResult;
pub(super) type OfHandle = unsafe extern "C" fn(handle: Opaque) -> CuResult;
pub(super) type MemGetInfo = unsafe extern "C" fn(free: *mut usize, total: *mut usize) -> CuResult;
pub(super) type MemAlloc = unsafe extern "C" fn(address: *mut Address, len: usize) -> CuResult;
pub(super) type MemFree = unsafe extern "C" fn(address: Address) -> CuResult;
pub(super) type GetGranularity = unsafe extern "C" fn(
    granularity: *mut usize,
    properties: *const AllocationProperties,
    option: c_uint,
) -> CuResult;
pub(super) type MemCreate = unsafe extern "C" fn(
    allocation: *mut Allocation,
    len: usize,
    properties: *const AllocationProperties,
    flags: c_ulonglong,
) -> CuResult;
pub(super) type MemRelease = unsafe extern "C" fn(allocation: Allocation) -> CuResult;
pub(super) type AddressReserve = unsafe extern "C" fn(
    address: *mut Address,
    len: usize,
    alignment: usize,
    wanted: Address,
    flags: c_ulonglong,
) -> CuResult;
pub(super) type OfRange = unsafe extern "C" fn(address: Address, len: usize) -> CuResult;
pub(super) type MemMap = unsafe extern "C" fn(
    address: Address,
    len: usize,
    offset: usize,
    allocation: Allocation,
    flags: c_ulonglong,
) -> CuResult;
pub(super) type MemSetAccess = unsafe extern "C" fn(
    address: Address,
    len: usize,
    access: *const AccessDescription,
    count: usize,
) -> CuResult;
pub(super) type Export = unsafe extern "C" fn(
    descriptor: *mut c_int,
    allocation: Allocation,
    kind: c_uint,
    flags: c_ulonglong,
) -> CuResult;
/// `cuMemImportFromShareableHandle`; the descriptor is passed as if it were a pointer.
pub(super) type Import =
    unsafe extern "C" fn(allocation: *mut Allocation, descriptor: usize, kind: c_uint) -> CuResult;
pub(super) type HostRegister =
    unsafe extern "C" fn(memory: *mut c_void, len: usize, flags: c_uint) -> CuResult;
pub(super) type HostUnregister = unsafe extern "C" fn(memory: *mut c_void) -> CuResult;
pub(super) type StreamCreate = unsafe extern "C" fn(stream: *mut Opaque, flags: c_uint) -> CuResult;
pub(super) type CopyToHost =
    unsafe extern "C" fn(to: *mut c_void, from: Address, len: usize, stream: Opaque) -> CuResult;
pub(super) type CopyToDevice =
    unsafe extern "C" fn(to: Address, from: *const c_void, len: usize, stream: Opaque) -> CuResult;
/// `cuModuleLoadData`; the image is a text in PTX that ends with a zero.
pub(super) type ModuleLoad =
    unsafe extern "C" fn(module: *mut Opaque, image: *const c_void) -> CuResult;
pub(super) type ModuleFunction = unsafe extern "C" fn(
    function: *mut Opaque,
    module: Opaque,
    name: *const std::ffi::c_char,
) -> CuResult;
/// `cuLaunchKernel`: numbers of blocks and of threads in three dimensions, bytes of shared memory, and pointers to the
/// parameters.
pub(super) type Launch = unsafe extern "C" fn(
    function: Opaque,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: Opaque,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> CuResult;
pub(super) type CopyToHostNow =
    unsafe extern "C" fn(to: *mut c_void, from: Address, len: usize) -> CuResult;
pub(super) type CopyToDeviceNow =
    unsafe extern "C" fn(to: Address, from: *const c_void, len: usize) -> CuResult;
pub(super) type CopyOnDevice =
    unsafe extern "C" fn(to: Address, from: Address, len: usize, stream: Opaque) -> CuResult;
