//! Fingerprints of blocks of device memory, computed on the GPU: they tell which blocks have changed.
//!
//! The program `fingerprints.ptx` hashes each block with NH, the hash of UMAC (Black, Halevi, Krawczyk, Krovetz and
//! Rogaway, CRYPTO 1999), with words of 64 bits and two Toeplitz lanes. For two different messages of the same length, and
//! keys that are random and independent of them, both lanes are equal with a probability of at most 2^-128. Here a block
//! passes two levels: the share of each thread, then the results of all threads. So two different blocks have the same
//! fingerprint with a probability of at most 2^-127, whatever they contain. This requires that whoever writes the blocks
//! does not know the keys. They are in ckpt-run's processes and in its images.
//!
//! On an H200 the program reads nearly as fast as the memory allows; the driver compiles it when a context is opened.
#![allow(
    unsafe_code,
    reason = "calls into libcuda, which has no safe interface"
)]

use std::ffi::CStr;

use super::context::Context;
use super::device_types;
use super::error::DeviceError;
use super::host_memory::Pinned;
use super::memory::{DeviceMemory, size};
use super::stream::Stream;
use crate::shared_memory::SharedMemory;

/// Length of a block.
pub const BLOCK_BYTES: u64 = 256 << 10;
/// Length of a fingerprint.
pub const FINGERPRINT_BYTES: usize = 32;
/// Length of the keys: 66 words of the first level and 2050 of the second.
pub const KEY_BYTES: usize = (66 + 2050) * 8;

/// The program, which ends with a zero.
const PROGRAM: &str = concat!(include_str!("fingerprints.ptx"), "\0");
const NAME: &CStr = c"ckpt_run_fingerprints";
/// Number of threads of a group, as the program requires.
const THREADS: u32 = 512;
/// Maximum number of groups; each works on several blocks then.
const GROUPS_MAX: u64 = 1024;

/// The program on a GPU, with its keys.
#[derive(Debug)]
pub struct Fingerprinter {
    module: Module,
    function: device_types::Opaque,
    keys: DeviceMemory,
}

#[derive(Debug)]
struct Module {
    context: Context,
    handle: device_types::Opaque,
}

impl Context {
    /// Compiles the program for this GPU. The keys are in the first [`KEY_BYTES`] of `host`.
    ///
    /// # Errors
    /// The driver has no compiler, or is too old for the program; [`DeviceError::Range`] if `host` is too short.
    pub(crate) fn fingerprinter(&self, host: &SharedMemory) -> Result<Fingerprinter, DeviceError> {
        let functions = self.enter()?;
        let programs = functions.programs.as_ref().ok_or(DeviceError::NoPrograms)?;
        let mut handle = 0;
        // SAFETY: the driver writes one handle, and reads the text up to its zero.
        let result = unsafe { (programs.load)(&raw mut handle, PROGRAM.as_ptr().cast()) };
        self.check("cuModuleLoadData", result)?;
        let module = Module {
            context: self.clone(),
            handle,
        };
        let mut function = 0;
        // SAFETY: the driver writes one handle; the name ends with a zero, and the module is live.
        let result = unsafe { (programs.function)(&raw mut function, handle, NAME.as_ptr()) };
        self.check("cuModuleGetFunction", result)?;
        let (len, available) = (KEY_BYTES as u64, host.len() as u64);
        let keys = self.allocate(len)?;
        if available < len {
            let offset = 0;
            return Err(DeviceError::Range {
                offset,
                len,
                available,
            });
        }
        let (to, from) = (keys.at(0, len)?, host.start().as_ptr().cast());
        // SAFETY: both sides have this length, and are borrowed until the call returns.
        let result = unsafe { (programs.write)(to, from, KEY_BYTES) };
        self.check("cuMemcpyHtoD", result)?;
        Ok(Fingerprinter {
            module,
            function,
            keys,
        })
    }
}

impl Fingerprinter {
    /// Computes the fingerprints of `count` blocks of device memory, from `offset` on, and copies them into `host`, from
    /// `at` on. `results` has room for them.
    ///
    /// # Errors
    /// A range outside the memory, or the driver's error.
    pub fn compute(
        &self,
        stream: &Stream,
        (memory, offset, count): (&DeviceMemory, u64, u64),
        results: &DeviceMemory,
        (host, at): (&Pinned, u64),
    ) -> Result<(), DeviceError> {
        for memory in [memory, results, &self.keys] {
            stream.check_gpu(memory)?;
        }
        let len = count.saturating_mul(FINGERPRINT_BYTES as u64);
        let blocks = memory.at(offset, count.saturating_mul(BLOCK_BYTES))?;
        let (results, host) = (results.at(0, len)?, host.at(at, len)?);
        let keys = self.keys.at(0, KEY_BYTES as u64)?;
        let groups = u32::try_from(count.clamp(1, GROUPS_MAX)).unwrap_or(1);
        // SAFETY: the program reads `count` blocks and the keys, and writes `count` results. All are within memory that is
        // borrowed until the call returns, and of the stream's GPU, whose context the program was loaded into.
        unsafe {
            stream.run(
                self.function,
                (groups, THREADS),
                &[blocks, count, keys, results],
            )?;
        }
        let context = &self.module.context;
        let functions = context.enter()?;
        let programs = functions.programs.as_ref().ok_or(DeviceError::NoPrograms)?;
        // SAFETY: both sides have this length, and are borrowed until the call returns.
        let result = unsafe { (programs.read)(host, results, size(len)) };
        context.check("cuMemcpyDtoH", result)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(functions) = self.context.enter() else {
            return;
        };
        if let Some(programs) = &functions.programs {
            // SAFETY: a live module, unloaded once; none of its programs runs.
            let result = unsafe { (programs.unload)(self.handle) };
            self.context.check_end("cuModuleUnload", result);
        }
    }
}
