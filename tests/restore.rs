//! The main job: a supervised job is snapshotted, killed, and comes back as if nothing had happened.

mod common;

use common::{Place, can_run};

/// Counts into a log opened in mode `w` and onto stdout.
const COUNT: &str = r#"
import time
log = open("log", "w")
for i in range(40):
    print(i, flush=True)
    log.write(f"{i}\n"); log.flush()
    time.sleep(0.05)
"#;

fn lines(count: u32) -> String {
    (0..count).map(|i| format!("{i}\n")).collect()
}

#[test]
fn a_killed_job_comes_back_and_ends_as_if_nothing_had_happened() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut run = place.start_python(&["--interval", "never"], COUNT);
    place.wait_for("log", "5\n");
    place.snapshot();
    place.wait_for("log", "15\n");
    run.crash();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}
