//! A file system in a file, mounted over a folder. Tests without the privilege to mount it are skipped.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::skip;

/// The file system; unmounted on drop.
pub struct Disk {
    folder: PathBuf,
    image: PathBuf,
}

impl Disk {
    /// Creates an ext4 of `bytes` in the file `image`, which the kernel changes: in the job's folder it would be a changed
    /// file of an unknown writer. Returns `None` after printing the reason for skipping the test.
    pub fn new(folder: PathBuf, image: &Path, bytes: u64) -> Option<Self> {
        fs::create_dir(&folder).expect("the folder is made");
        let file = File::create(image).expect("the image is made");
        file.set_len(bytes).expect("sparse");
        let image = image.to_owned();
        let made = succeeds(Command::new("mkfs.ext4").arg("-q").arg(&image));
        let disk = Self { folder, image };
        if !made || !disk.mount() {
            skip("no file system can be made in a file and mounted here");
            return None;
        }
        fs::set_permissions(&disk.folder, Permissions::from_mode(0o700)).expect("set");
        Some(disk)
    }

    fn mount(&self) -> bool {
        let mut mount = Command::new("mount");
        succeeds(
            mount
                .args(["-o", "loop"])
                .arg(&self.image)
                .arg(&self.folder),
        )
    }

    /// Mounts the file system again, with another device number, as after a reboot. The files `others` take the numbers
    /// that are free.
    pub fn mount_elsewhere(&self, others: &Path) {
        let device = || fs::metadata(&self.folder).expect("mounted").dev();
        let before = device();
        let mut taken = Vec::new();
        while device() == before {
            assert!(succeeds(Command::new("umount").arg(&self.folder)));
            let number = taken.len();
            let (folder, image) = (
                others.join(format!("on-{number}")),
                others.join(format!("{number}")),
            );
            taken.push(Self::new(folder, &image, 1 << 20).expect("mounted, as this one"));
            assert!(self.mount());
        }
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
