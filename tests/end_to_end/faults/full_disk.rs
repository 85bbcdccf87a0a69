//! Full disk of the store.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::counter_job::{
    COUNTER, crash_and_finish, finish_counter, said, start_with, wait_for_progress,
    wait_for_the_first_line,
};
use crate::harness::{Place, Run, apply, as_root, stderr, wait_until_or};

/// Size of the disk: room for the store's copy of the program and a few images.
const DISK_BYTES: u64 = 400 << 20;
/// Remaining space: less than any image of the job, and more than the small files of a restore.
const LEFT_BYTES: u64 = 256 << 10;

/// Minimum free space that snapshots must leave.
const FLOOR_BYTES: u64 = 100 << 20;

/// Starts a job whose images have at least 8 MiB of their own.
fn start_checked(place: &Place, min_free: &str) -> Run {
    // Changed in place, so that each image contains the same amount of it.
    let begin = "i = 0\nballast = bytearray(8 << 20); noise = open('/dev/urandom', 'rb', 0)\n";
    let script = COUNTER
        // Data that others append to a log to which the job only appends exist nowhere else.
        .replace(r#"open("log", "w")"#, r#"open("log", "a")"#)
        .replace("i = 0\n", begin)
        .replace("i += 1\n", "i += 1\n    noise.readinto(ballast)\n");
    start_with(place, &script, |command| {
        command
            .env("CKPT_RUN_SNAPSHOT_MIN_FREE", min_free)
            .env("CKPT_RUN_RETENTION_KEEP_LAST", "2");
    })
}

/// Creates a counting job with one image, whose store is on a small disk.
fn one_image(min_free: &str) -> (Place, Disk, Run) {
    let place = Place::new();
    let disk = Disk::new(place.file(".ckpt-run"));
    let run = start_checked(&place, min_free);
    wait_for_the_first_line(&place);
    place.snapshot();
    (place, disk, run)
}

/// Returns the message of a snapshot that must fail.
fn refused_snapshot(place: &Place) -> String {
    let refused = place.verb(&["snapshot"]);
    assert!(!refused.status.success());
    stderr(&refused)
}

/// Small file system mounted over a folder, removed on drop.
struct Disk(PathBuf);

impl Disk {
    fn new(folder: PathBuf) -> Self {
        fs::create_dir(&folder).expect("the folder is made");
        let options = format!("size={DISK_BYTES},mode=0700");
        let tmpfs = Some("tmpfs");
        mount(
            tmpfs,
            &folder,
            tmpfs,
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .expect("mounted");
        Self(folder)
    }

    fn free(&self) -> u64 {
        let about = nix::sys::statvfs::statvfs(&self.0).expect("statvfs");
        about.blocks_available() * about.fragment_size()
    }

    /// Fills the disk except for `left` bytes.
    fn fill(&self, left: u64) -> PathBuf {
        let path = self.0.join("filler");
        let mut filler = File::create(&path).expect("made");
        let zeros = vec![0; 64 << 10];
        while self.free() > left + zeros.len() as u64 {
            filler.write_all(&zeros).expect("filled");
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[apply(as_root)]
fn a_full_disk_fails_the_snapshot_and_nothing_else() {
    let (place, disk, mut run) = one_image("0B");
    wait_for_progress(&place);
    let filler = disk.fill(LEFT_BYTES);

    let text = refused_snapshot(&place);
    assert!(text.contains("disk is full"), "{text}");
    assert!(text.contains("free space"), "{text}");
    wait_for_progress(&place);
    assert_eq!(place.images().len(), 1);
    let verified = place.verb(&["verify"]);
    assert!(verified.status.success());
    // Even a crash on a full disk does not end the run.
    run.crash();
    wait_until_or(
        || format!("the restore; {}", place.text("err")),
        || said(&place, "restored image=") == 1,
    );
    wait_for_progress(&place);

    fs::remove_file(filler).expect("space is freed");
    place.snapshot();
    crash_and_finish(&place, &mut run);
}

#[apply(as_root)]
fn full_disk_for_cut_off_data_ends_the_run() {
    let (place, disk, mut run) = one_image("0B");
    wait_for_progress(&place);
    place.snapshot();
    let filler = disk.fill(LEFT_BYTES);
    let end = "x".repeat(1 << 20);
    append_as_job(&run, &place.file("log"), &end);
    run.crash();
    assert_eq!(run.wait(), 125, "{}", place.text("err"));
    let text = place.text("err");
    for part in [
        "the end of /",
        "/log: the disk of /",
        "/.ckpt-run/aside/000002-",
        "is full; the job's files are unchanged; free space there",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Space may be freed soon: the same image is tried twice.
    assert_eq!(text.matches("restoring image=000002").count(), 2, "{text}");
    assert!(!text.contains("restoring image=000001"), "{text}");
    assert!(!text.contains("--fresh"), "{text}");
    // The job may have written more before it was killed.
    assert!(place.text("log").contains(&end));
    let left = bytes_below(&place.file(".ckpt-run/aside"));
    assert!(
        left < 1 << 10,
        "what was kept in vain takes no room: {left}"
    );

    fs::remove_file(filler).expect("space is freed");
    let mut run = start_checked(&place, "0B");
    wait_until_or(
        || format!("the restore; {}", place.text("err")),
        || said(&place, "restored image=000002") == 1,
    );
    finish_counter(&place, &mut run);
}

/// Appends to a file by one call of a process in the job's PID namespace, so that it counts as the job's.
fn append_as_job(run: &Run, log: &Path, text: &str) {
    let mut writer = Command::new("nsenter")
        .args(["--target", &run.job().to_string(), "--pid", "dd"])
        .args(["oflag=append", "conv=notrunc", "iflag=fullblock"])
        .args([
            format!("bs={}", text.len()),
            format!("of={}", log.display()),
        ])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a writer");
    let mut input = writer.stdin.take().expect("its input");
    input.write_all(text.as_bytes()).expect("written");
    drop(input);
    assert!(writer.wait().expect("its end").success());
}

/// Returns the bytes of the files in a folder, at any depth.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).expect("listed").flatten();
    let bytes = entries.map(|entry| {
        let about = entry.metadata().expect("looked at");
        if about.is_dir() {
            bytes_below(&entry.path())
        } else {
            about.len()
        }
    });
    bytes.sum()
}

#[apply(as_root)]
fn too_large_snapshot_is_refused_before_the_freeze() {
    let (place, disk, mut run) = one_image("100MiB");
    let dumps = dump_logs(&place);
    let filler = disk.fill(FLOOR_BYTES + (1 << 20));

    let text = refused_snapshot(&place);
    for part in [
        "100.0 MiB must stay free",
        "snapshot.min_free",
        "are free",
        "--store",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(dump_logs(&place), dumps, "CRIU was not started");
    wait_for_progress(&place);
    assert_eq!(ids(&place), ["000001"]);

    fs::remove_file(filler).expect("space is freed");
    place.snapshot();
    finish_counter(&place, &mut run);
}

#[apply(as_root)]
fn an_image_that_the_next_one_replaces_makes_room_for_it() {
    let (place, disk, mut run) = one_image("100MiB");
    wait_for_progress(&place);
    place.snapshot();
    disk.fill(FLOOR_BYTES + (4 << 20));

    wait_for_progress(&place);
    place.snapshot();
    assert_eq!(said(&place, "to free space"), 1, "{}", place.text("err"));
    assert_eq!(ids(&place), ["000002", "000003"]);
    assert!(disk.free() > FLOOR_BYTES - (8 << 20));
    assert!(place.verb(&["verify"]).status.success());
    // A pinned image frees no space.
    assert!(place.verb(&["pin", "2"]).status.success());
    fs::remove_file(place.file(".ckpt-run/filler")).expect("space is freed");
    disk.fill(FLOOR_BYTES + (4 << 20));
    refused_snapshot(&place);
    assert_eq!(ids(&place), ["000002", "000003"]);
    run.crash();
    wait_for_progress(&place);
    finish_counter(&place, &mut run);
}

fn ids(place: &Place) -> Vec<String> {
    let id = |image: &serde_json::Value| image["id"].as_str().map(str::to_owned);
    place.images().iter().filter_map(id).collect()
}

/// Returns the number of CRIU's dumps.
fn dump_logs(place: &Place) -> usize {
    let logs = fs::read_dir(place.file(".ckpt-run/logs")).expect("the logs");
    let names = logs.flatten().map(|log| log.file_name());
    let dumps = names.filter(|name| name.to_string_lossy().starts_with("dump-"));
    dumps.count()
}

/// Appends to a log that is larger than the disk.
const LARGE_LOG: &str = r#"
import os, time
log = open("log", "ab", buffering=0)
for _ in range(DISK_MIB): log.write(os.urandom(1 << 20))
print("ready", flush=True)
while not os.path.exists("stop"): time.sleep(0.01)
"#;

#[apply(as_root)]
fn a_log_for_which_there_is_no_room_is_left_out() {
    let place = Place::new();
    let _disk = Disk::new(place.file(".ckpt-run"));
    let script = LARGE_LOG.replace("DISK_MIB", &(DISK_BYTES >> 20).to_string());
    let mut run = start_with(&place, &script, |command| {
        command.env("CKPT_RUN_SNAPSHOT_MIN_FREE", "100MiB");
    });
    wait_until_or(
        || format!("the log; {}", place.text("err")),
        || place.text("out").contains("ready"),
    );
    place.snapshot();
    run.crash();
    fs::write(place.file("stop"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(said(&place, "restored image="), 1);
}
