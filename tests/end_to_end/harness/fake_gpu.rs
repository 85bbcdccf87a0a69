//! GPUs for tests on machines without one: `tests/fake-cuda`, built once, its environment, and the sample job without a
//! supervisor.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use tempfile::TempDir;

use super::privilege::{Ordinary, skip_now};
use super::{Place, Run, copy_environment};

/// Location of the GPUs' memory: a tmpfs, as large as the host's memory allows.
const MEMORY: &str = "/dev/shm";

/// UUIDs of the first two GPUs.
pub const UUIDS: [&str; 2] = [
    "GPU-fa4e0000-0000-4000-8000-000000000000",
    "GPU-fa4e0000-0000-4000-8000-000000000001",
];

/// Time limit for the release of memory on a busy machine.
const SETTLED: Duration = Duration::from_secs(60);
/// Time between two checks of memory in use.
const POLL: Duration = Duration::from_millis(5);

/// Replaces `/dev` by a small one: the usual nodes and mounts, and the driver's device files, which refer to
/// `/dev/null`. Arguments: a folder to build it in, number of GPUs, the command.
const DEVICES: &str = r#"
stage=$1 count=$2; shift 2
mount -t tmpfs -o mode=755 dev "$stage"
node() { mknod -m 666 "$stage/$1" c "$2" "$3"; }
node null 1 3; node zero 1 5; node full 1 7; node random 1 8; node urandom 1 9; node tty 5 0
for link in fd:/proc/self/fd stdin:/proc/self/fd/0 stdout:/proc/self/fd/1 stderr:/proc/self/fd/2 ptmx:pts/ptmx; do
    ln -s "${link#*:}" "$stage/${link%%:*}"
done
for folder in pts shm; do
    mkdir "$stage/$folder"
    mount --rbind "/dev/$folder" "$stage/$folder"
done
node nvidiactl 1 3; node nvidia-uvm 1 3
while [ "$count" -gt 0 ]; do count=$((count - 1)); node "nvidia$count" 1 3; done
mount --move "$stage" /dev
exec "$@"
"#;

/// GPUs of a single test. They and all their memory are removed with it.
pub struct FakeGpu {
    folder: TempDir,
    devices: u32,
    mib: u64,
}

impl FakeGpu {
    /// Creates two GPUs of 1 GiB.
    pub fn new() -> Self {
        Self::with(2, 1024)
    }

    pub fn with(devices: u32, mib: u64) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("fake-cuda-")
            .tempdir_in(MEMORY)
            .expect("a folder in shared memory");
        if let Some(user) = Ordinary::of_test() {
            user.owns(folder.path());
        }
        Self {
            folder,
            devices,
            mib,
        }
    }

    /// Returns the folder of the GPUs: `fail`, `hang`, `caller-fail` and `caller-hang` may be written there.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the environment by which a program finds these GPUs.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("LD_LIBRARY_PATH", library().as_os_str().to_owned()),
            ("FAKE_CUDA_DIR", self.folder().as_os_str().to_owned()),
            ("FAKE_CUDA_DEVICES", self.devices.to_string().into()),
            ("FAKE_CUDA_MIB", self.mib.to_string().into()),
            // These variables belong to a machine, not to a job.
            (
                "CKPT_RUN_FILES_EXCLUDE",
                self.folder().as_os_str().to_owned(),
            ),
        ]
    }

    /// Runs the command in a mount namespace whose `/dev` has the driver's device files, which `ckpt-run` checks, with
    /// these GPUs in its environment. The command keeps its folder, environment and pid. Needs root, also where the command
    /// runs as an ordinary user.
    pub fn wrap(&self, command: &Command) -> Command {
        if !geteuid().is_root() {
            skip_now("the device files of a GPU that is not there need root");
        }
        let stage = self.folder().join("dev");
        fs::create_dir_all(&stage).expect("a folder");
        let mut wrapped = Command::new("unshare");
        wrapped.args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-euc",
            DEVICES,
            "sh",
        ]);
        wrapped.arg(stage).arg(self.devices.to_string());
        wrapped.args(Ordinary::of_test().into_iter().flat_map(Ordinary::prefix));
        wrapped
            .arg(command.get_program())
            .args(command.get_args())
            .envs(self.environment());
        if let Some(folder) = command.get_current_dir() {
            wrapped.current_dir(folder);
        }
        copy_environment(command, &mut wrapped);
        wrapped
    }

    /// Returns the bytes of a GPU's memory that any process holds.
    pub fn used_bytes(&self, device: u32) -> u64 {
        let prefix = format!("d{device}-");
        let entries = fs::read_dir(self.folder())
            .expect("the GPUs' folder")
            .flatten();
        let live = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
        live.filter(|entry| is_held(&entry.path()))
            .map(|entry| entry.metadata().map_or(0, |file| file.len()))
            .sum()
    }

    /// Checks that exactly this many bytes of a GPU's memory are held, now or soon: a child of this process or of a
    /// supervisor holds its parent's descriptors, including those of memory, from its fork until it executes a program;
    /// and a copier that is no longer needed is not waited for.
    #[track_caller]
    pub fn assert_used(&self, device: u32, bytes: u64, when: &str) {
        let begun = Instant::now();
        loop {
            let used = self.used_bytes(device);
            if used == bytes {
                return;
            }
            let waited = begun.elapsed();
            assert!(
                waited < SETTLED,
                "{used} bytes of GPU {device} are held, not {bytes}: {when}"
            );
            std::thread::sleep(POLL);
        }
    }

    /// Checks that no memory of any GPU is held.
    #[track_caller]
    pub fn assert_free(&self, when: &str) {
        for device in 0..self.devices {
            self.assert_used(device, 0, when);
        }
    }
}

/// Returns true if any process has the file open or mapped: each of them holds a shared lock on it.
fn is_held(path: &Path) -> bool {
    let Ok(file) = fs::File::open(path) else {
        return false;
    };
    nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock).is_err()
}

/// Returns the folder with `libcuda.so.1` and `libnvidia-ml.so.1`, which are one file.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-cuda");
        let folder = build_folder().join(format!("fake-cuda-{:016x}", hash(&sources)));
        if !folder.exists() {
            build(&sources, &folder);
        }
        folder
    })
}

/// Returns the sample job: `tests/fake-cuda/job.rs`.
pub fn job() -> PathBuf {
    library().join("job")
}

/// Returns the job of two processes that share memory: `tests/fake-cuda/pair.rs`.
pub fn pair() -> PathBuf {
    library().join("pair")
}

/// Returns `target/debug`; the test runs from `target/debug/deps`.
pub fn build_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the test's program");
    test.ancestors()
        .nth(2)
        .expect("target/debug/deps")
        .to_owned()
}

fn hash(sources: &Path) -> u64 {
    let entries = fs::read_dir(sources)
        .expect("the library's sources")
        .flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in files {
        fs::read(file).expect("a source").hash(&mut hasher);
    }
    hasher.finish()
}

/// Builds in a temporary folder and renames it, because other tests may do the same at the same time.
fn build(sources: &Path, folder: &Path) {
    let beside = tempfile::tempdir_in(build_folder()).expect("a folder");
    let file = |name| beside.path().join(name);
    let library = [
        "--crate-type=cdylib",
        "--crate-name=cuda",
        "-Cpanic=abort",
        // A program that has loaded the library by its path must also find it by its name.
        "-Clink-arg=-Wl,-soname,libcuda.so.1",
    ];
    rustc(&sources.join("lib.rs"), &file("libcuda.so.1"), &library);
    for program in ["job", "pair"] {
        let source = sources.join(program).with_extension("rs");
        rustc(&source, &file(program), &[]);
    }
    symlink("libcuda.so.1", file("libnvidia-ml.so.1")).expect("a link");
    // If another test was faster, the folder has the same files.
    if fs::rename(beside.path(), folder).is_ok() {
        let _ = beside.keep();
    }
}

/// Compiles one file with the standard library only.
pub fn rustc(source: &Path, program: &Path, options: &[&str]) {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command
        .args(["--edition=2024", "-Copt-level=1", "-Dwarnings"])
        .args(options);
    let output = command
        .arg("-o")
        .arg(program)
        .arg(source)
        .output()
        .expect("rustc starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Starts a job without a supervisor, with its output in `out`.
pub fn alone(place: &Place, gpu: &FakeGpu, arguments: &[&str]) -> Run {
    let mut command = Command::new(job());
    command
        .args(arguments)
        .envs(gpu.environment())
        .current_dir(place.path());
    place.spawn(command, |_| {})
}

/// Returns the output of an undisturbed job.
pub fn untouched(gpu: &FakeGpu, arguments: &[&str]) -> String {
    let place = Place::new();
    let mut run = alone(&place, gpu, arguments);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    place.text("out")
}

/// Lets a job run to its end and compares its output with this one.
pub fn ends_as(place: &Place, run: &mut Run, untouched: &str) {
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), untouched, "{}", place.text("err"));
}
