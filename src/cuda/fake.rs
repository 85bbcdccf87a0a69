//! A driver for tests: obeys the state machine and fails on request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use super::cuda_process::CheckpointApi;
use super::error::{Call, Code};
use super::map::GpuMap;
use super::state::State;
use super::sys;
use super::uuid::GpuUuid;
use crate::clock;

/// The effect of a failing call on the state before it reports its failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// No effect: the usual failure.
    None,
    /// The requested effect.
    Done,
}

/// Calls that fail: the `times` calls of a kind from the `from`-th on (counted from 0).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fault {
    pub(crate) call: Call,
    pub(crate) from: usize,
    pub(crate) times: usize,
    pub(crate) code: i32,
    pub(crate) effect: Effect,
}

#[derive(Default)]
struct Inner {
    states: BTreeMap<i32, State>,
    calls: Vec<(Call, i32)>,
    fail_nth: Option<(usize, i32, Effect)>,
    fail_always: Vec<(i32, Call, i32)>,
    faults: Vec<Fault>,
    gone: Vec<i32>,
    /// A process whose GPU work ends only when the other one has been unlocked.
    ahead: Option<(i32, i32)>,
    /// A GPU that every restore must map.
    moved_from: Option<GpuUuid>,
    maps: Vec<GpuMap>,
}

/// A fake driver shared by the test and the code under test.
#[derive(Default)]
pub(crate) struct Fake(Mutex<Inner>);

impl Fake {
    /// Returns a driver with running CUDA processes.
    pub(crate) fn new(pids: &[i32]) -> Arc<Self> {
        Self::in_state(pids, State::Running)
    }

    pub(crate) fn in_state(pids: &[i32], state: State) -> Arc<Self> {
        let fake = Self::default();
        fake.inner().states = pids.iter().map(|&pid| (pid, state)).collect();
        Arc::new(fake)
    }

    /// Makes the `n`-th call from the start, counted from 0, return `code`.
    pub(crate) fn fail_nth(&self, n: usize, code: i32, effect: Effect) {
        self.inner().fail_nth = Some((n, code, effect));
    }

    pub(crate) fn fail_always(&self, pid: i32, call: Call, code: i32) {
        self.inner().fail_always.push((pid, call, code));
    }

    /// Replaces the faults; the first one that matches a call applies.
    pub(crate) fn fail(&self, faults: &[Fault]) {
        self.inner().faults = faults.to_vec();
    }

    /// Declares that the processes had this GPU, which does not exist here.
    pub(crate) fn move_from(&self, gpu: GpuUuid) {
        self.inner().moved_from = Some(gpu);
    }

    /// Returns the map of each restore.
    pub(crate) fn maps(&self) -> Vec<GpuMap> {
        self.inner().maps.clone()
    }

    /// Makes one process wait on the GPU for work that the other begins only after an unlock.
    pub(crate) fn set_ahead(&self, ahead: i32, behind: i32) {
        self.inner().ahead = Some((ahead, behind));
    }

    pub(crate) fn set(&self, pid: i32, state: State) {
        self.inner().states.insert(pid, state);
    }

    /// Ends the process.
    pub(crate) fn end(&self, pid: i32) {
        let mut inner = self.inner();
        inner.states.remove(&pid);
        inner.gone.push(pid);
    }

    /// Makes the process execute a program that does not use CUDA.
    pub(crate) fn change(&self, pid: i32) {
        self.inner().states.remove(&pid);
    }

    pub(crate) fn state_of(&self, pid: i32) -> Option<State> {
        self.inner().states.get(&pid).copied()
    }

    pub(crate) fn calls(&self) -> Vec<(Call, i32)> {
        self.inner().calls.clone()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap()
    }

    fn step(&self, pid: i32, call: Call, from: State, to: State) -> Result<(), Code> {
        let mut inner = self.inner();
        let fault = inner.begin(pid, call);
        if let Some((number, Effect::None)) = fault {
            return Err(code(number));
        }
        match inner.states.get_mut(&pid) {
            None => return Err(code(sys::OPERATING_SYSTEM)),
            Some(state) if *state == from => *state = to,
            Some(_) => return Err(code(sys::ILLEGAL_STATE)),
        }
        fault.map_or(Ok(()), |(number, _)| Err(code(number)))
    }
}

impl Inner {
    fn is_busy(&self, pid: i32) -> bool {
        let behind = self.ahead.filter(|(ahead, _)| *ahead == pid);
        behind.is_some_and(|(_, behind)| !self.calls.contains(&(Call::Unlock, behind)))
    }

    fn begin(&mut self, pid: i32, call: Call) -> Option<(i32, Effect)> {
        let n = self.calls.len();
        let of_kind = self.calls.iter().filter(|(other, _)| *other == call);
        let nth = of_kind.count();
        self.calls.push((call, pid));
        let fault = self.faults.iter().find(|fault| {
            let places = fault.from..fault.from.saturating_add(fault.times);
            fault.call == call && places.contains(&nth)
        });
        if let Some(fault) = fault {
            return Some((fault.code, fault.effect));
        }
        if let Some((_, number, effect)) = self.fail_nth.filter(|(at, ..)| *at == n) {
            return Some((number, effect));
        }
        self.fail_always
            .iter()
            .find(|(p, c, _)| (*p, *c) == (pid, call))
            .map(|(.., number)| (*number, Effect::None))
    }
}

fn code(number: i32) -> Code {
    Code {
        number,
        name: format!("CUDA_ERROR_TEST_{number}"),
        meaning: String::new(),
    }
}

impl CheckpointApi for Fake {
    fn prepare(&self) {}

    fn state(&self, pid: i32) -> Result<State, Code> {
        let mut inner = self.inner();
        if let Some((number, _)) = inner.begin(pid, Call::GetState) {
            return Err(code(number));
        }
        let missing = if inner.gone.contains(&pid) {
            sys::OPERATING_SYSTEM
        } else {
            sys::NOT_INITIALIZED
        };
        inner.states.get(&pid).copied().ok_or_else(|| code(missing))
    }

    fn restore_thread(&self, pid: i32) -> Result<i32, Code> {
        let known = self.inner().states.contains_key(&pid);
        known
            .then_some(pid + 1)
            .ok_or_else(|| code(sys::NOT_INITIALIZED))
    }

    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), Code> {
        assert!(timeout_ms > 0, "a lock without a limit");
        let deadline = clock::now() + Duration::from_millis(timeout_ms.into());
        while self.inner().is_busy(pid) {
            if clock::now() >= deadline {
                self.inner().calls.push((Call::Lock, pid));
                return Err(code(sys::NOT_READY));
            }
            thread::sleep(Duration::from_millis(1));
        }
        self.step(pid, Call::Lock, State::Running, State::Locked)
    }

    fn checkpoint(&self, pid: i32) -> Result<(), Code> {
        self.step(pid, Call::Checkpoint, State::Locked, State::Checkpointed)
    }

    fn restore(&self, pid: i32, map: &GpuMap) -> Result<(), Code> {
        {
            let mut inner = self.inner();
            inner.maps.push(map.clone());
            let missing = inner.moved_from.is_some_and(|gpu| {
                let named = map.pairs().iter().any(|pair| pair.old == gpu);
                !named
            });
            if missing {
                inner.calls.push((Call::Restore, pid));
                return Err(code(sys::INVALID_VALUE));
            }
        }
        self.step(pid, Call::Restore, State::Checkpointed, State::Locked)
    }

    fn unlock(&self, pid: i32) -> Result<(), Code> {
        self.step(pid, Call::Unlock, State::Locked, State::Running)
    }

    fn exists(&self, pid: i32) -> bool {
        !self.inner().gone.contains(&pid)
    }
}
