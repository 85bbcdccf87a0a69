//! Separate podman for a test, in mount and PID namespaces, with storage in a temporary folder. Its processes and
//! mounts end with the namespaces, however the test ends, and are invisible to the machine's own podman.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{LazyLock, PoisonError, RwLock};
use std::time::SystemTime;

use nix::sys::resource::{Resource, getrlimit};
use tempfile::TempDir;

use crate::harness::{code, descendants, job_of, stderr, stdout, wait_until};

/// Lock that is held for reading by each podman at work.
static AT_WORK: RwLock<()> = RwLock::new(());
/// Earliest creation time of a cgroup of a test.
static BEGUN: LazyLock<SystemTime> = LazyLock::new(SystemTime::now);

/// First process of the namespaces; it exits with the test and ends all others. Programs of containers keep state and
/// locks in /run and /dev/shm. crun fails if a version 2 hierarchy has controllers beside those of version 1.
const HOLDER: &str = r#"
set -e
mount --make-rprivate /
names=$(readlink -f /etc/resolv.conf)
text=$(cat /etc/resolv.conf)
mount -t tmpfs none /run
mount -t tmpfs none /dev/shm
if [ ! -e "$names" ]; then mkdir -p "${names%/*}"; printf '%s\n' "$text" > "$names"; fi
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
echo ready
exec cat > /dev/null
"#;

/// Limit on processes: as root without `CAP_SYS_RESOURCE`, podman cannot set its default limit.
const PROCESSES: u64 = 4096;

/// Cgroup in each hierarchy below which podman creates others, some of which it leaves behind.
const CGROUPS: &str = "libpod_parent";

/// Podman with its namespaces and storage.
pub struct Machine {
    folder: TempDir,
    holder: Child,
    /// Pid of the holder's child, the first process of the namespaces.
    first: i32,
    /// Storage of the images, or, while they are built, of everything.
    images: Storage,
}

enum Storage {
    Own(PathBuf),
    ReadFrom(PathBuf),
}

impl Machine {
    /// Creates a machine with containers of its own, from existing images.
    pub fn with_images(images: PathBuf) -> Result<Self, String> {
        Self::start(Storage::ReadFrom(images))
    }

    /// Creates a machine that builds images.
    pub fn to_make_images(images: PathBuf) -> Result<Self, String> {
        Self::start(Storage::Own(images))
    }

    fn start(images: Storage) -> Result<Self, String> {
        LazyLock::force(&BEGUN);
        let mut holder = Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"])
            .args(["sh", "-c", HOLDER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("unshare: {error}"))?;
        let mut line = String::new();
        let read = BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line);
        if read.is_err() || line != "ready\n" {
            let mut said = String::new();
            let _ = holder.stderr.take().unwrap().read_to_string(&mut said);
            let _ = holder.wait();
            return Err(format!("no namespaces for containers: {}", said.trim()));
        }
        let first = descendants(i32::try_from(holder.id()).unwrap())[0];
        let folder = tempfile::tempdir().unwrap();
        let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        let settings = format!(
            "[containers]\nnetns = \"none\"\nlog_driver = \"k8s-file\"\n\
             default_ulimits = [\"nofile={files}:{files}\", \"nproc={PROCESSES}:{PROCESSES}\"]\n\
             [engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\n"
        );
        fs::write(folder.path().join("containers.conf"), settings).unwrap();
        Ok(Self {
            folder,
            holder,
            first,
            images,
        })
    }

    /// Returns a path of a file for this test only.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--mount", "--pid", "--target", &self.first.to_string()])
            .args(["podman", "--log-level=error", "--storage-driver=overlay"]);
        match &self.images {
            Storage::Own(images) => {
                command.arg("--root").arg(images);
            }
            Storage::ReadFrom(images) => {
                command.arg("--root").arg(self.file("root"));
                let option = format!("overlay.imagestore={}", images.display());
                command.args(["--storage-opt", &option]);
            }
        }
        command
            // In the private /run, at the same path each time, because the storage records it.
            .args(["--runroot", "/run/containers/storage"])
            .args(arguments)
            .env("CONTAINERS_CONF", self.file("containers.conf"))
            .stdin(Stdio::null());
        command
    }

    /// Runs `podman` with these arguments; may fail.
    pub fn try_podman(&self, words: &[&str]) -> Output {
        let _one_more = AT_WORK.read().unwrap_or_else(PoisonError::into_inner);
        self.command(words).output().expect("nsenter is there")
    }

    /// Runs `podman` with these arguments and returns its output; a failure fails the test.
    pub fn podman(&self, words: &[&str]) -> String {
        let output = self.try_podman(words);
        assert!(
            output.status.success(),
            "podman {words:?}: {}",
            stderr(&output)
        );
        stdout(&output)
    }

    /// Runs a container to its end; returns its exit code and its output on both streams.
    pub fn run(&self, words: &[&str]) -> (i32, String) {
        let output = self.try_podman(&[&["run", "--rm"], words].concat());
        let text = [output.stdout, output.stderr].concat();
        (
            code(output.status),
            String::from_utf8_lossy(&text).into_owned(),
        )
    }

    /// Waits for a container's end; returns its exit code.
    pub fn wait(&self, container: &str) -> i32 {
        self.podman(&["wait", container]).trim().parse().unwrap()
    }

    /// Returns a container's stdout.
    pub fn out(&self, container: &str) -> String {
        let output = self.try_podman(&["logs", container]);
        stdout(&output)
    }

    /// Returns a container's stderr.
    pub fn err(&self, container: &str) -> String {
        let output = self.try_podman(&["logs", container]);
        stderr(&output)
    }

    /// Returns the path of a file in a volume.
    pub fn in_volume(&self, volume: &str, name: &str) -> PathBuf {
        let folder = self.file("root/volumes").join(volume);
        folder.join("_data").join(name)
    }

    /// Waits until a file of a volume contains `text`.
    pub fn wait_for(&self, volume: &str, name: &str, text: &str, container: &str) {
        let path = self.in_volume(volume, name);
        let holds = || fs::read_to_string(&path).is_ok_and(|all| all.contains(text));
        wait_until(&format!("{text:?} in {name} of {container}"), || {
            holds() || self.has_ended(container)
        });
        assert!(holds(), "{container} has ended: {}", self.err(container));
    }

    fn has_ended(&self, container: &str) -> bool {
        let format = ["inspect", "--format", "{{.State.Status}}", container];
        let output = self.try_podman(&format);
        stdout(&output).trim() == "exited"
    }

    /// Returns the host pid of the first process of the only job.
    pub fn job(&self) -> i32 {
        job_of(self.first)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let output = self.try_podman(&["ps", "--all", "--format", "{{.Names}}"]);
            for name in stdout(&output).lines() {
                eprintln!("--- {name}\n{}{}", self.out(name), self.err(name));
            }
        }
        let _ = self.try_podman(&["pod", "rm", "--all", "--force"]);
        let _ = self.try_podman(&["rm", "--all", "--force", "--time", "0"]);
        let _ = self.holder.kill();
        let _ = self.holder.wait();
        // Cgroups of a container that is being started are still empty; the last machine removes all.
        let Ok(_alone) = AT_WORK.try_write() else {
            return;
        };
        let root = Path::new("/sys/fs/cgroup");
        let hierarchies = fs::read_dir(root).into_iter().flatten().flatten();
        for folder in hierarchies
            .map(|entry| entry.path())
            .chain([root.to_owned()])
        {
            remove_cgroups(&folder.join(CGROUPS), *BEGUN);
        }
    }
}

/// Removes the empty cgroups that were created since `begun`.
fn remove_cgroups(folder: &Path, begun: SystemTime) {
    let children = fs::read_dir(folder).into_iter().flatten().flatten();
    for child in children.filter(|child| child.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_cgroups(&child.path(), begun);
    }
    let changed = fs::metadata(folder).and_then(|data| data.modified());
    if changed.is_ok_and(|changed| changed >= begun) {
        // Cgroups in use cannot be removed.
        let _ = fs::remove_dir(folder);
    }
}
