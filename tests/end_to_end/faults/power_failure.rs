//! A power failure seconds after a snapshot. `tests/power/run` does the same at random moments.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::loop_disk::LoopDisk;
use crate::harness::{ON_REQUEST, Place, apply, as_root, copy_environment, stderr, wait_until};

/// Writes as programs do that flush only some of their files, and checks all of them in the end.
const WRITER: &str = r#"
import os, sys, time
log = open("log", "a", buffering=1)
os.mkdir("parts")
number = 0
while not os.path.exists(sys.argv[1]):
    print(number, file=log)
    with open(f"parts/{number}", "x") as part:
        part.write(f"part {number}")
        if number % 10 == 9:
            part.flush()
            os.fsync(part.fileno())
    with open("state.new", "w") as state:
        state.write(str(number))
    os.rename("state.new", "state")
    number += 1
    time.sleep(0.01)
assert open("log").read() == "".join(f"{n}\n" for n in range(number))
assert sorted(os.listdir("parts"), key=int) == [str(n) for n in range(number)]
assert all(open(f"parts/{n}").read() == f"part {n}" for n in range(number))
assert open("state").read() == str(number - 1)
"#;

/// Returns a command for which the machine has just booted. `folder` is for files of /proc.
fn after_a_boot(command: &Command, folder: &Path) -> Command {
    let boot = r#"
        echo 00000000-0000-0000-0000-000000000000 >"$0/boot_id" &&
        sed "s/^btime .*/btime $(( $(date +%s) + 1 ))/" /proc/stat >"$0/stat" &&
        mount --bind "$0/boot_id" /proc/sys/kernel/random/boot_id &&
        mount --bind "$0/stat" /proc/stat && exec "$@""#;
    let mut wrapped = Command::new("unshare");
    wrapped
        .args(["--mount", "sh", "-c", boot])
        .arg(folder)
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir(command.get_current_dir().unwrap());
    copy_environment(command, &mut wrapped);
    wrapped
}

#[apply(as_root)]
fn a_power_failure_after_a_snapshot_costs_no_image() {
    let (place, elsewhere) = (Place::new(), Place::new());
    // The job's folder and the store.
    let folder = place.file("work");
    let Some(mut disk) = LoopDisk::new(folder.clone(), elsewhere.file("disk")) else {
        return;
    };
    fs::write(place.file("job.py"), WRITER).unwrap();
    let go = place.file("go");
    let command = || {
        let mut command = place.command(&ON_REQUEST);
        command
            .args(["--", "python3", "-u", "../job.py"])
            .arg(&go)
            .current_dir(&folder)
            .env("CKPT_RUN_SNAPSHOT_MIN_FREE", "0B");
        command
    };
    let parts = || fs::read_dir(folder.join("parts")).unwrap().count();
    let wait_for_parts = |count: usize| {
        let part = folder.join(format!("parts/{count}"));
        wait_until("the job's progress", || part.exists());
    };
    let err = || place.text("err");
    let restores = || err().matches("restored image=000001").count();
    let mut run = place.spawn(command(), |_| {});
    wait_for_parts(25);
    let mut snapshot = place.command(&["snapshot"]);
    let taken = snapshot.current_dir(&folder).output().unwrap();
    assert!(taken.status.success(), "{}", stderr(&taken));
    wait_for_parts(parts() + 25);
    disk.fail();
    run.kill_supervisor();
    disk.boot();

    // Once more, right after the restore.
    let mut run = place.spawn(after_a_boot(&command(), elsewhere.path()), |_| {});
    wait_until("the restore", || restores() == 1);
    wait_for_parts(parts() + 5);
    disk.fail();
    run.kill_supervisor();
    disk.boot();

    fs::write(&go, "").unwrap();
    let mut run = place.spawn(after_a_boot(&command(), elsewhere.path()), |_| {});
    assert_eq!(run.wait(), 0, "{}", err());
    assert_eq!(restores(), 2, "{}", err());
}
