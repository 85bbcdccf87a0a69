//! Cost of an idle supervisor.

use std::fs;
use std::time::Duration;

use crate::harness::{Place, apply, as_root, wait_until};

/// Time of the observation.
const WATCHED: Duration = Duration::from_secs(5);
/// Maximum memory of its own. The program's pages depend on the build, and the kernel can drop them.
const OWN_KIB_MAX: u64 = 8 << 10;
/// Maximum number of wake-ups of all threads during the observation; one per second would exceed it.
const WAKEUPS_MAX: u64 = 3;

fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Returns the CPU time of a process in clock ticks.
fn ticks(pid: i32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Returns the status of each thread; threads that exit meanwhile are left out.
fn threads(pid: i32) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks
        .filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok())
        .collect()
}

fn wakeups(pid: i32) -> u64 {
    let each = threads(pid);
    each.iter()
        .map(|status| number(status, "voluntary_ctxt_switches"))
        .sum()
}

#[apply(as_root)]
fn an_idle_supervisor_is_small_and_asleep() {
    let place = Place::new();
    let run = place.start(&[], &["sh", "-c", "echo ready; exec sleep 1000"]);
    place.wait_for("out", "ready");
    place.snapshot();
    // The supervisor replies a moment before its thread ends.
    wait_until("the end of the snapshot's thread", || {
        !threads(run.pid())
            .iter()
            .any(|status| status.starts_with("Name:\tsnapshot\n"))
    });
    // A time without events; again if a thread has ended meanwhile, with which its wake-ups are gone.
    wait_until("a time in which no thread ends", || {
        let before = (ticks(run.pid()), wakeups(run.pid()));
        std::thread::sleep(WATCHED);
        let after = (ticks(run.pid()), wakeups(run.pid()));
        eprintln!("idle: {before:?} {after:?} (ticks, wake-ups)");
        let Some(woken) = after.1.checked_sub(before.1) else {
            return false;
        };
        assert!(after.0 - before.0 <= 1, "{before:?} {after:?}");
        assert!(woken <= WAKEUPS_MAX, "{before:?} {after:?}");
        true
    });
    let status = fs::read_to_string(format!("/proc/{}/status", run.pid())).unwrap();
    let own = number(&status, "RssAnon");
    assert!(own < OWN_KIB_MAX, "{own} KiB");
}
