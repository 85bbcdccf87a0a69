//! Tests of what is told.

use super::*;

#[test]
fn the_line_tells_step_bytes_rate_and_that_the_job_computes_again() {
    let start = clock::now();
    let ongoing = Ongoing::default();
    assert_eq!((ongoing.line(start), ongoing.now()), (None, None));
    let busy = ongoing.begin(Work::Snapshot, Step::Admit);
    assert_eq!(
        ongoing.line(start).unwrap(),
        "ckpt-run: snapshot: admit 0.00s"
    );
    let store = crate::store::Gauge::default();
    ongoing.measure(store, Some(1 << 20));
    ongoing.step(Step::Dump);
    assert_eq!(
        ongoing.line(start).unwrap(),
        "ckpt-run: snapshot: dump 0.00s"
    );
    ongoing.computing();
    ongoing.step(Step::Write);
    assert_eq!(
        ongoing.line(start).unwrap(),
        "ckpt-run: snapshot: the job computes again, write 0.00s"
    );
    let stand = ongoing.now().unwrap();
    let told = serde_json::to_string(&stand).unwrap();
    assert_eq!(
        told,
        r#"{"work":"snapshot","step":"write","bytes":0,"bytes_expected":1048576}"#
    );
    drop(busy);
    assert_eq!((ongoing.line(start), ongoing.now()), (None, None));
}

#[test]
fn bytes_are_told_with_their_rate_once_there_is_one() {
    let start = clock::now();
    let gauge = Gauge::default();
    let bytes = |expected| Bytes {
        gauge: gauge.clone(),
        expected,
        begun: (1 << 20, start),
    };
    assert_eq!(bytes(None).text(start), "");
    gauge.add(3 << 20);
    let later = start + Duration::from_secs(2);
    assert_eq!(bytes(None).text(start), ", 3.0 MiB");
    assert_eq!(
        bytes(Some(4 << 20)).text(later),
        ", 3.0 MiB of 4.0 MiB, 1.0 MiB/s"
    );
    // More came than was thought.
    assert_eq!(bytes(Some(2 << 20)).text(later), ", 3.0 MiB, 1.0 MiB/s");
}

#[test]
fn a_freeze_is_told_of_once_and_not_before_the_jobs_output_has_settled() {
    let ongoing = Ongoing::default();
    let freeze = Duration::from_secs(1);
    ongoing.tell_later(freeze);
    assert_eq!(ongoing.untold(Duration::ZERO), None);
    let busy = ongoing.begin(Work::Snapshot, Step::Dump);
    ongoing.tell_later(freeze);
    assert_eq!(ongoing.untold(Duration::from_secs(3600)), None);
    assert_eq!(ongoing.untold(Duration::ZERO), Some(freeze));
    assert_eq!(ongoing.untold(Duration::ZERO), None);
    // The line that says it all was said.
    ongoing.tell_later(freeze);
    drop(busy);
    assert_eq!(ongoing.untold(Duration::ZERO), None);
}

#[test]
fn nobody_waits_for_work_that_will_not_come() {
    let ongoing = Ongoing::default();
    ongoing.close();
    assert!(!ongoing.wait_for_work(Duration::ZERO));
    let ongoing = Ongoing::default();
    let _busy = ongoing.begin(Work::Restore, Step::Rewind);
    assert!(ongoing.wait_for_work(Duration::ZERO));
}
