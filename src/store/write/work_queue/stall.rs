//! Limit on the time that a stream waits for a buffer while the job is frozen and no buffer is returned.

use std::sync::MutexGuard;
use std::time::Duration;

use super::{Phase, State, WorkQueue};
use crate::store::error::WriteError;
use crate::sync::{locked, wait, wait_for};

/// Number of checks within the limit. Checks are counted instead of time, because a machine that was suspended is late
/// at one check only.
const LOOKS: u32 = 40;

/// Observations of a stream since it began to wait.
pub(super) struct Stall {
    rests: u64,
    looks: u32,
}

impl WorkQueue {
    /// Limits the time without a finished piece while Holding; the image fails after that.
    pub(in crate::store) fn limit_stalls(&self, limit: Duration) {
        locked(&self.state).stall_limit = Some(limit);
    }

    /// Waits until a buffer is returned or the image has failed.
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
