//! Hanging disk of the store.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::counter_job::{
    COUNTER, begin_snapshot, crash_and_finish, said, start_with, wait_for_progress,
    wait_for_the_first_line,
};
use crate::harness::{Place, Run, apply, as_root, descendants, skip, state, stderr, wait_until};

const DISK_BYTES: u64 = 2 << 30;
/// Creates the job's memory: far more than may wait for the disk, so that it is being written when the disk begins to
/// hang.
const BALLAST: &str = "i = 0\nballast = os.urandom(128 << 20)\n";
const BUFFER: &str = "16MiB";

/// Separate file system over a folder, which can be made to hang; removed on drop.
struct Disk {
    folder: PathBuf,
}

impl Disk {
    /// Returns `None` after printing the reason for skipping the test.
    fn new(folder: PathBuf, image: &Path) -> Option<Self> {
        fs::create_dir(&folder).expect("the folder is made");
        let file = File::create(image).expect("the image is made");
        file.set_len(DISK_BYTES).expect("sparse");
        let made = succeeds(Command::new("mkfs.ext4").arg("-q").arg(image));
        let mount = || {
            let mut mount = Command::new("mount");
            succeeds(mount.args(["-o", "loop"]).arg(image).arg(&folder))
        };
        if !made || !mount() {
            skip("no file system can be made in a file and mounted here");
            return None;
        }
        fs::set_permissions(&folder, Permissions::from_mode(0o700)).expect("set");
        Some(Self { folder })
    }

    /// Blocks all writers until `thaw`.
    fn freeze(&self) {
        assert!(self.told("--freeze"));
    }

    fn thaw(&self) -> bool {
        self.told("--unfreeze")
    }

    fn told(&self, what: &str) -> bool {
        succeeds(Command::new("fsfreeze").arg(what).arg(&self.folder))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A hanging file system could not be unmounted.
        self.thaw();
        succeeds(Command::new("umount").arg("--lazy").arg(&self.folder));
    }
}

fn succeeds(command: &mut Command) -> bool {
    let status = command.stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

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
    let Some(disk) = Disk::new(place.file(".ckpt-run"), &image) else {
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
