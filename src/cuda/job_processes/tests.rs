//! Tests of a whole job on the GPU, with a driver that fails on request.

use std::sync::Arc;

use super::*;
use crate::cuda::fake::{Effect, Fake, Fault};

const PIDS: [i32; 3] = [300, 301, 302];

fn driver(fake: &Arc<Fake>) -> Driver {
    Driver::fake(Arc::clone(fake) as Arc<dyn CheckpointApi>)
}

/// Returns options with one attempt at locking, so that a timeout is reported at once.
fn once() -> SuspendOptions {
    SuspendOptions {
        attempt: Duration::from_millis(5),
        total: Duration::ZERO,
    }
}

fn assert_all_running(fake: &Fake, context: &str) {
    for pid in PIDS {
        assert_eq!(
            fake.state_of(pid),
            Some(State::Running),
            "{pid} after {context}"
        );
    }
}

/// Makes all calls of a snapshot; returns the error of the first that failed.
fn cycle(fake: &Arc<Fake>) -> Result<(), TreeError> {
    lock_all(&driver(fake), &PIDS, &once())?
        .suspend()?
        .resume()?;
    Ok(())
}

#[test]
fn a_cycle_ends_with_all_processes_running() {
    let fake = Fake::new(&PIDS);
    let locked = lock_all(&driver(&fake), &[301, 300, 302, 300], &once()).unwrap();
    assert_eq!((locked.pids(), locked.attempts()), (&PIDS[..], 1));
    let suspended = locked.suspend().unwrap();
    assert_eq!(suspended.pids(), PIDS);
    assert_eq!(fake.state_of(301), Some(State::Checkpointed));
    suspended.resume().unwrap();
    assert_all_running(&fake, "a cycle");
}

#[test]
fn whichever_call_fails_every_process_runs_afterwards() {
    let fake = Fake::new(&PIDS);
    cycle(&fake).unwrap();
    let calls = fake.calls().len();
    assert!(calls > 4 * PIDS.len(), "{calls} calls");
    for effect in [Effect::None, Effect::Done] {
        for code in [
            sys::OPERATING_SYSTEM,
            sys::NOT_READY,
            sys::NOT_SUPPORTED,
            999,
        ] {
            for n in 0..calls {
                let fake = Fake::new(&PIDS);
                fake.fail_nth(n, code, effect);
                let result = cycle(&fake);
                let context = format!("call {n} failed with {code} ({effect:?}): {result:?}");
                assert_all_running(&fake, &context);
                // The calls after the query of each process: lock and checkpoint.
                let steps_forward = (PIDS.len()..3 * PIDS.len()).contains(&n);
                assert_eq!(result.is_err(), steps_forward, "{context}");
                if let Err(error) = result {
                    assert!(error.is_computing(), "{context}");
                }
            }
        }
    }
}

#[test]
fn dropping_a_locked_or_suspended_job_resumes_it() {
    let fake = Fake::new(&PIDS);
    drop(lock_all(&driver(&fake), &PIDS, &once()).unwrap());
    assert_all_running(&fake, "dropping the lock");
    drop(
        lock_all(&driver(&fake), &PIDS, &once())
            .unwrap()
            .suspend()
            .unwrap(),
    );
    assert_all_running(&fake, "dropping the suspended job");
}

#[test]
fn a_busy_process_is_reported_and_the_others_are_unlocked() {
    let fake = Fake::new(&PIDS);
    fake.fail_always(301, Call::Lock, sys::NOT_READY);
    let error = lock_all(&driver(&fake), &PIDS, &once()).unwrap_err();
    assert!(
        matches!(&error, TreeError::TimedOut { busy, attempts: 1, .. } if *busy == [301]),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("process 301 did not finish in 1 attempts"),
        "{error}"
    );
    assert_all_running(&fake, "a timeout");
}

#[test]
fn lock_is_retried_after_a_timeout_or_cuinit() {
    for code in [sys::NOT_READY, sys::NOT_INITIALIZED] {
        let fake = Fake::new(&PIDS);
        fake.fail(&[Fault {
            call: Call::Lock,
            from: 0,
            times: PIDS.len(),
            code,
            effect: Effect::None,
        }]);
        let options = SuspendOptions::default();
        let locked = lock_all(&driver(&fake), &PIDS, &options).unwrap();
        assert_eq!(locked.attempts(), 2, "{code}");
        locked.unlock().unwrap();
        assert_all_running(&fake, "the second attempt");
    }
}

/// Returns a driver with a process that waits on the GPU for another one, which is locked first.
fn ranks_apart() -> Arc<Fake> {
    let fake = Fake::new(&PIDS);
    fake.set_ahead(302, 300);
    fake
}

/// Returns options for several steps of one attempt.
fn patient() -> SuspendOptions {
    SuspendOptions {
        attempt: Duration::from_millis(20),
        total: Duration::from_secs(60),
    }
}

#[test]
fn a_process_waiting_for_locked_ones_is_locked_while_they_run() {
    let fake = ranks_apart();
    let locked = lock_all(&driver(&fake), &PIDS, &patient()).unwrap();
    assert_eq!((locked.pids(), locked.attempts()), (&PIDS[..], 1));
    for pid in PIDS {
        assert_eq!(fake.state_of(pid), Some(State::Locked), "{pid}");
    }
    locked.unlock().unwrap();
    assert_all_running(&fake, "a hand-over");
}

#[test]
fn a_process_busy_in_every_hand_over_times_out() {
    let fake = Fake::new(&PIDS);
    fake.fail_always(301, Call::Lock, sys::NOT_READY);
    let options = SuspendOptions {
        total: Duration::from_millis(100),
        ..patient()
    };
    let error = lock_all(&driver(&fake), &PIDS, &options).unwrap_err();
    assert!(
        matches!(&error, TreeError::TimedOut { busy, .. } if *busy == [301]),
        "{error}"
    );
    assert_all_running(&fake, "hand-overs without success");
}

#[test]
fn every_process_runs_after_any_failed_call_of_a_hand_over() {
    let fake = ranks_apart();
    lock_all(&driver(&fake), &PIDS, &patient())
        .unwrap()
        .unlock()
        .unwrap();
    let calls = fake.calls().len();
    for effect in [Effect::None, Effect::Done] {
        for n in 0..calls {
            let fake = ranks_apart();
            fake.fail_nth(n, 999, effect);
            let result = lock_all(&driver(&fake), &PIDS, &patient()).map(drop);
            let context = format!("call {n} failed ({effect:?}): {result:?}");
            assert_all_running(&fake, &context);
            if let Err(error) = result {
                assert!(error.is_computing(), "{context}");
            }
        }
    }
}

#[test]
fn a_failed_unlock_of_a_hand_over_is_reported_as_such() {
    let fake = ranks_apart();
    fake.fail_always(300, Call::Unlock, 999);
    let error = lock_all(&driver(&fake), &PIDS, &patient()).unwrap_err();
    let TreeError::Lock { source, aftermath } = &error else {
        panic!("{error}");
    };
    assert_eq!((source.pid, source.call), (300, Call::Unlock));
    assert!(!aftermath.is_computing(), "{error}");
}

#[test]
fn managed_memory_is_refused_with_a_reason() {
    let fake = Fake::new(&PIDS);
    fake.fail_always(300, Call::Checkpoint, sys::NOT_SUPPORTED);
    let error = cycle(&fake).unwrap_err();
    let TreeError::Suspend { source, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!((source.pid, source.code.number), (300, sys::NOT_SUPPORTED));
    assert!(error.to_string().ends_with("the job computes"), "{error}");
    assert_all_running(&fake, "a refused checkpoint");
}

#[test]
fn unrestorable_process_is_named_and_others_run() {
    let fake = Fake::new(&PIDS);
    fake.fail_always(302, Call::Restore, sys::OUT_OF_MEMORY);
    let error = cycle(&fake).unwrap_err();
    assert!(!error.is_computing());
    let stuck = &error.aftermath().unwrap().stuck;
    assert_eq!(stuck.len(), 1, "{error}");
    assert_eq!(
        (stuck[0].pid, stuck[0].state),
        (302, Some(State::Checkpointed))
    );
    let text = error.to_string();
    assert!(text.contains("process 302 is left checkpointed"), "{text}");
    assert!(text.contains("less free memory"), "{text}");
    assert_eq!(fake.state_of(300), Some(State::Running));
    assert_eq!(fake.state_of(301), Some(State::Running));
}

#[test]
fn a_process_that_ends_during_the_lock_is_left_out() {
    let fake = Fake::new(&PIDS);
    fake.end(301);
    let locked = lock_all(&driver(&fake), &PIDS, &once()).unwrap();
    assert_eq!(locked.pids(), [300, 302]);
    let suspended = locked.suspend().unwrap();
    fake.end(300);
    suspended.resume().unwrap();
    assert_eq!(fake.state_of(302), Some(State::Running));
}

#[test]
fn suspended_process_stays_suspended() {
    let fake = Fake::new(&PIDS);
    fake.set(301, State::Checkpointed);
    let locked = lock_all(&driver(&fake), &PIDS, &once()).unwrap();
    assert_eq!(locked.pids(), [300, 302]);
    locked.suspend().unwrap().resume().unwrap();
    assert_eq!(fake.state_of(300), Some(State::Running));
    assert_eq!(fake.state_of(301), Some(State::Checkpointed));
}

#[test]
fn a_process_that_changes_its_program_needs_no_bringing_back() {
    let fake = Fake::new(&PIDS);
    fake.change(301);
    let error = lock_all(&driver(&fake), &PIDS, &once()).unwrap_err();
    assert!(matches!(&error, TreeError::Lock { source, .. } if source.pid == 301));
    assert!(error.is_computing(), "{error}");
    assert_eq!(fake.state_of(300), Some(State::Running));
}

#[test]
fn a_restored_process_without_its_gpu_state_is_an_error() {
    let fake = Fake::new(&PIDS);
    fake.change(301);
    let error = resume_restored(&driver(&fake), &PIDS, &GpuMap::default()).unwrap_err();
    assert_eq!(error.aftermath().unwrap().stuck[0].pid, 301);
}

#[test]
fn find_keeps_cuda_and_unknown_processes() {
    let fake = Fake::new(&[300, 302, 303]);
    fake.end(302);
    fake.fail_always(303, Call::GetState, sys::OPERATING_SYSTEM);
    assert_eq!(find(&driver(&fake), &[300, 301, 302, 303]), [300, 303]);
}

#[test]
fn restored_processes_are_resumed_from_any_state() {
    let fake = Fake::new(&PIDS);
    fake.set(300, State::Checkpointed);
    fake.set(301, State::Locked);
    resume_restored(&driver(&fake), &PIDS, &GpuMap::default()).unwrap();
    assert_all_running(&fake, "a restore");
}

#[test]
fn a_restored_process_that_the_driver_gave_up_is_an_error() {
    let fake = Fake::new(&PIDS);
    fake.set(301, State::Failed);
    let error = resume_restored(&driver(&fake), &PIDS, &GpuMap::default()).unwrap_err();
    assert!(
        error.to_string().contains("process 301 is left failed"),
        "{error}"
    );
}

#[test]
fn no_processes_need_no_calls() {
    let fake = Fake::new(&[]);
    let locked = lock_all(&driver(&fake), &[], &once()).unwrap();
    locked.suspend().unwrap().resume().unwrap();
    assert!(fake.calls().is_empty());
}

#[test]
fn more_processes_than_threads_are_refused_before_any_call() {
    let fake = Fake::new(&[]);
    let pids: Vec<i32> = (1..2000).collect();
    let error = lock_all(&driver(&fake), &pids, &once()).unwrap_err();
    assert!(
        matches!(error, TreeError::TooMany { count: 1999, .. }),
        "{error}"
    );
    assert!(fake.calls().is_empty());
}

#[test]
fn pauses_differ_and_stay_short() {
    let pauses: Vec<u128> = (1..50).map(|n| pause(n).as_millis()).collect();
    assert!(pauses.iter().all(|ms| (1..=60).contains(ms)), "{pauses:?}");
    let distinct: std::collections::BTreeSet<_> = pauses.iter().collect();
    assert!(distinct.len() > 20, "{pauses:?}");
}
