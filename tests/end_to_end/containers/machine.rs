//! A podman of a test's own: in mount and PID namespaces, with storage in a temporary folder. What it starts and mounts
//! goes with the namespaces, however the test ends, and the machine's own podman does not see it.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{LazyLock, PoisonError, RwLock};
use std::time::SystemTime;

use nix::sys::resource::{Resource, getrlimit};
use tempfile::TempDir;

use crate::harness::{code, descendants, job_of, stderr, stdout, wait_until};

/// Read by each podman at work.
static AT_WORK: RwLock<()> = RwLock::new(());
/// No cgroup of a test is older.
static BEGUN: LazyLock<SystemTime> = LazyLock::new(SystemTime::now);

/// The first process of the namespaces; ends when the test does, and all else with it. Programs of containers keep
/// state and locks in /run and /dev/shm. crun does not like controllers in a version 2 hierarchy beside those of version 1.
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

/// Limits of processes: as root without `CAP_SYS_RESOURCE`, podman cannot give those that it gives by default.
const PROCESSES: u64 = 4096;

/// Where podman makes cgroups, in each hierarchy. It leaves some.
const CGROUPS: &str = "libpod_parent";

/// Podman, its namespaces and its storage.
pub struct Machine {
    folder: TempDir,
    holder: Child,
    /// Pid of the holder's child, the first of the namespaces.
    first: i32,
    /// Where images are read from, or, while they are made, all storage.
    images: Storage,
}

enum Storage {
    Own(PathBuf),
    ReadFrom(PathBuf),
}

impl Machine {
    /// With containers of its own, of images that are there.
    pub fn with_images(images: PathBuf) -> Result<Self, String> {
        Self::start(Storage::ReadFrom(images))
    }

    /// Makes images there.
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

    /// A file that only this test has.
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
            // In the private /run, and of the same name each time: what lies in a storage remembers it.
            .args(["--runroot", "/run/containers/storage"])
            .args(arguments)
            .env("CONTAINERS_CONF", self.file("containers.conf"))
            .stdin(Stdio::null());
        command
    }

    /// `podman` with these words, whatever comes of it.
    pub fn try_podman(&self, words: &[&str]) -> Output {
        let _one_more = AT_WORK.read().unwrap_or_else(PoisonError::into_inner);
        self.command(words).output().expect("nsenter is there")
    }

    /// What `podman` with these words prints; a failure fails the test.
    pub fn podman(&self, words: &[&str]) -> String {
        let output = self.try_podman(words);
        assert!(
            output.status.success(),
            "podman {words:?}: {}",
            stderr(&output)
        );
        stdout(&output)
    }

    /// Runs a container to its end: its exit code, and what it printed to both streams.
    pub fn run(&self, words: &[&str]) -> (i32, String) {
        let output = self.try_podman(&[&["run", "--rm"], words].concat());
        let text = [output.stdout, output.stderr].concat();
        (
            code(output.status),
            String::from_utf8_lossy(&text).into_owned(),
        )
    }

    /// Waits for a container's end; its exit code.
    pub fn wait(&self, container: &str) -> i32 {
        self.podman(&["wait", container]).trim().parse().unwrap()
    }

    /// What a container printed to stdout.
    pub fn out(&self, container: &str) -> String {
        let output = self.try_podman(&["logs", container]);
        stdout(&output)
    }

    /// What a container printed to stderr.
    pub fn err(&self, container: &str) -> String {
        let output = self.try_podman(&["logs", container]);
        stderr(&output)
    }

    /// A file in a volume.
    pub fn in_volume(&self, volume: &str, name: &str) -> PathBuf {
        let folder = self.file("root/volumes").join(volume);
        folder.join("_data").join(name)
    }

    /// Waits until a file of a volume holds `text`.
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

    /// Host pid of the only job's first process.
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
        // Those of a container that is being started are still empty; whoever is the last removes all.
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

/// Removes the cgroups that were made since `begun` and have nothing in them.
fn remove_cgroups(folder: &Path, begun: SystemTime) {
    let children = fs::read_dir(folder).into_iter().flatten().flatten();
    for child in children.filter(|child| child.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_cgroups(&child.path(), begun);
    }
    let changed = fs::metadata(folder).and_then(|data| data.modified());
    if changed.is_ok_and(|changed| changed >= begun) {
        // Those in use stay.
        let _ = fs::remove_dir(folder);
    }
}
