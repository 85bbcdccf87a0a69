//! Gate in front of the driver functions that programs call all the time: those that start work on the GPU or wait for
//! it.
//!
//! A snapshot stops the threads between their CUDA calls. A thread that calls without a pause is never there: while the
//! driver is locked, its next call waits inside the driver, and the driver cannot be locked again as long as the thread
//! is stopped there (580.159.04: 40 of 40 attempts failed for a loop of launches on a stream of its own). When the gate
//! is closed, such calls wait here instead, where the driver does not know of them yet.
//!
//! The gate opens by itself after a moment, for all threads at once: a call that waits here may be one that GPU work of
//! another thread or process waits for (NCCL), and then the driver can be locked only with the gate open.
//!
//! The functions are passed on with all their arguments, so their types need not be known here.

use core::arch::naked_asm;
use core::sync::atomic::{AtomicU64, Ordering};

use super::driver::NOT_INITIALIZED;
use super::hooks;
use super::interpose::{self, Hook};
use super::sys;

/// Time for which the gate is closed, in milliseconds: an attempt to lock the driver (400 ms), and the halt of the threads.
const CLOSED_MS: u32 = 600;

/// Time at which the gate opens, in microseconds since the epoch; 0 while it is open.
static OPENS_AT: AtomicU64 = AtomicU64::new(0);

/// Makes further calls wait.
pub fn close() {
    let now = sys::microseconds();
    OPENS_AT.store(now + u64::from(CLOSED_MS) * 1000, Ordering::Release);
}

/// Lets waiting and further calls pass.
pub fn open() {
    OPENS_AT.store(0, Ordering::Release);
}

/// Waits until the gate is open.
extern "C" fn wait() {
    // Counted as well, in case that the clock is set back.
    for _ in 0..CLOSED_MS {
        let opens_at = OPENS_AT.load(Ordering::Acquire);
        if opens_at == 0 {
            return;
        }
        if sys::microseconds() >= opens_at {
            break;
        }
        sys::pause_ms(1);
    }
    open();
}

#[cfg(target_arch = "x86_64")]
macro_rules! gated {
    ($($symbol:ident = $base:literal $version:literal;)*) => {
        #[allow(non_camel_case_types, reason = "numbers of the functions")]
        enum Number { $($symbol),* }

        /// All functions behind the gate.
        pub const GATED: [Hook; [$($version),*].len()] = [$(Hook {
            symbol: hooks::name(concat!(stringify!($symbol), "\0")),
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
                #[unsafe(naked)]
                pub unsafe extern "C" fn $symbol() {
                    naked_asm!(
                        "cmp qword ptr [rip + {opens_at}], 0",
                        "jne 3f",
                        "2:",
                        "jmp qword ptr [rip + {own} + {place}]",
                        "3:",
                        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                        "call {wait}",
                        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                        "jmp 2b",
                        opens_at = sym OPENS_AT,
                        own = sym interpose::OWN,
                        place = const 8 * (hooks::TYPED.len() + Number::$symbol as usize),
                        wait = sym wait,
                    )
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
                #[unsafe(naked)]
                pub unsafe extern "C" fn $symbol() {
                    naked_asm!(
                        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                        "mov edi, {number}",
                        "call {linked}",
                        "mov r11, rax",
                        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                        "test r11, r11",
                        "jz 2f",
                        "jmp r11",
                        "2:",
                        "mov eax, {none}",
                        "ret",
                        number = const hooks::TYPED.len() + Number::$symbol as usize,
                        linked = sym linked_at,
                        none = const NOT_INITIALIZED,
                    )
                }
            )*
        }
    };
}

extern "C" fn linked_at(index: usize) -> *mut core::ffi::c_void {
    interpose::linked(index)
}

// Variants for a default stream of each thread have names of their own. `cuGetProcAddress` knows them by a flag, so their
// base is a name that it does not know.
#[cfg(target_arch = "x86_64")]
gated! {
    cuLaunchKernel = c"cuLaunchKernel" 4000;
    cuLaunchKernel_ptsz = c"cuLaunchKernel_ptsz" 7000;
    cuLaunchKernelEx = c"cuLaunchKernelEx" 11060;
    cuLaunchKernelEx_ptsz = c"cuLaunchKernelEx_ptsz" 11060;
    cuLaunchCooperativeKernel = c"cuLaunchCooperativeKernel" 9000;
    cuLaunchCooperativeKernel_ptsz = c"cuLaunchCooperativeKernel_ptsz" 9000;
    cuGraphLaunch = c"cuGraphLaunch" 10000;
    cuGraphLaunch_ptsz = c"cuGraphLaunch_ptsz" 10000;
    cuMemcpy = c"cuMemcpy" 4000;
    cuMemcpy_ptds = c"cuMemcpy_ptds" 7000;
    cuMemcpyAsync = c"cuMemcpyAsync" 4000;
    cuMemcpyAsync_ptsz = c"cuMemcpyAsync_ptsz" 7000;
    cuMemcpyHtoD_v2 = c"cuMemcpyHtoD" 3020;
    cuMemcpyHtoD_v2_ptds = c"cuMemcpyHtoD_v2_ptds" 7000;
    cuMemcpyDtoH_v2 = c"cuMemcpyDtoH" 3020;
    cuMemcpyDtoH_v2_ptds = c"cuMemcpyDtoH_v2_ptds" 7000;
    cuMemcpyDtoD_v2 = c"cuMemcpyDtoD" 3020;
    cuMemcpyDtoD_v2_ptds = c"cuMemcpyDtoD_v2_ptds" 7000;
    cuMemcpyHtoDAsync_v2 = c"cuMemcpyHtoDAsync" 3020;
    cuMemcpyHtoDAsync_v2_ptsz = c"cuMemcpyHtoDAsync_v2_ptsz" 7000;
    cuMemcpyDtoHAsync_v2 = c"cuMemcpyDtoHAsync" 3020;
    cuMemcpyDtoHAsync_v2_ptsz = c"cuMemcpyDtoHAsync_v2_ptsz" 7000;
    cuMemcpyDtoDAsync_v2 = c"cuMemcpyDtoDAsync" 3020;
    cuMemcpyDtoDAsync_v2_ptsz = c"cuMemcpyDtoDAsync_v2_ptsz" 7000;
    cuMemsetD8Async = c"cuMemsetD8Async" 3020;
    cuMemsetD8Async_ptsz = c"cuMemsetD8Async_ptsz" 7000;
    cuMemsetD32Async = c"cuMemsetD32Async" 3020;
    cuMemsetD32Async_ptsz = c"cuMemsetD32Async_ptsz" 7000;
    cuStreamQuery = c"cuStreamQuery" 2000;
    cuStreamQuery_ptsz = c"cuStreamQuery_ptsz" 7000;
    cuStreamSynchronize = c"cuStreamSynchronize" 2000;
    cuStreamSynchronize_ptsz = c"cuStreamSynchronize_ptsz" 7000;
    cuStreamWaitEvent = c"cuStreamWaitEvent" 3020;
    cuStreamWaitEvent_ptsz = c"cuStreamWaitEvent_ptsz" 7000;
    cuEventRecord = c"cuEventRecord" 2000;
    cuEventRecord_ptsz = c"cuEventRecord_ptsz" 7000;
    cuEventQuery = c"cuEventQuery" 2000;
    cuEventSynchronize = c"cuEventSynchronize" 2000;
    cuCtxSynchronize = c"cuCtxSynchronize" 2000;
}

/// No function is behind the gate on the other architecture.
#[cfg(not(target_arch = "x86_64"))]
pub const GATED: [Hook; 0] = [];
