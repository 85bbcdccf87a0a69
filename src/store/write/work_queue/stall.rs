//! Limit on the time that a stream waits for a buffer while the job is frozen and no buffer is returned.

use std::sync::MutexGuard;
use std::time::Duration;

use super::{Phase, State, WorkQueue};
use crate::store::error::WriteError;
use crate::sync::{locked, wait, wait_for};

/// Looks whether a store takes nothing, within the time that it may. They are counted: a machine that was suspended looks
/// late, but not often.
const LOOKS: u32 = 40;

/// Observations of a stream since it waits.
pub(super) struct Stall {
    rests: u64,
    looks: u32,
}

impl WorkQueue {
    /// Ends the image if the store takes nothing for so long while Holding.
    pub(in crate::store) fn limit_stalls(&self, limit: Duration) {
        locked(&self.state).stall_limit = Some(limit);
    }

    /// Waits until something comes back, or the image has ended.
    pub(super) fn wait_for_space<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        stall: &mut Stall,
    ) -> MutexGuard<'a, State> {
        let Some(limit) = state.stall_limit.filter(|_| state.phase == Phase::Holding) else {
            return wait(&self.space, state);
        };
        let (state, is_late) = wait_for(&self.space, state, limit / LOOKS);
        if state.rests != stall.rests {
            *stall = Stall::begun(&state);
        } else if is_late {
            stall.looks += 1;
        }
        if stall.looks < LOOKS || state.phase != Phase::Holding {
            return state;
        }
        drop(state);
        self.stop(WriteError::Stalled(limit));
        locked(&self.state)
    }
}

impl Stall {
    pub fn begun(state: &State) -> Self {
        Self {
            rests: state.rests,
            looks: 0,
        }
    }
}
