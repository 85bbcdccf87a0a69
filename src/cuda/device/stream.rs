//! Copies on a GPU. No copy outlives the call that began it.
#![allow(
    unsafe_code,
    reason = "calls into libcuda, which has no safe interface"
)]

use std::ffi::c_void;
use std::fmt;

use super::context::Context;
use super::device_types;
use super::error::DeviceError;
use super::host_memory::Pinned;
use super::memory::{DeviceMemory, size};

/// A sequence of copies on one GPU; copies of different streams run at the same time.
pub struct Stream {
    context: Context,
    handle: device_types::Opaque,
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(context: &Context) -> Result<Self, DeviceError> {
        let functions = context.enter()?;
        let mut handle = 0;
        // SAFETY: the driver writes one pointer-sized value to a valid pointer.
        let result = unsafe {
            (functions.stream_create)(&raw mut handle, device_types::STREAM_NON_BLOCKING)
        };
        context.check("cuStreamCreate", result)?;
        Ok(Self {
            context: context.clone(),
            handle,
        })
    }

    /// Copies `len` bytes of device memory, from `offset` on, into `host`, from `at` on. Returns when the copy is
    /// complete.
    ///
    /// # Errors
    /// A range outside the memory, or the driver's error; after the latter the content of `host` is unusable.
    pub fn read(
        &self,
        memory: &DeviceMemory,
        offset: u64,
        host: &Pinned,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        self.check_gpu(memory)?;
        let (from, to) = (memory.at(offset, len)?, host.at(at, len)?);
        let functions = self.context.enter()?;
        let end = End(self);
        // SAFETY: both sides have `len` bytes and are borrowed until `end` has seen the copy end.
        let result = unsafe { (functions.copy_to_host)(to, from, size(len), self.handle) };
        self.context.check("cuMemcpyDtoHAsync", result)?;
        end.now()
    }

    /// Copies `len` bytes of `host`, from `at` on, into device memory, from `offset` on. Returns when the copy is
    /// complete.
    ///
    /// # Errors
    /// A range outside the memory, or the driver's error; after the latter the memory's content is unusable.
    pub fn write(
        &self,
        memory: &DeviceMemory,
        offset: u64,
        host: &Pinned,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        self.check_gpu(memory)?;
        let (to, from) = (memory.at(offset, len)?, host.at(at, len)?);
        let functions = self.context.enter()?;
        let end = End(self);
        // SAFETY: both sides have `len` bytes and are borrowed until `end` has seen the copy end.
        let result = unsafe { (functions.copy_to_device)(to, from, size(len), self.handle) };
        self.context.check("cuMemcpyHtoDAsync", result)?;
        end.now()
    }

    /// Starts a program with these parameters on `groups` groups of `threads` threads, and returns when it has ended.
    ///
    /// # Safety
    /// The program is of this stream's context, the parameters are those that it takes, and it only uses memory that is
    /// borrowed until this call returns.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) unsafe fn run(
        &self,
        function: device_types::Opaque,
        (groups, threads): (u32, u32),
        parameters: &[u64],
    ) -> Result<(), DeviceError> {
        let functions = self.context.enter()?;
        let programs = functions.programs.as_ref().ok_or(DeviceError::NoPrograms)?;
        let pointers: Vec<*const c_void> = parameters
            .iter()
            .map(|parameter| std::ptr::from_ref(parameter).cast())
            .collect();
        let end = End(self);
        // SAFETY: by the contract above; the driver copies the parameters during the call.
        let result = unsafe {
            (programs.launch)(
                function,
                groups,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.handle,
                pointers.as_ptr(),
                std::ptr::null(),
            )
        };
        self.context.check("cuLaunchKernel", result)?;
        end.now()
    }

    pub(super) fn check_gpu(&self, memory: &DeviceMemory) -> Result<(), DeviceError> {
        let (from, to) = (memory.context().gpu(), self.context.gpu());
        if from == to {
            return Ok(());
        }
        Err(DeviceError::OtherGpu { from, to })
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let functions = self.context.enter()?;
        // SAFETY: a live stream of this context.
        let result = unsafe { (functions.stream_synchronize)(self.handle) };
        self.context.check("cuStreamSynchronize", result)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(functions) = self.context.enter() else {
            return;
        };
        // SAFETY: a live stream, destroyed once; no copy is in progress.
        let result = unsafe { (functions.stream_destroy)(self.handle) };
        self.context.check_end("cuStreamDestroy", result);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.context.gpu()).finish()
    }
}

/// The end of the copies of a stream. Dropping it waits for that end, also on a panic, because the copies only borrow
/// their memory.
///
/// A failed wait leaves no copy in progress: the driver reports an error of the GPU only after it has stopped all of
/// the context's work.
struct End<'a>(&'a Stream);

impl End<'_> {
    fn now(self) -> Result<(), DeviceError> {
        let stream = self.0;
        std::mem::forget(self);
        stream.synchronize()
    }
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        // The code that drops it already has an error.
        let _ = self.0.synchronize();
    }
}

/// A copy within a GPU.
#[derive(Debug, Clone, Copy)]
pub struct DeviceCopy<'a> {
    /// The stream of the copy, of the same GPU.
    pub stream: &'a Stream,
    /// The source memory.
    pub from: &'a DeviceMemory,
    /// The offset in the source.
    pub from_offset: u64,
    /// The target memory.
    pub to: &'a DeviceMemory,
    /// The offset in the target.
    pub to_offset: u64,
    /// The number of bytes.
    pub len: u64,
}

/// Makes copies within GPUs, those of different streams at the same time; returns when all of them have ended.
///
/// # Errors
/// A range outside the memory, or the driver's error; in the latter case only some of the copies were made.
pub fn copy_all(copies: &[DeviceCopy<'_>]) -> Result<(), DeviceError> {
    // Each copy waits in its drop if a later one cannot be started.
    let ends = copies.iter().map(begin).collect::<Result<Vec<_>, _>>()?;
    ends.into_iter().try_for_each(End::now)
}

fn begin<'a>(copy: &DeviceCopy<'a>) -> Result<End<'a>, DeviceError> {
    copy.stream.check_gpu(copy.from)?;
    copy.stream.check_gpu(copy.to)?;
    let from = copy.from.at(copy.from_offset, copy.len)?;
    let to = copy.to.at(copy.to_offset, copy.len)?;
    let functions = copy.stream.context.enter()?;
    let end = End(copy.stream);
    // SAFETY: both sides have `len` bytes on this GPU and are borrowed until `end` has seen the copy end.
    let result =
        unsafe { (functions.copy_on_device)(to, from, size(copy.len), copy.stream.handle) };
    copy.stream.context.check("cuMemcpyDtoDAsync", result)?;
    Ok(end)
}
