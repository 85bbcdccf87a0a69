//! A file system of its own, in a file: it can be made to hang, or to lose what has not reached it.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::skip;

const DISK_BYTES: u64 = 2 << 30;

/// `FS_IOC_SHUTDOWN` of `linux/fs.h`, with the flag for "without writing the journal".
const SHUT_DOWN: &str = "import fcntl, os, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, b'\\2\\0\\0\\0')";

/// A file system mounted over a folder, removed on drop.
pub struct LoopDisk {
    folder: PathBuf,
    image: PathBuf,
    boots: u32,
}

impl LoopDisk {
    /// Returns `None` after printing the reason for skipping the test.
    pub fn new(folder: PathBuf, image: PathBuf) -> Option<Self> {
        fs::create_dir(&folder).expect("the folder is made");
        let file = File::create(&image).expect("the image is made");
        file.set_len(DISK_BYTES).expect("sparse");
        let disk = Self {
            folder,
            image,
            boots: 0,
        };
        if !succeeds(Command::new("mkfs.ext4").arg("-q").arg(&disk.image)) || !disk.mount() {
            skip("no file system can be made in a file and mounted here");
            return None;
        }
        fs::set_permissions(&disk.folder, Permissions::from_mode(0o700)).expect("set");
        Some(disk)
    }

    fn mount(&self) -> bool {
        let mut mount = Command::new("mount");
        succeeds(mount.args(["-o", "loop"]).args([&self.image, &self.folder]))
    }

    /// Blocks all writers until `thaw`.
    pub fn freeze(&self) {
        assert!(self.told("--freeze"));
    }

    pub fn thaw(&self) -> bool {
        self.told("--unfreeze")
    }

    fn told(&self, what: &str) -> bool {
        succeeds(Command::new("fsfreeze").arg(what).arg(&self.folder))
    }

    /// Loses the power: nothing more reaches the disk, and every call fails.
    pub fn fail(&self) {
        let mut shut_down = Command::new("python3");
        assert!(succeeds(
            shut_down.args(["-c", SHUT_DOWN]).arg(&self.folder)
        ));
    }

    /// Mounts what has reached the disk before the failure.
    pub fn boot(&mut self) {
        // Other processes may still have the failed file system.
        self.boots += 1;
        let image = self.image.with_extension(self.boots.to_string());
        fs::copy(&self.image, &image).expect("copied");
        unmount(&self.folder);
        self.image = image;
        assert!(self.mount());
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        // A hanging file system could not be unmounted.
        self.thaw();
        unmount(&self.folder);
    }
}

fn unmount(folder: &Path) {
    succeeds(Command::new("umount").arg("--lazy").arg(folder));
}

fn succeeds(command: &mut Command) -> bool {
    let status = command.stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
