#![allow(
    unsafe_code,
    reason = "called by CRIU through C, and traces the job's threads"
)]
//! Extended registers of a thread (the processor's `XSAVE` area) that CRIU (4.2) does not restore: those that it does not
//! know, such as the tiles of AMX.

use core::ffi::{c_int, c_void};

use super::tracing::ptrace;

/// Components that CRIU saves and restores: x87, SSE, AVX, MPX, AVX-512, keys' rights and shadow stacks.
const OF_CRIU: u64 = 0b1010_1111_1111;
/// The component with a thread's rights for protection keys (`PKRU`).
pub const KEY_RIGHTS: u32 = 9;
/// The component with the configuration of the tiles.
pub const TILE_SHAPES: u32 = 17;
/// The component with the tiles. A process needs the kernel's permission for it, and a thread room, which the kernel makes
/// when the thread first uses it.
pub const TILES: u32 = 18;
/// Components that may need permission.
pub const BY_PERMISSION: u64 = 1 << TILES;
/// Bytes of the largest component: eight tiles.
pub const COMPONENT_BYTES_MAX: usize = 8192;
/// Room for the area. That of a processor with AMX has 11,008 bytes.
const AREA_BYTES: usize = 16 << 10;
/// Place of the set of components that are not in their initial state.
const IN_USE: usize = 512;
/// Bytes of the shapes that are not zero for one tile of 16 rows with 64 bytes: palette, bytes of a row, rows.
const ONE_TILE: [(usize, u8); 3] = [(0, 1), (16, 64), (48, 16)];

/// The extended registers of a thread, in the processor's format.
pub struct ExtendedRegisters {
    area: [u8; AREA_BYTES],
    len: usize,
}

/// `struct iovec`.
#[repr(C)]
struct Buffer {
    at: *mut c_void,
    len: usize,
}

impl ExtendedRegisters {
    /// Reads those of a thread.
    pub fn of(thread: c_int) -> Option<Self> {
        let mut area = [0; AREA_BYTES];
        let mut buffer = Buffer {
            at: area.as_mut_ptr().cast(),
            len: AREA_BYTES,
        };
        // SAFETY: the kernel writes at most so many bytes, and their number.
        let read = unsafe { ptrace(PTRACE_GETREGSET, thread, NT_X86_XSTATE, &raw mut buffer) };
        let len = buffer.len;
        (read == 0 && len < AREA_BYTES).then_some(Self { area, len })
    }

    /// Gives them to a thread.
    pub fn give_to(&mut self, thread: c_int) -> bool {
        let mut buffer = Buffer {
            at: self.area.as_mut_ptr().cast(),
            len: self.len,
        };
        // SAFETY: the kernel reads at most so many bytes.
        unsafe { ptrace(PTRACE_SETREGSET, thread, NT_X86_XSTATE, &raw mut buffer) == 0 }
    }

    /// Returns the set of components that are not in their initial state and that CRIU does not know.
    pub fn unknown_to_criu(&self) -> u64 {
        let set = self.area.get(IN_USE..).and_then(|at| at.first_chunk());
        let unknown = set.map_or(0, |set| u64::from_ne_bytes(*set)) & !OF_CRIU;
        // Without shapes there are no tiles.
        if unknown & 1 << TILE_SHAPES == 0 {
            unknown & !(1 << TILES)
        } else {
            unknown
        }
    }

    /// Returns a component.
    pub fn component(&self, number: u32) -> Option<&[u8]> {
        self.area.get(place_of(number)?)
    }

    /// Replaces a component.
    pub fn set_component(&mut self, number: u32, bytes: &[u8]) -> Option<()> {
        let place = self.area.get_mut(place_of(number)?)?;
        if place.len() != bytes.len() {
            return None;
        }
        place.copy_from_slice(bytes);
        let byte = self.area.get_mut(IN_USE + number as usize / 8)?;
        *byte |= 1 << (number % 8);
        Some(())
    }

    /// Configures one tile, which an instruction can use.
    pub fn set_one_tile(&mut self) -> Option<()> {
        let mut shapes = [0; 64];
        for (at, value) in ONE_TILE {
            shapes[at] = value;
        }
        self.set_component(TILE_SHAPES, &shapes)
    }
}

/// Returns the place of a component in the area; `None` for one that this processor does not have.
fn place_of(component: u32) -> Option<core::ops::Range<usize>> {
    let (bytes, place) = processor::component(component);
    let (bytes, place) = (usize::try_from(bytes).ok()?, usize::try_from(place).ok()?);
    let is_known = bytes > 0 && bytes <= COMPONENT_BYTES_MAX && component < u64::BITS;
    is_known.then(|| place..place + bytes)
}

/// Returns the set of components that the kernel saves for threads and that CRIU does not know.
pub fn unknown_components() -> u64 {
    processor::components() & !OF_CRIU
}

pub use processor::has_keys;

/// Questions to the processor about itself.
#[cfg(target_arch = "x86_64")]
mod processor {
    use core::arch::asm;
    use core::arch::x86_64::{__cpuid_count, CpuidResult};

    const OSXSAVE: u32 = 1 << 27;
    const OSPKE: u32 = 1 << 4;

    /// The set of components that the kernel has enabled.
    pub fn components() -> u64 {
        if ask(1, 0).ecx & OSXSAVE == 0 {
            return 0;
        }
        let (low, high): (u32, u32);
        // SAFETY: the instruction exists, by the check above, and reads register 0, which exists.
        unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nostack)) };
        u64::from(high) << 32 | u64::from(low)
    }

    /// Bytes of a component, and its place in the area.
    pub fn component(number: u32) -> (u32, u32) {
        let answer = ask(0xd, number);
        (answer.eax, answer.ebx)
    }

    /// True if there are protection keys, and the kernel uses them.
    pub fn has_keys() -> bool {
        ask(0, 0).eax >= 7 && ask(7, 0).ecx & OSPKE != 0
    }

    #[allow(unused_unsafe, reason = "older compilers want it")]
    fn ask(leaf: u32, part: u32) -> CpuidResult {
        // SAFETY: every processor with 64-bit code has the instruction.
        unsafe { __cpuid_count(leaf, part) }
    }
}

/// There is nothing that CRIU does not know.
#[cfg(not(target_arch = "x86_64"))]
mod processor {
    pub fn components() -> u64 {
        0
    }

    pub fn component(_number: u32) -> (u32, u32) {
        (0, 0)
    }

    pub fn has_keys() -> bool {
        false
    }
}

const PTRACE_GETREGSET: c_int = 0x4204;
const PTRACE_SETREGSET: c_int = 0x4205;
const NT_X86_XSTATE: u64 = 0x202;
