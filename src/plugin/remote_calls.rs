#![allow(
    unsafe_code,
    reason = "called by CRIU through C, and traces the job's threads"
)]
//! System calls in threads that CRIU traces, all of which are stopped. At a dump they ask for state that only the process
//! itself can see. At a restore, before the threads run, they set attributes that only a thread itself can set and that CRIU
//! (4.2) does not restore: execution domain (`personality`) and memory policy (`set_mempolicy`).
//!
//! A thread executes one instruction that is written over its program's code, with signals blocked, and then has its former
//! state again. A restartable sequence (`rseq`) that it is in is hidden from the kernel meanwhile: the kernel would take it
//! for left, and CRIU would not restart it.

use core::ffi::{CStr, c_int};

use super::kernel::EINTR;
use super::listing::{for_each_line, with_file};
use super::mapping::range;
use super::text::number;
use super::tracing::{
    ORIG_RAX, PTRACE_CONT, PTRACE_INTERRUPT, R8, R9, R10, RAX, RDI, RDX, RIP, RSI, Registers,
    SYSCALL, SYSCALL_BYTES, below_stack, is_native, peek, poke, poke_all, ptrace, registers,
    request, set_registers, waiting_signals,
};

/// Makes the calls of a list: entries `THREAD PERSONALITY MODE LOW HIGH`, in decimal, separated by semicolons. The last
/// two are the halves of the set of nodes. A personality or mode of [`NONE`] is not set. The supervisor detects
/// failures.
pub fn make_calls(list: &CStr) {
    for entry in list.to_bytes().split(|byte| *byte == b';') {
        let mut words = entry.split(|byte| *byte == b' ').map(number);
        let mut next = || words.next().flatten();
        let (Some(thread), Some(personality), Some(mode), Some(low), Some(high)) =
            (next(), next(), next(), next(), next())
        else {
            continue;
        };
        let thread = c_int::try_from(thread).ok();
        let Some(mut remote) = thread.and_then(Remote::begin) else {
            continue;
        };
        let nodes = u64::from(high) << 32 | u64::from(low);
        if personality != NONE {
            remote.call(SYS_PERSONALITY, [personality.into(), 0, 0, 0]);
        }
        if mode != NONE && remote.put(nodes) {
            let set = if nodes == 0 { 0 } else { remote.place };
            remote.call(SYS_SET_MEMPOLICY, [mode.into(), set, NODES, 0]);
        }
    }
}

/// Number that stands for no value.
pub const NONE: u32 = u32::MAX;

/// A stopped thread that executes instructions. It has its former state again when the value is dropped.
pub struct Remote {
    thread: c_int,
    registers: Registers,
    mask: u64,
    /// Address of a word that the instructions may use.
    pub place: u64,
    /// Address of the instructions.
    code: u64,
    /// Addresses of words with their former values: both places, and the thread's restartable sequence.
    words: [(u64, u64); 3],
    was_stopped: bool,
}

/// `struct ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Default)]
struct Sequences {
    address: u64,
    rest: [u32; 4],
}

impl Remote {
    /// Returns `None` for a thread that has exited, or in which no instruction can be executed.
    pub fn begin(thread: c_int) -> Option<Self> {
        let registers = registers(thread).filter(is_native)?;
        let (mask, size) = (mask(thread)?, size_of::<u64>() as u64);
        // It would be delivered instead of a step, once it is no longer blocked.
        if mask & SIGTRAP_BIT != 0 && has_pending_trap(thread) {
            return None;
        }
        let (code, place) = places(thread)?;
        let sequence = sequence(thread)?;
        let with_value = |address| Some((address, peek(thread, address)?));
        let words = [
            with_value(code)?,
            with_value(place)?,
            // Without a sequence, the word is not written.
            with_value(sequence).unwrap_or_default(),
        ];
        // A blocked SIGTRAP would lose its handler when the thread reports that it has made a step.
        let blocked = !SIGTRAP_BIT;
        // SAFETY: reads the value; the thread is stopped.
        unsafe { ptrace(PTRACE_SETSIGMASK, thread, size, &raw const blocked) };
        let begun = Self {
            thread,
            registers,
            mask,
            place,
            code,
            words,
            was_stopped: false,
        };
        (sequence == 0 || poke(thread, sequence, 0)).then_some(begun)
    }

    /// Writes the word at [`place`](Self::place).
    pub fn put(&self, word: u64) -> bool {
        poke(self.thread, self.place, word)
    }

    /// Reads the word at [`place`](Self::place).
    pub fn word(&self) -> Option<u64> {
        peek(self.thread, self.place)
    }

    /// Writes words below the stack and the 128 bytes that a function may use there. Returns their address.
    pub fn put_below_stack(&self, words: &[u64]) -> Option<u64> {
        let bytes = 8 * u64::try_from(words.len()).ok()?;
        let begin = below_stack(&self.registers, bytes)?;
        poke_all(self.thread, begin, words)?;
        Some(begin)
    }

    /// Makes a system call of up to four arguments; further ones are 0. Returns its result, or an error's number, negative; `None` if the thread could not make it.
    pub fn call(&mut self, number: u64, arguments: [u64; 4]) -> Option<i64> {
        let mut registers = self.registers;
        registers[RAX] = number;
        [
            registers[RDI],
            registers[RSI],
            registers[RDX],
            registers[R10],
        ] = arguments;
        [registers[R8], registers[R9]] = [0; 2];
        let after = self.execute((SYSCALL, SYSCALL_BYTES), registers)?;
        Some(after[RAX].cast_signed())
    }

    /// Executes `tilezero`, after which the kernel has room for the thread's tiles. The tile is configured.
    pub fn zero_tile(&mut self) -> bool {
        self.execute(TILE_ZERO, self.registers).is_some()
    }

    /// Executes an instruction of so many bytes. Returns the registers after it.
    fn execute(
        &mut self,
        (instruction, bytes): (u64, u64),
        mut registers: Registers,
    ) -> Option<Registers> {
        let [(_, before), ..] = self.words;
        let kept = before & u64::MAX << (8 * bytes);
        registers[RIP] = self.code;
        // No system call is in progress that the kernel would restart.
        registers[ORIG_RAX] = u64::MAX;
        if !poke(self.thread, self.code, kept | instruction) {
            return None;
        }
        let is_set = set_registers(self.thread, &registers);
        let after = (is_set && self.step()).then(|| self::registers(self.thread))??;
        (after[RIP] == self.code + bytes).then_some(after)
    }

    /// Lets the thread execute one instruction. Returns false if it has not, but received a signal instead. A stop signal,
    /// which no mask blocks, is noted: CRIU sends it to a process that is to be restored as stopped.
    fn step(&mut self) -> bool {
        for _ in 0..STEPS_MAX {
            let mut status = 0;
            let has_moved =
                request(PTRACE_SINGLESTEP, self.thread) && wait(self.thread, &mut status);
            match status {
                _ if !has_moved => return false,
                STEPPED => return true,
                GOT_STOP => self.was_stopped = true,
                // A report that the process is stopped.
                other if other >> 16 == PTRACE_EVENT_STOP => {}
                _ => return false,
            }
        }
        false
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let (thread, size) = (self.thread, size_of::<u64>() as u64);
        for (address, word) in self.words {
            if address != 0 {
                poke(thread, address, word);
            }
        }
        set_registers(thread, &self.registers);
        // SAFETY: reads the value given; the thread is stopped.
        unsafe {
            self.was_stopped |= rest(thread);
            ptrace(PTRACE_SETSIGMASK, thread, size, &raw const self.mask);
            if self.was_stopped {
                // Reaches the thread's process, as CRIU's signal did.
                kill(thread, SIGSTOP);
            }
        }
    }
}

/// Brings a thread from its step to the stop in which CRIU had it, before it executes anything. Otherwise it would get the
/// step's SIGTRAP if CRIU was killed. Returns true if that has taken away a stop signal.
pub fn rest(thread: c_int) -> bool {
    let mut was_stopped = false;
    for _ in 0..STEPS_MAX {
        let mut status = 0;
        let goes_on = request(PTRACE_INTERRUPT, thread) && request(PTRACE_CONT, thread);
        if !goes_on || !wait(thread, &mut status) || status != GOT_STOP {
            break;
        }
        was_stopped = true;
    }
    was_stopped
}

/// Returns the mask of the signals that a stopped thread blocks.
pub fn mask(thread: c_int) -> Option<u64> {
    let (mut mask, size) = (0_u64, size_of::<u64>() as u64);
    // SAFETY: the kernel writes a mask of this size.
    (unsafe { ptrace(PTRACE_GETSIGMASK, thread, size, &raw mut mask) } == 0).then_some(mask)
}

/// Returns true for a thread that is in 64-bit code of this machine.
pub fn can_call(thread: c_int) -> bool {
    registers(thread).is_some_and(|registers| is_native(&registers))
}

/// Returns the beginning of a private mapping with code and of one with data.
fn places(thread: c_int) -> Option<(u64, u64)> {
    let (mut code, mut data) = (None, None);
    let find = |file| {
        for_each_line(file, |line| {
            let mut words = line.split(|byte| *byte == b' ');
            let begin = words.next().and_then(range).map(|(begin, _)| begin);
            match words.next() {
                Some(b"r-xp") => code = code.or(begin),
                Some(b"rw-p") => data = data.or(begin),
                _ => {}
            }
            code.is_none() || data.is_none()
        });
    };
    with_file(thread, b"/maps", 0, find)?;
    code.zip(data)
}

/// Returns the address where a thread names the restartable sequence that it is in; 0 if it has none, or on a kernel that
/// does not show it (before 5.13). `None` if the thread cannot be read.
fn sequence(thread: c_int) -> Option<u64> {
    let mut sequences = Sequences::default();
    let (size, into) = (size_of::<Sequences>() as u64, &raw mut sequences);
    // SAFETY: the kernel writes at most so many bytes.
    unsafe { ptrace(PTRACE_GET_RSEQ_CONFIGURATION, thread, size, into) };
    if sequences.address == 0 {
        return Some(0);
    }
    let place = sequences.address + OFFSET_OF_SEQUENCE;
    Some(if peek(thread, place)? == 0 { 0 } else { place })
}

/// Returns true if SIGTRAP waits for a thread, or if that cannot be determined.
fn has_pending_trap(thread: c_int) -> bool {
    waiting_signals(thread).is_none_or(|waiting| waiting & SIGTRAP_BIT != 0)
}

/// Waits until a thread has stopped.
pub fn wait(thread: c_int, status: &mut c_int) -> bool {
    loop {
        // SAFETY: there is room for the status.
        if unsafe { waitpid(thread, status, WALL) } == thread {
            return true;
        }
        // SAFETY: the C library's variable for the error of this thread.
        if unsafe { *__errno_location() } != EINTR {
            return false;
        }
    }
}

/// The instruction `tilezero tmm0`, and its bytes.
const TILE_ZERO: (u64, u64) = (0xc0_497b_e2c4, 5);
/// Attempts to let a thread execute an instruction; each report of a stop takes one.
const STEPS_MAX: u32 = 16;
/// Place of `rseq_cs` in `struct rseq`.
const OFFSET_OF_SEQUENCE: u64 = 8;
/// Bits of a set of nodes, and one more, by the convention of the call.
const NODES: u64 = 65;
const SYS_PERSONALITY: u64 = 135;
const SYS_SET_MEMPOLICY: u64 = 238;
const PTRACE_SINGLESTEP: c_int = 9;
const PTRACE_GETSIGMASK: c_int = 0x420a;
const PTRACE_SETSIGMASK: c_int = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: c_int = 0x420f;
const PTRACE_EVENT_STOP: c_int = 128;
const SIGTRAP: c_int = 5;
const SIGTRAP_BIT: u64 = 1 << (SIGTRAP - 1);
const SIGSTOP: c_int = 19;
/// Low byte of the status of a stopped thread. The next byte is the signal.
pub const STOPPED: c_int = 0x7f;
/// Status of a thread that has executed an instruction.
const STEPPED: c_int = SIGTRAP << 8 | STOPPED;
/// Status of a thread that is about to receive SIGSTOP.
const GOT_STOP: c_int = SIGSTOP << 8 | STOPPED;
/// `__WALL`: also threads.
const WALL: c_int = 0x4000_0000;

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn kill(pid: c_int, signal: c_int) -> c_int;
    fn __errno_location() -> *mut c_int;
}
