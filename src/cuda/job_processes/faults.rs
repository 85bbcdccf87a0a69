//! Tests in which every call of the driver fails: each kind, each occurrence, once and from then on, with and without
//! effect, for one, two and three processes.
//!
//! Afterwards every process runs, or the error names exactly those that do not.

use std::sync::Arc;

use super::*;
use crate::cuda::GpuUuid;
use crate::cuda::fake::{Effect, Fake, Fault};
use crate::cuda::state::State;
use crate::cuda::suspension::{resume_all, suspend_all, toggle_all};

const PIDS: [i32; 3] = [300, 301, 302];
const CALLS: [Call; 5] = [
    Call::GetState,
    Call::Lock,
    Call::Checkpoint,
    Call::Restore,
    Call::Unlock,
];
/// A code without a special meaning, and two with one: a timeout, and the work of another program.
const CODES: [i32; 3] = [sys::OUT_OF_MEMORY, sys::NOT_READY, sys::ILLEGAL_STATE];

/// The operation on the processes.
type Operation = fn(&Driver, &[i32]) -> Result<(), TreeError>;

fn once() -> SuspendOptions {
    SuspendOptions {
        attempt: Duration::from_millis(5),
        total: Duration::ZERO,
    }
}

fn map() -> GpuMap {
    let [old, new] = [1, 2].map(|n| GpuUuid::from_bytes([n; 16]));
    format!("{old}={new},{new}={old}").parse().unwrap()
}

/// Operations on running processes, with the resulting state of each.
const FORWARD: [(&str, Operation, State); 7] = [
    ("cycle", cycle, State::Running),
    ("lock, unlock", lock_unlock, State::Running),
    ("lock, drop", lock_drop, State::Running),
    ("suspend, drop", suspend_drop, State::Running),
    ("lock, leave", lock_leave, State::Locked),
    ("suspend, leave", suspend_leave, State::Checkpointed),
    ("toggle", toggle, State::Checkpointed),
];

/// Operations on suspended processes.
const BACK: [(&str, Operation); 4] = [
    ("resume restored", |driver, pids| {
        resume_restored(driver, pids, &GpuMap::default())
    }),
    ("resume restored onto others", |driver, pids| {
        resume_restored(driver, pids, &map())
    }),
    ("resume", |driver, pids| resume_all(driver, pids, &map())),
    ("toggle back", toggle),
];

fn cycle(driver: &Driver, pids: &[i32]) -> Result<(), TreeError> {
    lock_all(driver, pids, &once())?.suspend()?.resume()?;
    Ok(())
}

fn lock_unlock(driver: &Driver, pids: &[i32]) -> Result<(), TreeError> {
    lock_all(driver, pids, &once())?.unlock()
}

fn lock_drop(driver: &Driver, pids: &[i32]) -> Result<(), TreeError> {
    lock_all(driver, pids, &once()).map(drop)
}

fn suspend_drop(driver: &Driver, pids: &[i32]) -> Result<(), TreeError> {
    lock_all(driver, pids, &once())?.suspend().map(drop)
}

fn lock_leave(driver: &Driver, pids: &[i32]) -> Result<(), TreeError> {
    lock_all(driver, pids, &once())?.leave();
    Ok(())
}

fn suspend_leave(driver: &Driver, pids: &[i32]) -> Result<(), TreeError> {
    suspend_all(driver, pids, &once())
}

fn toggle(driver: &Driver, pids: &[i32]) -> Result<(), TreeError> {
    toggle_all(driver, pids, &once(), &GpuMap::default()).map(drop)
}

/// Runs `check` for every fault that `operation` on processes in state `from` can meet, with `undo` always failing in
/// addition. Returns the number of faults.
fn for_all_faults(
    operation: Operation,
    from: State,
    undo: Option<Call>,
    check: impl Fn(&Arc<Fake>, &[i32], Fault, Result<(), TreeError>),
) -> usize {
    let mut faults = 0;
    for count in 1..=PIDS.len() {
        let pids = &PIDS[..count];
        let start = || {
            let fake = Fake::in_state(pids, from);
            (Driver::fake(Arc::clone(&fake) as _), fake)
        };
        let (driver, fake) = start();
        operation(&driver, pids).unwrap();
        let made = fake.calls();
        for call in CALLS {
            let calls = made.iter().filter(|(made, _)| *made == call).count();
            for nth in 0..calls {
                for times in [1, usize::MAX] {
                    for effect in [Effect::None, Effect::Done] {
                        for code in CODES {
                            let (driver, fake) = start();
                            let fault = Fault {
                                call,
                                from: nth,
                                times,
                                code,
                                effect,
                            };
                            let also = undo.map(|call| always(call, sys::OPERATING_SYSTEM));
                            fake.fail(&also.map_or(vec![fault], |also| vec![fault, also]));
                            let result = operation(&driver, pids);
                            faults += 1;
                            check(&fake, pids, fault, result);
                        }
                    }
                }
            }
        }
    }
    faults
}

fn always(call: Call, code: i32) -> Fault {
    Fault {
        call,
        from: 0,
        times: usize::MAX,
        code,
        effect: Effect::None,
    }
}

/// Checks that the error names the processes that do not run: each one is named, with its state if the driver reports
/// it. A named process that runs is one whose state the driver does not report.
fn assert_named(fake: &Fake, pids: &[i32], error: &TreeError, context: &str) {
    let stuck = &error.aftermath().unwrap().stuck;
    for &pid in pids {
        let state = fake.state_of(pid).unwrap();
        let named = stuck.iter().find(|left| left.pid == pid);
        match named {
            None => assert_eq!(state, State::Running, "{pid}: {context}"),
            Some(left) => {
                let told = left.state.is_none_or(|told| told == state);
                let runs = state == State::Running && left.state.is_some();
                assert!(told && !runs, "{pid} is {state}: {context}");
            }
        }
    }
    assert_eq!(error.is_computing(), stuck.is_empty(), "{context}");
}

/// Checks that nothing is lost: once the driver works, every process can be resumed.
fn assert_resumable(fake: &Fake, pids: &[i32], driver: &Driver, context: &str) {
    fake.fail(&[]);
    resume_restored(driver, pids, &GpuMap::default()).unwrap();
    for &pid in pids {
        assert_eq!(fake.state_of(pid), Some(State::Running), "{pid}: {context}");
    }
}

#[test]
fn after_any_fault_processes_run_or_are_named() {
    for (name, operation, to) in FORWARD {
        let faults = for_all_faults(
            operation,
            State::Running,
            None,
            |fake, pids, fault, result| {
                let context = format!("{name}, {fault:?}: {result:?}");
                let all = |state| pids.iter().all(|&pid| fake.state_of(pid) == Some(state));
                match &result {
                    Ok(()) if to != State::Running => assert!(all(to), "{context}"),
                    // A drop returns no error; a call that failed once is made up for.
                    Ok(()) => assert!(all(to) || fault.times > 1, "{context}"),
                    Err(error) if error.aftermath().is_none() => {
                        assert!(all(State::Running), "{context}");
                    }
                    Err(error) => {
                        assert_named(fake, pids, error, &context);
                        assert!(error.is_computing() || fault.times > 1, "{context}");
                    }
                }
            },
        );
        assert!(faults > 100, "{name}: {faults} faults");
    }
}

#[test]
fn after_a_failed_resume_processes_run_or_are_named() {
    for (name, operation) in BACK {
        let faults = for_all_faults(
            operation,
            State::Checkpointed,
            None,
            |fake, pids, fault, result| {
                let context = format!("{name}, {fault:?}: {result:?}");
                let all = |state| pids.iter().all(|&pid| fake.state_of(pid) == Some(state));
                match &result {
                    Ok(()) => assert!(all(State::Running), "{context}"),
                    Err(error) if error.aftermath().is_none() => {
                        assert!(all(State::Checkpointed), "untouched: {context}");
                    }
                    Err(error) => {
                        assert_named(fake, pids, error, &context);
                        assert!(fault.times > 1, "{context}");
                    }
                }
            },
        );
        assert!(faults > 100, "{name}: {faults} faults");
    }
}

#[test]
fn failed_undo_is_reported() {
    for (name, operation, to) in FORWARD {
        for undo in [Call::Restore, Call::Unlock] {
            let faults = for_all_faults(
                operation,
                State::Running,
                Some(undo),
                |fake, pids, fault, result| {
                    let context = format!("{name}, {undo} besides {fault:?}: {result:?}");
                    let all = |state| pids.iter().all(|&pid| fake.state_of(pid) == Some(state));
                    match &result {
                        // A drop returns no error.
                        Ok(()) => assert!(all(to) || name.ends_with("drop"), "{context}"),
                        Err(error) if error.aftermath().is_none() => {
                            assert!(all(State::Running), "untouched: {context}");
                        }
                        Err(error) => assert_named(fake, pids, error, &context),
                    }
                },
            );
            assert!(faults > 100, "{name}: {faults} faults");
        }
    }
}

#[test]
fn recovered_driver_resumes_all_after_any_fault() {
    let ways = FORWARD.map(|(name, operation, _)| (name, operation, State::Running));
    let back = BACK.map(|(name, operation)| (name, operation, State::Checkpointed));
    for (name, operation, from) in ways.into_iter().chain(back) {
        for_all_faults(operation, from, None, |fake, pids, fault, result| {
            let context = format!("{name}, {fault:?}: {result:?}");
            let driver = Driver::fake(Arc::clone(fake) as _);
            assert_resumable(fake, pids, &driver, &context);
        });
    }
}

#[test]
fn map_is_used_in_every_restore_and_retry() {
    for count in 1..=PIDS.len() {
        let pids = &PIDS[..count];
        for nth in 0..=count {
            let fake = Fake::in_state(pids, State::Checkpointed);
            fake.move_from(GpuUuid::from_bytes([1; 16]));
            fake.fail(&[Fault {
                call: Call::Restore,
                from: nth,
                times: 1,
                code: sys::OUT_OF_MEMORY,
                effect: Effect::None,
            }]);
            let driver = Driver::fake(Arc::clone(&fake) as _);
            let error = resume_restored(&driver, pids, &GpuMap::default()).unwrap_err();
            assert_eq!(error.aftermath().unwrap().stuck.len(), count, "{error}");
            let without = fake.maps().len();
            resume_restored(&driver, pids, &map()).unwrap();
            let maps = fake.maps().split_off(without);
            assert!(maps.len() >= count && maps.iter().all(|given| *given == map()));
            assert!(
                pids.iter()
                    .all(|&pid| fake.state_of(pid) == Some(State::Running))
            );
        }
    }
}

#[test]
fn unsupported_map_leaves_processes_suspended() {
    let fake = Fake::in_state(&PIDS, State::Checkpointed);
    let old = Driver::fake_of(Arc::clone(&fake) as _, 12090);
    let error = resume_restored(&old, &PIDS, &map()).unwrap_err();
    assert!(matches!(error, TreeError::Map(_)), "{error}");
    assert!(fake.calls().is_empty());
}
