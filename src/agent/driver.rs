//! CUDA driver functions that the agent calls, and their structures.
//!
//! The layouts are those of `cuda.h`, unchanged from CUDA 11.3 to 13.0.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

pub const SUCCESS: c_int = 0;
pub const INVALID_VALUE: c_int = 1;
pub const OUT_OF_MEMORY: c_int = 2;
pub const NOT_INITIALIZED: c_int = 3;
pub const INVALID_CONTEXT: c_int = 201;
pub const PEER_ACCESS_UNSUPPORTED: c_int = 217;

/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
pub const ATTRIBUTE_MAPPING: c_int = 102;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
pub const ATTRIBUTE_DESCRIPTORS: c_int = 103;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
pub const ATTRIBUTE_RDMA: c_int = 110;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const DESCRIPTOR: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_DEVICE: c_int = 1;
/// `CU_MEM_CREATE_USAGE_TILE_POOL`.
const USAGE_TILE_POOL: u16 = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub const GRANULARITY_MINIMUM: c_int = 0;

/// `CUmemAllocationProp`: pinned memory of a device that can be exported as a descriptor.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows: *const c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemLocation`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Access {
    location: Location,
    flags: c_int,
}

const _: () = assert!(size_of::<Properties>() == 32);
const _: () = assert!(size_of::<Access>() == 12);

impl Properties {
    pub fn new(device: c_int, rdma: bool) -> Self {
        Self {
            kind: 1,
            handle_types: DESCRIPTOR,
            location: Location::device(device),
            windows: ptr::null(),
            compression: 0,
            rdma: u8::from(rdma),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

impl Properties {
    /// Returns the device that holds the memory.
    pub fn device(&self) -> c_int {
        self.location.id
    }

    /// Returns true for memory of a device that could be exported as a descriptor and has no other features.
    pub fn is_plain(&self) -> bool {
        let pinned =
            self.kind == 1 && self.location.kind == LOCATION_DEVICE && self.windows.is_null();
        pinned
            && self.handle_types & !DESCRIPTOR == 0
            && (self.compression, self.usage, self.reserved) == (0, 0, [0; 4])
    }

    /// Returns true for memory of the host. The driver suspends a process that has mapped some, and cannot resume it
    /// (580.159.04: error 304).
    pub fn is_on_host(&self) -> bool {
        self.location.kind != LOCATION_DEVICE
    }

    /// Returns true for memory of sparse arrays, which the driver cannot resume either.
    pub fn is_for_arrays(&self) -> bool {
        self.usage & USAGE_TILE_POOL != 0
    }

    /// Returns the types of handles, and whether the memory is for RDMA.
    pub fn features(&self) -> (c_int, bool) {
        (self.handle_types, self.rdma != 0)
    }

    /// Replaces the types of handles.
    pub fn set_handle_types(&mut self, types: c_int) {
        self.handle_types = types;
    }
}

impl Location {
    const fn device(id: c_int) -> Self {
        Self {
            kind: LOCATION_DEVICE,
            id,
        }
    }
}

impl Access {
    /// Returns read and write access for a device.
    pub const fn full(device: c_int) -> Self {
        Self {
            location: Location::device(device),
            flags: 3,
        }
    }

    /// Returns the access of a device that may read, and may write.
    pub const fn of(device: c_int, writes: bool) -> Self {
        let mut access = Self::full(device);
        access.flags = if writes { 3 } else { 1 };
        access
    }

    /// Returns the device, whether it may read, and whether it may write; `None` if the description is not of a device.
    pub fn parts(&self) -> Option<(c_int, bool, bool)> {
        let is_device = self.location.kind == 1;
        is_device.then_some((self.location.id, self.flags & 1 != 0, self.flags & 2 != 0))
    }
}

/// Defines driver calls as functions of this module, through pointers found by [`load`].
macro_rules! driver {
    ($($name:ident = $symbol:literal ($($argument:ident: $type:ty),*);)*) => {
        #[allow(non_camel_case_types, reason = "numbers of the functions")]
        enum Number { $($name),* }
        const SYMBOLS: &[&CStr] = &[$($symbol),*];
        static POINTERS: [AtomicPtr<c_void>; SYMBOLS.len()] =
            [const { AtomicPtr::new(ptr::null_mut()) }; SYMBOLS.len()];
        $(
            /// # Safety
            /// The requirements are those of the driver's documentation, and [`load`] was successful.
            pub unsafe fn $name($($argument: $type),*) -> c_int {
                let function = POINTERS[Number::$name as usize].load(Ordering::Relaxed);
                // SAFETY: this is the driver's function of this name, which has this type.
                let function: unsafe extern "C" fn($($type),*) -> c_int = unsafe { transmute(function) };
                // SAFETY: by the contract above.
                unsafe { function($($argument),*) }
            }
        )*
    };
}

driver! {
    context_current = c"cuCtxGetCurrent" (context: *mut usize);
    context_device = c"cuCtxGetDevice" (device: *mut c_int);
    context_set = c"cuCtxSetCurrent" (context: usize);
    context_push = c"cuCtxPushCurrent_v2" (context: usize);
    context_pop = c"cuCtxPopCurrent_v2" (context: *mut usize);
    context_synchronize = c"cuCtxSynchronize" ();
    primary_retain = c"cuDevicePrimaryCtxRetain" (context: *mut usize, device: c_int);
    primary_release = c"cuDevicePrimaryCtxRelease_v2" (device: c_int);
    primary_state = c"cuDevicePrimaryCtxGetState" (device: c_int, flags: *mut c_uint, active: *mut c_int);
    device_attribute = c"cuDeviceGetAttribute" (value: *mut c_int, attribute: c_int, device: c_int);
    device_uuid = c"cuDeviceGetUuid" (uuid: *mut [u8; 16], device: c_int);
    granularity = c"cuMemGetAllocationGranularity" (len: *mut usize, properties: *const Properties, option: c_int);
    reserve = c"cuMemAddressReserve" (address: *mut u64, len: usize, alignment: usize, wanted: u64, flags: u64);
    address_free = c"cuMemAddressFree" (address: u64, len: usize);
    create = c"cuMemCreate" (handle: *mut u64, len: usize, properties: *const Properties, flags: u64);
    release = c"cuMemRelease" (handle: u64);
    map = c"cuMemMap" (address: u64, len: usize, offset: usize, handle: u64, flags: u64);
    unmap = c"cuMemUnmap" (address: u64, len: usize);
    set_access = c"cuMemSetAccess" (address: u64, len: usize, access: *const Access, count: usize);
    export = c"cuMemExportToShareableHandle" (descriptor: *mut c_int, handle: u64, kind: c_int, flags: u64);
    properties = c"cuMemGetAllocationPropertiesFromHandle" (properties: *mut Properties, handle: u64);
    import = c"cuMemImportFromShareableHandle" (handle: *mut u64, descriptor: *mut c_void, kind: c_int);
}

/// Finds all functions. Returns false if one is missing; then none may be called. May be repeated, by any thread.
pub fn load(find: impl Fn(*const c_char) -> *mut c_void) -> bool {
    SYMBOLS.iter().zip(&POINTERS).all(|(symbol, pointer)| {
        let found = find(symbol.as_ptr());
        pointer.store(found, Ordering::Relaxed);
        !found.is_null()
    })
}

/// Converts a driver's result code; an error is the code itself.
pub fn check(code: c_int) -> Result<(), c_int> {
    if code == SUCCESS { Ok(()) } else { Err(code) }
}
