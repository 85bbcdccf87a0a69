//! Hanging disk of the store.

use super::counter_job::{
    COUNTER, begin_snapshot, crash_and_finish, said, start_with, wait_for_progress,
    wait_for_the_first_line,
};
use super::loop_disk::LoopDisk;
use crate::harness::{Place, Run, apply, as_root, descendants, state, stderr, wait_until};

/// Creates the job's memory: far more than may wait for the disk, so that it is being written when the disk begins to
/// hang.
const BALLAST: &str = "i = 0\nballast = os.urandom(128 << 20)\n";
const BUFFER: &str = "16MiB";

/// Returns true if CRIU has stopped a process of the run.
fn is_stopped(run: &Run) -> bool {
    let mut processes = descendants(run.pid()).into_iter();
    processes.any(|pid| state(pid) == Some('t'))
}

#[apply(as_root)]
fn hanging_disk_does_not_freeze_the_job() {
    let (place, elsewhere) = (Place::new(), Place::new());
    // The kernel changes this file: in the job's folder it would be a changed file of an unknown writer.
    let image = elsewhere.file("disk");
    let Some(disk) = LoopDisk::new(place.file(".ckpt-run"), image) else {
        return;
    };
    let mut run = start_with(&place, &COUNTER.replace("i = 0\n", BALLAST), |command| {
        command
            .env("CKPT_RUN_SNAPSHOT_BUFFER", BUFFER)
            // Writing the ballast takes a minute on a loaded machine.
            .env("CKPT_RUN_SNAPSHOT_TIMEOUT", "100s");
    });
    wait_for_the_first_line(&place);
    let asked = begin_snapshot(&place);
    wait_until("CRIU's work", || is_stopped(&run));
    disk.freeze();
    wait_for_progress(&place);
    assert!(disk.thaw(), "it hung until now");
    let answer = asked.wait_with_output().expect("an answer");
    let text = stderr(&answer);
    assert!(
        text.contains("no data reached the store's disk for 20s"),
        "{text}"
    );

    // The disk works again, and so does the watch of the job's files.
    place.snapshot();
    assert_eq!(said(&place, "no watcher records"), 0);
    crash_and_finish(&place, &mut run);
}
