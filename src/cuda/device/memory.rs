//! Memory of a GPU: plain, or in separate allocations that another process can map as well.
//!
//! ```text
//! create:  cuMemCreate ─▶ export (descriptor) ─▶ reserve ─▶ map ─▶ set access
//! import:  descriptor ──▶ import ──────────────▶ reserve ─▶ map ─▶ set access
//! drop:    unmap ─▶ release ─▶ free the address
//! ```
//! The pages exist as long as they are held by a mapping, a handle or a descriptor, in any process.
#![allow(
    unsafe_code,
    reason = "calls into libcuda, which has no safe interface"
)]

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::context::Context;
use super::device_types::{self, AccessDescription, AllocationProperties};
use super::error::DeviceError;

/// A piece of a GPU's memory, released on drop. No copy uses it then, because a copy borrows it.
pub struct DeviceMemory {
    context: Context,
    address: device_types::Address,
    len: u64,
    kind: Kind,
}

enum Kind {
    Plain,
    /// Memory with a handle and an address range, stored for their drops: the handle is released first, then the
    /// address.
    Mapped {
        _handle: Handle,
        _range: Range,
    },
}

impl Context {
    /// Allocates plain memory, which only this process can use.
    ///
    /// # Errors
    /// Out of memory ([`DeviceError::is_out_of_memory`]) or another error of the driver.
    pub fn allocate(&self, len: u64) -> Result<DeviceMemory, DeviceError> {
        let functions = self.enter()?;
        let mut address = 0;
        // SAFETY: the driver writes one address to a valid pointer.
        let result = unsafe { (functions.allocate)(&raw mut address, size(len)) };
        self.check("cuMemAlloc", result)?;
        Ok(DeviceMemory {
            context: self.clone(),
            address,
            len,
            kind: Kind::Plain,
        })
    }

    /// Returns the number that lengths of exportable memory must be multiples of.
    ///
    /// # Errors
    /// The driver's error.
    pub fn granularity(&self) -> Result<u64, DeviceError> {
        let functions = self.enter()?;
        let properties = AllocationProperties::exportable(self.device());
        let mut granularity = 0;
        // SAFETY: the driver reads the properties and writes one size, both during the call.
        let result = unsafe {
            (functions.granularity)(
                &raw mut granularity,
                &raw const properties,
                device_types::GRANULARITY_MINIMUM,
            )
        };
        self.check("cuMemGetAllocationGranularity", result)?;
        Ok(granularity as u64)
    }

    /// Creates exportable memory and its descriptor, which keeps the memory alive as well.
    ///
    /// # Errors
    /// [`DeviceError::Length`], out of memory ([`DeviceError::is_out_of_memory`]), or another error of the driver.
    pub fn create(&self, len: u64) -> Result<(DeviceMemory, OwnedFd), DeviceError> {
        self.check_length(len)?;
        let functions = self.enter()?;
        let properties = AllocationProperties::exportable(self.device());
        let mut raw = 0;
        // SAFETY: the driver reads the properties and writes one handle, both during the call.
        let result =
            unsafe { (functions.create)(&raw mut raw, size(len), &raw const properties, 0) };
        self.check("cuMemCreate", result)?;
        let handle = Handle::new(self, raw);
        let descriptor = self.export(&handle)?;
        let range = Range::reserve(self, len)?;
        Ok((self.map(handle, range, len)?, descriptor))
    }

    /// Maps memory that any process exported as this descriptor. `len` is its full length. The descriptor is no longer
    /// needed afterwards, but the memory cannot be exported again from here.
    ///
    /// # Errors
    /// The descriptor is not one of exported memory, or `len` is not the memory's length.
    pub fn import(
        &self,
        descriptor: BorrowedFd<'_>,
        len: u64,
    ) -> Result<DeviceMemory, DeviceError> {
        let granularity = self.check_length(len)?;
        let larger = len
            .checked_add(granularity)
            .ok_or(DeviceError::Length { len, granularity })?;
        let functions = self.enter()?;
        let number = size(u64::from(descriptor.as_raw_fd().unsigned_abs()));
        let mut raw = 0;
        // SAFETY: the driver writes one handle to a valid pointer; the descriptor, checked by the driver, is passed as
        // the pointer-sized value that this kind of handle takes, and is open during the call.
        let result =
            unsafe { (functions.import)(&raw mut raw, number, device_types::HANDLE_DESCRIPTOR) };
        self.check("cuMemImportFromShareableHandle", result)?;
        let handle = Handle::new(self, raw);
        let range = Range::reserve(self, larger)?;
        // The driver does not report the length of the memory, but refuses to map more than exists. Mapping one page
        // more than `len` must therefore fail. Without this check, a part would be copied and treated as the whole.
        if self.try_map(&handle, &range, larger).is_ok() {
            self.unmap(range.address, larger);
            return Err(DeviceError::Larger { len });
        }
        self.map(handle, range, len)
    }

    fn check_length(&self, len: u64) -> Result<u64, DeviceError> {
        let granularity = self.granularity()?;
        if len == 0 || granularity == 0 || !len.is_multiple_of(granularity) {
            return Err(DeviceError::Length { len, granularity });
        }
        Ok(granularity)
    }

    fn export(&self, handle: &Handle) -> Result<OwnedFd, DeviceError> {
        let functions = self.enter()?;
        let mut descriptor: c_int = -1;
        // SAFETY: the driver writes one descriptor to a valid pointer; the handle is live.
        let result = unsafe {
            (functions.export)(
                &raw mut descriptor,
                handle.raw,
                device_types::HANDLE_DESCRIPTOR,
                0,
            )
        };
        self.check("cuMemExportToShareableHandle", result)?;
        if descriptor < 0 {
            return Err(DeviceError::Nothing {
                call: "cuMemExportToShareableHandle",
            });
        }
        // SAFETY: the driver has just created it for the caller; it has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    fn map(&self, handle: Handle, range: Range, len: u64) -> Result<DeviceMemory, DeviceError> {
        self.try_map(&handle, &range, len)?;
        // From here on, the drop unmaps.
        let memory = DeviceMemory {
            context: self.clone(),
            address: range.address,
            len,
            kind: Kind::Mapped {
                _handle: handle,
                _range: range,
            },
        };
        let functions = self.enter()?;
        let access = AccessDescription::of(self.device());
        // SAFETY: the range was just mapped; the driver reads one description during the call.
        let result =
            unsafe { (functions.set_access)(memory.address, size(len), &raw const access, 1) };
        self.check("cuMemSetAccess", result)?;
        Ok(memory)
    }

    /// Maps `len` bytes, at most the range's length.
    fn try_map(&self, handle: &Handle, range: &Range, len: u64) -> Result<(), DeviceError> {
        let functions = self.enter()?;
        let len = size(len.min(range.len));
        // SAFETY: this process reserved the addresses, no memory is mapped there, and the handle is live.
        let result = unsafe { (functions.map)(range.address, len, 0, handle.raw, 0) };
        self.check("cuMemMap", result)
    }

    fn unmap(&self, address: device_types::Address, len: u64) {
        let Ok(functions) = self.enter() else { return };
        // SAFETY: this is the whole of a mapping of this process, and no copy uses it.
        let result = unsafe { (functions.unmap)(address, size(len)) };
        self.check_end("cuMemUnmap", result);
    }
}

impl DeviceMemory {
    /// Returns the length in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "there is none without a byte")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the context that the memory belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the address for a copy of `len` bytes from `offset` on.
    pub(super) fn at(&self, offset: u64, len: u64) -> Result<device_types::Address, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address + offset),
            _ => Err(DeviceError::Range {
                offset,
                len,
                available: self.len,
            }),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        match self.kind {
            Kind::Plain => {
                let Ok(functions) = self.context.enter() else {
                    return;
                };
                // SAFETY: allocated by cuMemAlloc, freed once, and no copy uses it.
                let result = unsafe { (functions.free)(self.address) };
                self.context.check_end("cuMemFree", result);
            }
            Kind::Mapped { .. } => self.context.unmap(self.address, self.len),
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("gpu", &self.context.gpu())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// An allocation, released on drop.
struct Handle {
    context: Context,
    raw: device_types::Allocation,
}

impl Handle {
    fn new(context: &Context, raw: device_types::Allocation) -> Self {
        let context = context.clone();
        Self { context, raw }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Ok(functions) = self.context.enter() else {
            return;
        };
        // SAFETY: a live handle, released once.
        let result = unsafe { (functions.release)(self.raw) };
        self.context.check_end("cuMemRelease", result);
    }
}

/// An address range, freed on drop.
struct Range {
    context: Context,
    address: device_types::Address,
    len: u64,
}

impl Range {
    fn reserve(context: &Context, len: u64) -> Result<Self, DeviceError> {
        let functions = context.enter()?;
        let mut address = 0;
        // SAFETY: the driver writes one address, of its choice, to a valid pointer.
        let result = unsafe { (functions.reserve)(&raw mut address, size(len), 0, 0, 0) };
        context.check("cuMemAddressReserve", result)?;
        Ok(Self {
            context: context.clone(),
            address,
            len,
        })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let Ok(functions) = self.context.enter() else {
            return;
        };
        // SAFETY: this process reserved it with that length; it is freed once, and was unmapped before.
        let result = unsafe { (functions.free_address)(self.address, size(self.len)) };
        self.context.check_end("cuMemAddressFree", result);
    }
}

/// Converts a size; the driver's sizes have the machine's width.
#[allow(clippy::cast_possible_truncation, reason = "see the assertion")]
pub(super) const fn size(bytes: u64) -> usize {
    const { assert!(size_of::<usize>() == size_of::<u64>()) };
    bytes as usize
}
