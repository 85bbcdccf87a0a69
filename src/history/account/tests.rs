use proptest::prelude::*;

use super::*;

/// Makes entries of run 1, each with its supervisor's clock.
fn log(events: Vec<(f64, Event)>) -> Vec<Entry> {
    let entry = |(elapsed, event)| Entry {
        time: Timestamp::UNIX_EPOCH,
        elapsed,
        run: 1,
        event,
    };
    events.into_iter().map(entry).collect()
}

fn opened() -> Event {
    Event::Opened {
        version: "1".to_owned(),
        pid: 1,
        command: vec![],
    }
}

fn started() -> Event {
    Event::Started { pid: None }
}

fn computing(freeze_seconds: f64) -> Event {
    Event::Computing { freeze_seconds }
}

fn snapshot(image: &str, durable_seconds: f64) -> Event {
    Event::Snapshot {
        image: image.to_owned(),
        trigger: "schedule".to_owned(),
        freeze_seconds: 1.0,
        durable_seconds,
        raw_bytes: 7,
        stored_bytes: 3,
        phases: vec![],
    }
}

fn crashed() -> Event {
    Event::Crashed {
        code: 1,
        how: "exit code 1".to_owned(),
        lost_seconds: 0.0,
    }
}

fn restored(image: &str) -> Event {
    Event::Restored {
        image: image.to_owned(),
        seconds: 2.0,
        phases: vec![],
    }
}

fn ended(how: &str) -> Event {
    Event::Ended {
        how: how.to_owned(),
        code: 0,
    }
}

fn near(one: f64, other: f64) -> bool {
    (one - other).abs() < 1e-9
}

#[test]
fn lost_time_is_since_the_image_and_saved_time_is_in_it() {
    let account = Account::of(log(vec![
        (0.0, opened()),
        (1.0, started()),
        (101.0, computing(1.0)), // 99 s computed
        (105.0, snapshot("a", 6.0)),
        (131.0, crashed()), // 30 s after the job continued
        (140.0, restored("a")),
        (240.0, ended("finished")),
    ]));
    let summary = account.summary_then();
    assert!(near(summary.lost_seconds, 30.0), "{summary:?}");
    assert!(near(summary.saved_seconds, 99.0), "{summary:?}");
    assert!(near(summary.freeze_seconds, 1.0), "{summary:?}");
    assert!(near(summary.run_seconds, 240.0), "{summary:?}");
    assert!(near(summary.restore_seconds, 2.0), "{summary:?}");
    assert_eq!((summary.crashes, summary.survived), (1, 1));
    assert_eq!((summary.snapshots, summary.restores), (1, 1));
    assert_eq!(account.ended().unwrap().0, "finished");
}

#[test]
fn going_one_image_further_back_loses_more() {
    let account = Account::of(log(vec![
        (0.0, opened()),
        (0.0, started()),
        (10.0, computing(0.0)),
        (10.0, snapshot("a", 0.0)),
        (30.0, computing(0.0)),
        (30.0, snapshot("b", 0.0)),
        (35.0, crashed()),
        (40.0, restored("a")),
    ]));
    let summary = account.summary_then();
    assert!(near(summary.lost_seconds, 25.0), "{summary:?}");
    assert!(near(summary.saved_seconds, 10.0), "{summary:?}");
    assert!(near(account.at_risk(42.0), 2.0));
}

#[test]
fn job_is_reported_as_restored_until_it_ends() {
    let mut account = Account::of(log(vec![
        (0.0, opened()),
        (0.0, started()),
        (10.0, computing(0.0)),
        (10.0, snapshot("a", 0.0)),
        (15.0, crashed()),
    ]));
    assert_eq!(account.comeback(), None);
    let later = log(vec![
        (20.0, restored("a")),
        (30.0, computing(0.0)),
        (30.0, snapshot("b", 0.0)),
    ]);
    for entry in &later {
        account.add(entry);
    }
    let comeback = account.comeback().unwrap();
    assert_eq!(comeback.image, "a");
    assert!(near(comeback.seconds(50.0), 30.0));
    // The supervisor is killed, and the next one starts.
    account.add(&log(vec![(0.0, opened())])[0]);
    assert_eq!(account.comeback(), None);
}

#[test]
fn a_crash_that_nothing_follows_is_not_survived() {
    let account = Account::of(log(vec![
        (0.0, opened()),
        (0.0, started()),
        (10.0, crashed()),
        (10.0, ended("failed")),
    ]));
    let summary = account.summary_then();
    assert_eq!((summary.crashes, summary.survived), (1, 0));
    assert!(near(summary.lost_seconds, 0.0) && near(summary.saved_seconds, 0.0));
}

#[test]
fn start_from_the_beginning_loses_all_time() {
    let mut entries = log(vec![
        (0.0, opened()),
        (0.0, started()),
        (50.0, crashed()),
        (60.0, started()),
        (70.0, ended("finished")),
    ]);
    entries[3].run = 2;
    entries[4].run = 2;
    let account = Account::of(entries);
    let summary = account.summary_then();
    assert!(near(summary.lost_seconds, 50.0), "{summary:?}");
    assert!(near(summary.saved_seconds, 0.0) && near(summary.run_seconds, 70.0));
    assert_eq!((account.run(), summary.survived), (Some(2), 1));
}

#[test]
fn killed_supervisor_is_an_outage_and_times_add_up() {
    let mut entries = log(vec![
        (0.0, opened()),
        (0.0, started()),
        (10.0, computing(0.0)),
        (10.0, snapshot("a", 0.0)),
        (
            15.0,
            Event::SnapshotBegan {
                trigger: "signal".to_owned(),
            },
        ),
        (0.0, opened()),
        (2.0, restored("a")),
    ]);
    let account = Account::of(entries.clone());
    let summary = account.summary(20.0);
    assert_eq!((summary.outages, summary.survived), (1, 0));
    assert!(near(summary.lost_seconds, 5.0) && near(summary.saved_seconds, 10.0));
    assert!(near(summary.run_seconds, 35.0), "{summary:?}");

    // A job that was saved and stopped is not an outage.
    entries.truncate(4);
    entries.extend(log(vec![
        (10.0, ended("saved")),
        (0.0, opened()),
        (2.0, restored("a")),
    ]));
    let summary = Account::of(entries).summary(2.0);
    assert_eq!(summary.outages, 0);
    assert!(near(summary.lost_seconds, 0.0) && near(summary.saved_seconds, 10.0));
    assert!(near(summary.run_seconds, 12.0));
}

#[test]
fn the_supervisor_of_another_run_begins_a_new_account() {
    let mut entries = log(vec![
        (0.0, opened()),
        (0.0, started()),
        (9.0, crashed()),
        (0.0, opened()),
        (0.0, started()),
    ]);
    entries[3].run = 2;
    entries[4].run = 2;
    let account = Account::of(entries);
    assert_eq!(account.run(), Some(2));
    assert_eq!(account.summary(5.0).crashes, 0);
    assert!(near(account.summary(5.0).run_seconds, 5.0));
}

#[test]
fn a_paused_job_computes_nothing_and_risks_nothing() {
    let mut entries = log(vec![
        (0.0, opened()),
        (0.0, started()),
        (20.0, snapshot("a", 10.0)),
        (
            20.0,
            Event::Paused {
                image: "a".to_owned(),
            },
        ),
    ]);
    let account = Account::of(entries.clone());
    assert!(near(account.at_risk(500.0), 0.0));
    entries.extend(log(vec![(100.0, Event::Unpaused { seconds: 1.0 })]));
    let account = Account::of(entries);
    assert!(near(account.at_risk(130.0), 30.0));
}

#[test]
fn image_resets_failures_and_vetoes_do_not_count() {
    let failed = |kind: &str| Event::SnapshotFailed {
        kind: kind.to_owned(),
        reason: String::new(),
        job_goes_on: true,
    };
    let mut entries = log(vec![
        (0.0, opened()),
        (0.0, started()),
        (1.0, failed("disk")),
        (2.0, failed("disk")),
        (3.0, failed("ended")),
        (3.5, failed("vetoed")),
    ]);
    let account = Account::of(entries.clone());
    assert_eq!(
        (
            account.failed_in_a_row(),
            account.summary_then().failed_snapshots
        ),
        (2, 2)
    );
    entries.extend(log(vec![(4.0, snapshot("a", 0.0))]));
    assert_eq!(Account::of(entries).failed_in_a_row(), 0);
}

#[test]
fn the_last_ten_freezes_are_remembered() {
    let mut events = vec![(0.0, opened()), (0.0, started())];
    events.extend((0..12).map(|i| (f64::from(i), snapshot(&i.to_string(), 0.0))));
    let account = Account::of(log(events));
    let images: Vec<&str> = account
        .freezes()
        .map(|freeze| freeze.image.as_str())
        .collect();
    assert_eq!(images.len(), 10);
    assert_eq!((images[0], images[9]), ("2", "11"));
}

fn any_event() -> impl Strategy<Value = Event> {
    let number = -1e9..1e9_f64;
    prop_oneof![
        Just(opened()),
        Just(started()),
        number.clone().prop_map(computing),
        ("[ab]", number.clone()).prop_map(|(image, seconds)| snapshot(&image, seconds)),
        Just(crashed()),
        "[abc]".prop_map(|image| restored(&image)),
        Just(Event::Paused {
            image: "a".to_owned()
        }),
        Just(Event::Unpaused { seconds: 1.0 }),
        Just(ended("failed")),
        Just(Event::Unknown),
    ]
}

proptest! {
    #[test]
    fn no_order_of_events_makes_a_panic_or_a_negative_sum(
        events in prop::collection::vec((-1e6..1e6_f64, any_event(), 0..3_u64), 0..40)
    ) {
        let entries = events.into_iter().map(|(elapsed, event, run)| Entry {
            time: Timestamp::UNIX_EPOCH,
            elapsed,
            run,
            event,
        });
        let account = Account::of(entries);
        let summary = account.summary_then();
        prop_assert!(summary.lost_seconds >= 0.0);
        prop_assert!(account.at_risk(0.0) >= 0.0);
        prop_assert!(summary.survived <= summary.crashes);
        prop_assert!(summary.in_words().starts_with("ran "));
    }
}
