//! The disk of the store is full.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::common::{Place, can_run, wait_until};
use crate::support::{COUNTER, counted, finish_counter, said, start, wait_for_progress};

/// The store's copy of the program and a few images fit.
const DISK_BYTES: u64 = 400 << 20;
/// Less than any image of the job, more than the small files of a restore.
const LEFT_BYTES: u64 = 256 << 10;

/// A small file system over a folder. Gone when dropped.
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

    /// Fills the disk but for `left` bytes.
    fn fill(&self, left: u64) -> PathBuf {
        let path = self.0.join("filler");
        let mut filler = File::create(&path).expect("made");
        let zeros = vec![0; 64 << 10];
        let free = || {
            let about = nix::sys::statvfs::statvfs(&self.0).expect("statvfs");
            about.blocks_available() * about.fragment_size()
        };
        while free() > left + zeros.len() as u64 {
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

#[test]
fn a_full_disk_fails_the_snapshot_and_nothing_else() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let disk = Disk::new(place.file(".ckpt-run"));
    let script = COUNTER.replace("i += 1\n", "i += 1\n    ballast = os.urandom(8 << 20)\n");
    let mut run = start(&place, &script);
    wait_until("the first line", || counted(&place) > 0);
    place.snapshot();
    wait_for_progress(&place);
    let filler = disk.fill(LEFT_BYTES);

    let refused = place.verb(&["snapshot"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success());
    assert!(text.contains("disk is full"), "{text}");
    assert!(text.contains("free space"), "{text}");
    wait_for_progress(&place);
    assert_eq!(place.images().len(), 1);
    let verified = place.verb(&["verify"]);
    assert!(verified.status.success());
    // Not even a crash on a full disk is the end.
    run.crash();
    wait_until(&format!("the restore; {}", place.text("err")), || {
        said(&place, "restored image=") == 1
    });
    wait_for_progress(&place);

    fs::remove_file(filler).expect("space is freed");
    place.snapshot();
    wait_for_progress(&place);
    run.crash();
    wait_for_progress(&place);
    finish_counter(&place, &mut run);
}
