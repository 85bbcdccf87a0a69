//! The suspend of processes whose device memory stays on the GPUs.
//!
//! ```text
//! lock ─ halt ─ unlock ─ agents release ─ lock ─▶ taken, for the image ─ suspend
//!   ▲                                        │ a thread was halted at a point that the driver waits for
//!   └────────── threads continue ──────────┘
//! ```

use std::time::Duration;

use super::copy_lanes::TakeOver;
use super::error::ResidentError;
use super::kept_memory::KeptMemory;
use super::policy::Cover;
use crate::clock;
use crate::cuda::{self, Driver, Locked, SuspendOptions};

use super::super::halted::{HaltGroup, HaltPause, HaltedProcesses, LAST_RESORT};
use crate::run::format::chain;
use crate::run::image_facts::Stopwatch;
use crate::run::running_job::Agents;

/// Number of attempts to halt the job at a point that neither the driver nor an agent waits for, after which the driver
/// alone suspends it.
const TRIES_MAX: u32 = 5;
/// Time limit for the attempts where only the agents can save the memory.
const TRY_LIMIT: Duration = Duration::from_secs(20);
/// First pause between two attempts: long enough for a CUDA call to finish.
const TRY_PAUSE: Duration = Duration::from_millis(5);

/// The processes to be suspended.
#[derive(Clone, Copy)]
pub(crate) struct ResidentProcesses<'a> {
    pub driver: &'a Driver,
    /// All CUDA processes.
    pub users: &'a [i32],
    pub agents: &'a Agents,
    /// CUDA processes with an agent.
    pub covers: &'a [Cover],
}

/// Halts the processes, makes the agents release their memory, and suspends the GPU state of all `users`; before that,
/// `take` is called with the memory. The processes are still halted on return.
///
/// # Errors
/// Everything is unchanged, unless the error reports that the job is lost.
pub(crate) fn suspend(
    processes: ResidentProcesses<'_>,
    halt_group: &HaltGroup,
    options: &SuspendOptions,
    watch: &mut Stopwatch,
    take: impl FnOnce(&KeptMemory) -> Result<TakeOver, ResidentError>,
) -> Result<(cuda::Suspended, HaltedProcesses, KeptMemory, TakeOver), ResidentError> {
    let mut kept = KeptMemory::of(processes.agents, processes.covers)?;
    let (mut halted, locked) = halt_released(processes, halt_group, options, watch, &mut kept)?;
    let taking = take(&kept);
    watch.lap("release");
    let taking = match taking {
        Ok(taking) => taking,
        Err(error) => {
            // Processes that were only locked are unlocked by the drop.
            halted.during(Duration::ZERO, || drop(locked));
            return Err(undo(error, None, halted, &mut kept));
        }
    };
    match halted.during(Duration::ZERO, || locked.suspend()) {
        Ok(suspended) => {
            watch.lap("suspend");
            Ok((suspended, halted, kept, taking))
        }
        Err(error) => Err(undo(error.into(), Some(taking), halted, &mut kept)),
    }
}

/// Halts the processes and makes the agents release their memory, again if a thread was halted at a point that the
/// driver or an agent waits for. The processes are locked on return.
fn halt_released(
    processes: ResidentProcesses<'_>,
    halt_group: &HaltGroup,
    options: &SuspendOptions,
    watch: &mut Stopwatch,
    kept: &mut KeptMemory,
) -> Result<(HaltedProcesses, Locked), ResidentError> {
    let mut held = false;
    let released = try_halt_released(processes, halt_group, options, watch, kept, &mut held);
    if held {
        kept.hold_calls(processes.covers, false);
    }
    released
}

/// Does the above; `held` is set when CUDA calls are held back, which they may still be on return.
fn try_halt_released(
    processes: ResidentProcesses<'_>,
    halt_group: &HaltGroup,
    options: &SuspendOptions,
    watch: &mut Stopwatch,
    kept: &mut KeptMemory,
    held: &mut bool,
) -> Result<(HaltedProcesses, Locked), ResidentError> {
    let deadline = clock::now() + TRY_LIMIT;
    let is_bound = processes.covers.iter().any(Cover::is_bound);
    let mut pause = HaltPause::first(TRY_PAUSE);
    let mut tries = 0;
    loop {
        tries += 1;
        if tries > 1 {
            // Threads that are always inside CUDA calls wait outside the driver for a moment.
            kept.hold_calls(processes.covers, true);
            *held = true;
        }
        let mut halted = halt(processes, halt_group, options, watch, kept)?;
        match release(processes, &mut halted, kept) {
            Ok(locked) => return Ok((halted, locked)),
            Err(error) if !error.passes() => return Err(error),
            Err(_) if tries >= TRIES_MAX && !(is_bound && clock::now() < deadline) => {
                return Err(ResidentError::Busy { tries });
            }
            Err(error) => tracing::debug!(tries, "the job is halted again: {}", chain(&error)),
        }
        drop(halted);
        pause.wait();
        // An agent whose reply was late may still be calling the driver. Once the processes are locked, it could neither
        // finish nor reply, so this waits for its reply. An error is found again by the next attempt.
        let _ = kept.is_whole(processes.driver, processes.covers);
    }
}

/// Halts the processes while no GPU work is pending.
fn halt(
    processes: ResidentProcesses<'_>,
    halt_group: &HaltGroup,
    options: &SuspendOptions,
    watch: &mut Stopwatch,
    kept: &mut KeptMemory,
) -> Result<HaltedProcesses, ResidentError> {
    let locked = cuda::lock_all(processes.driver, processes.users, options)?;
    watch.lap("lock");
    kept.is_whole(processes.driver, processes.covers)?;
    let mut halted = halt_group.halt_outside_driver()?;
    halted.during(Duration::ZERO, || locked.unlock())?;
    Ok(halted)
}

/// Makes the agents release the memory of the halted processes, and locks the processes.
fn release(
    processes: ResidentProcesses<'_>,
    halted: &mut HaltedProcesses,
    kept: &mut KeptMemory,
) -> Result<Locked, ResidentError> {
    // A slow step is repeated, so no thread needs to run freely for it.
    halted.during(Duration::MAX, || kept.let_go())?;
    halted.during(LAST_RESORT, || {
        kept.lock_again(processes.driver, processes.users)
    })
}

/// Returns the memory to the processes after a failure, and lets them continue.
fn undo(
    error: ResidentError,
    taking: Option<TakeOver>,
    mut halted: HaltedProcesses,
    kept: &mut KeptMemory,
) -> ResidentError {
    let given_back = halted.during(LAST_RESORT, || kept.give_back_unless_lost(&error));
    drop(halted);
    // The copier finishes with the memory before another attempt, and the job does not wait for it.
    drop(taking.map(TakeOver::join));
    given_back.err().unwrap_or(error)
}
