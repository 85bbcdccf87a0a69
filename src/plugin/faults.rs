#![allow(
    unsafe_code,
    reason = "called by CRIU through C, and traces the job's threads"
)]
//! Signals of faults that wait for a thread which CRIU has stopped right after the fault: SIGSEGV by which a runtime notices
//! a page, SIGSYS of a call that a handler makes.
//!
//! CRIU's code and the plugin's end with a trap. In such a thread, the kernel (Linux 6.18, `dequeue_synchronous_signal`) takes
//! the signal of the fault instead, even though it is blocked. The fault would be lost, and the trap would end the job
//! when it continues. Therefore the thread receives its signal before: it is stopped again at the beginning of the
//! handler. It executes nothing of the program in between.

use core::ffi::c_int;

use super::late_signals::{Queue, number_of, peek};
use super::listing::for_each_thread;
use super::omitted_records::{append, file};
use super::remote_calls::{STOPPED, mask, wait};
use super::tracing::{PTRACE_CONT, PTRACE_INTERRUPT, ptrace, request};
use super::variables::BLOCKED;

/// Signals of faults: SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV, SIGSYS.
const FAULTS: [u64; 6] = [4, 5, 7, 8, 11, 31];
/// Most signals that a thread receives: a handler's frame may itself be at a place that cannot be written.
const RECEIVED_MAX: u32 = 16;
/// Most signals of a thread's queue that are looked at.
const QUEUED_MAX: u64 = 1024;

/// Lets the threads of a process receive the signals of their faults. All threads are stopped, before and after. Returns
/// `None` if that fails, or if a signal ends the process.
pub fn let_faults_arrive(pid: c_int) -> Option<()> {
    for_each_thread(pid, |thread| {
        for _ in 0..RECEIVED_MAX {
            let Some(signal) = fault(thread) else {
                return Some(());
            };
            // It has sent that itself: a fault of a thread that blocks its signal ends the process.
            if mask(thread)? & 1 << (signal - 1) != 0 {
                append(file()?, BLOCKED, pid, &[])?;
                return None;
            }
            receive(thread)?;
        }
        None
    })
}

/// Returns the first signal of a fault that waits for a thread.
fn fault(thread: c_int) -> Option<u64> {
    let mut infos = (0..QUEUED_MAX).map_while(|offset| peek(Queue::of_thread(thread), offset));
    // As the kernel tells them from signals that a process has sent (`SI_USER` and below).
    let first = infos.find(|info| {
        // A signed number of 32 bits.
        let code = info[1] & u64::from(u32::MAX);
        FAULTS.contains(&number_of(info)) && (1..=i32::MAX as u64).contains(&code)
    });
    first.map(|info| number_of(&info))
}

/// Lets a thread take the signal that is first, and stops it in front of the handler's first instruction.
fn receive(thread: c_int) -> Option<()> {
    let mut status = 0;
    // The kernel takes the signal before the thread executes anything.
    (request(PTRACE_CONT, thread) && wait(thread, &mut status)).then_some(())?;
    (status & 0xff == STOPPED).then_some(())?;
    if status >> 16 != 0 {
        // An earlier request to stop was in front of it.
        return Some(());
    }
    let signal = usize::try_from(status >> 8).ok()?;
    let signal = core::ptr::without_provenance::<u8>(signal);
    // SAFETY: takes a number as a pointer.
    let goes_on =
        request(PTRACE_INTERRUPT, thread) && unsafe { ptrace(PTRACE_CONT, thread, 0, signal) } == 0;
    (goes_on && wait(thread, &mut status) && status & 0xff == STOPPED).then_some(())
}
