//! What the loop looks after beside the job's state: when to snapshot, signs of a hang, hooks, systemd.
//!
//! The loop calls [`Supervisor::attend`] after each event, and hands over the timers and events of these parts.

use super::computing::ComputeClock;
use super::hook;
use super::hooks::Hooks;
use super::run::{RunError, system};
use super::run_state::RunState;
use super::supervise::{Running, Stage, Supervisor};
use super::timing::Timing;
use super::workshop::Workshop;
use crate::clock;

/// What the threads of these parts report.
#[derive(Debug)]
pub(super) enum News {
    /// A hook that was called has ended.
    HookEnded(hook::Ended),
    /// The hook of a snapshot that begins has ended; its thread goes on.
    BeforeSnapshotEnded(hook::Ended),
}

/// The state of these parts.
#[derive(Debug)]
pub(super) struct Operation {
    /// How long the job has computed under this supervisor.
    pub clock: ComputeClock,
    pub timing: Timing,
    pub hooks: Hooks,
    /// The job of the snapshot under way computes again.
    released: bool,
}

impl Operation {
    pub fn new(shop: &Workshop, state: &RunState) -> Result<Self, RunError> {
        let chance = clock::random().map_err(system("get random bytes"))?;
        let (seed, _) = chance.split_first_chunk().unwrap_or((&[0; 8], &[]));
        Ok(Self {
            clock: ComputeClock::default(),
            timing: Timing::new(shop, state, u64::from_le_bytes(*seed)),
            hooks: Hooks::default(),
            released: false,
        })
    }
}

impl Supervisor {
    /// An event was handled.
    pub fn attend(&mut self) {
        let computes = self.is_computing();
        self.operation.clock.set(computes, clock::now());
    }

    pub fn news(&mut self, news: News) {
        match news {
            News::HookEnded(ended) => self.called_hook_ended(&ended),
            News::BeforeSnapshotEnded(ended) => self.hook_ended(&ended),
        }
    }

    /// A snapshot begins: from now on the job may stand still.
    pub fn freeze_begins(&mut self) {
        self.operation.released = false;
    }

    /// The job of the snapshot under way computes again.
    pub fn freeze_ended(&mut self) {
        self.operation.released = true;
    }

    /// Whether the job computes, as far as we know: it is not dead, restored, paused or frozen.
    fn is_computing(&self) -> bool {
        match &self.stage {
            Stage::Running(Running {
                busy,
                pause: None,
                ended: None,
                gone: false,
                ..
            }) => busy.is_none() || self.operation.released,
            Stage::Running(_)
            | Stage::Idle
            | Stage::Starting(_)
            | Stage::Restoring(_)
            | Stage::Ending(_)
            | Stage::Waiting { .. } => false,
        }
    }
}
