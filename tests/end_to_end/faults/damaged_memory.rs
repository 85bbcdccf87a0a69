//! Damaged shared memory. CRIU (4.2.1) ignores failed reads of it.

use super::counter_job::{said, start_with};
use crate::harness::{Place, apply, as_root, damage, wait_until_or};

/// Size of the shared memory. No other memory of the job has the same.
const SHARED_BYTES: u64 = 5 << 20;

/// Changes its shared memory now and then, and compares it all the time with a copy in its own memory. A difference is
/// recorded in a file that no restore takes back.
const JOB: &str = r#"
import mmap, os, time
shared = mmap.mmap(-1, 5 << 20)
while not os.path.exists("stop"):
    own = os.urandom(5 << 20)
    shared[:] = own
    print("changed", flush=True)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        if shared[:8192] != own[:8192]:
            open("differs", "w").close()
"#;

#[apply(as_root)]
fn no_process_runs_with_damaged_shared_memory() {
    let place = Place::new();
    let mut run = start_with(&place, JOB, |command| {
        command.env("CKPT_RUN_FILES_EXCLUDE", "differs,stop");
    });
    let changes = |place: &Place| place.text("out").lines().count();
    let next = |place: &Place| {
        let before = changes(place);
        wait_until_or(|| place.text("err"), || changes(place) > before + 1);
    };
    next(&place);
    let older = place.snapshot();
    next(&place);
    let newer = place.snapshot();
    damage(&place, &newer, |stream| {
        stream.name.contains("pages-") && stream.raw_len == SHARED_BYTES
    });
    run.crash();
    let is_back = || said(&place, &format!("restored image={older}")) == 1;
    wait_until_or(|| place.text("err"), is_back);
    assert_eq!(said(&place, &format!("restored image={newer}")), 0);
    next(&place);
    assert!(!place.file("differs").exists(), "{}", place.text("err"));
    std::fs::write(place.file("stop"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
