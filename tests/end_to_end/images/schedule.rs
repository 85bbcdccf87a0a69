//! Scheduled snapshots and their retention.

use crate::harness::{Place, UNTIL_GO, apply, as_root_and_user, stderr, wait_until};

#[apply(as_root_and_user)]
fn an_interval_takes_snapshots_and_only_the_newest_stay() {
    let place = Place::new();
    let mut run = place.start_python(&["--interval", "1", "--keep-last", "2"], UNTIL_GO);
    wait_until("the fourth image and two in all", || {
        let images = place.images();
        images.len() == 2 && images[1]["id"].as_str().is_some_and(|id| id >= "000004")
    });
    assert!(
        place
            .images()
            .iter()
            .all(|image| image["trigger"] == "schedule")
    );
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn a_cron_expression_takes_snapshots() {
    let place = Place::new();
    let mut run = place.start_python(&["--cron", "* * * * * *"], UNTIL_GO);
    wait_until("two images", || place.images().len() >= 2);
    assert_eq!(place.images()[0]["trigger"], "schedule");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn automatic_interval_follows_the_cost_of_snapshots() {
    let place = Place::new();
    // With an assumed failure per minute and freezes of some hundredths of a second, the intervals are seconds.
    let options = ["--interval", "auto", "--keep-last", "9"];
    let mut run = place.start_python_with(&options, UNTIL_GO, |command| {
        command.env("CKPT_RUN_SNAPSHOT_MTBF", "1m");
    });
    place.wait_for("out", "ready");
    place.wait_for(
        "err",
        "a snapshot costs 2.0 s (assumed), time between failures 1 min",
    );
    place.snapshot();
    wait_until("another interval", || {
        place
            .text("err")
            .matches("interval auto: a snapshot every")
            .count()
            >= 2
    });
    wait_until("a snapshot by itself", || {
        place
            .images()
            .iter()
            .any(|image| image["trigger"] == "schedule")
    });
    // The image is visible a moment before the run has updated its plan.
    let plan = || -> serde_json::Value {
        let plan = place.verb(&["plan", "--json", "--mtbf", "1m"]);
        serde_json::from_slice(&plan.stdout).unwrap()
    };
    wait_until("what the run has learned from that snapshot", || {
        plan()["computed_seconds"].as_f64().unwrap() > 1.0
    });
    let plan = plan();
    assert_eq!(plan["cost_is_measured"], true, "{plan}");
    // The assumed 2 s gave 40 s, by snapshot.max_overhead; on a busy machine a freeze may take longer than one second.
    let seconds = |name: &str| plan[name].as_f64().unwrap();
    let most = seconds("cost_seconds") / 0.05 + 0.1;
    assert!(seconds("interval_seconds") < most.max(20.0), "{plan}");
    // A crash raises the assumed rate of failures, also for the next supervisor.
    run.crash();
    place.wait_for("err", "ckpt-run: restored");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let plan = place.verb(&["plan", "--json"]);
    let plan: serde_json::Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!(plan["failures"], 1, "{plan}");
}

#[test]
fn a_plan_is_reckoned_from_flags_alone() {
    let place = Place::new();
    let plan = place.verb(&[
        "plan",
        "--freeze",
        "10s",
        "--mtbf",
        "6h",
        "--max-overhead",
        "50%",
    ]);
    let text = String::from_utf8(plan.stdout).unwrap();
    for part in [
        "10 s",
        "optimum",
        "11 min",
        "(6 h assumed + 0 s computed) / (1 + 0 failures)",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains(" \n"), "{text:?}");
    let plan = place.verb(&["plan", "--freeze", "10s", "--max-overhead", "1%", "--json"]);
    let plan: serde_json::Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!(
        (&plan["interval_seconds"], &plan["reason"]),
        (&1000.0.into(), &"max-overhead".into())
    );
    let wrong = place.verb(&["plan", "--max-overhead", "1"]);
    assert_eq!(wrong.status.code(), Some(125));
    assert!(stderr(&wrong).contains("not a percentage"));
}

#[apply(as_root_and_user)]
fn too_costly_fixed_interval_is_kept_with_one_warning() {
    let place = Place::new();
    let options = ["--interval", "1", "--max-overhead", "0.01%"];
    let mut run = place.start_python(&options, UNTIL_GO);
    wait_until("three images", || place.images().len() >= 3);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let warnings = place
        .text("err")
        .matches("more than snapshot.max_overhead")
        .count();
    assert_eq!(warnings, 1, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn chance_delays_a_scheduled_snapshot() {
    let place = Place::new();
    let mut run = place.start_ready(&["--interval", "1", "--jitter", "1h"]);
    // A random delay within an hour is below a minute once in sixty times.
    wait_until("a long delay", || {
        place.snapshot();
        let status = place.verb(&["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
        status["next_snapshot_seconds"].as_f64() > Some(60.0)
    });
    let images = place.images().len();
    let begun = std::time::Instant::now();
    wait_until("four seconds", || begun.elapsed().as_secs() >= 4);
    assert_eq!(place.images().len(), images, "{}", place.text("err"));
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
