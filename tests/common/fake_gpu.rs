//! GPUs for tests on machines without one: `tests/fake-cuda`, built once, and the environment that leads to it.
//!
//! Needs the standard library and tempfile alone, so that any test can include it by `#[path]`.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

/// Where its memory is: a tmpfs, as large as the host's memory allows.
const MEMORY: &str = "/dev/shm";

/// GPUs of a test's own. They and all their memory end with it.
pub struct FakeGpu {
    folder: TempDir,
    devices: u32,
    mib: u64,
}

impl FakeGpu {
    /// Two GPUs of 1 GiB.
    pub fn new() -> Self {
        Self::with(2, 1024)
    }

    pub fn with(devices: u32, mib: u64) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("fake-cuda-")
            .tempdir_in(MEMORY);
        Self {
            folder: folder.expect("a folder in shared memory"),
            devices,
            mib,
        }
    }

    /// The folder that is the GPUs: `fail`, `hang`, `caller-fail` and `caller-hang` may be written there.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What a program needs to find these GPUs.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("LD_LIBRARY_PATH", library().as_os_str().to_owned()),
            ("FAKE_CUDA_DIR", self.folder().as_os_str().to_owned()),
            ("FAKE_CUDA_DEVICES", self.devices.to_string().into()),
            ("FAKE_CUDA_MIB", self.mib.to_string().into()),
        ]
    }

    /// Bytes of a GPU's memory that some process holds, whoever it is.
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
}

/// Whether anybody has the file open or mapped: each of them has a shared lock on it.
fn is_held(path: &Path) -> bool {
    let Ok(file) = fs::File::open(path) else {
        return false;
    };
    nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock).is_err()
}

/// The folder with `libcuda.so.1` and `libnvidia-ml.so.1`, which are one file.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake-cuda");
        let folder = build_folder().join(format!("fake-cuda-{:016x}", hash(&sources)));
        if !folder.exists() {
            build(&sources.join("lib.rs"), &folder);
        }
        folder
    })
}

/// `target/debug`, where the test runs from `target/debug/deps`.
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

/// Builds beside and renames: other tests may do the same at the same time.
fn build(source: &Path, folder: &Path) {
    let beside = tempfile::tempdir_in(build_folder()).expect("a folder");
    let library = beside.path().join("libcuda.so.1");
    rustc(
        source,
        &library,
        &["--crate-type=cdylib", "--crate-name=cuda", "-Cpanic=abort"],
    );
    std::os::unix::fs::symlink("libcuda.so.1", beside.path().join("libnvidia-ml.so.1"))
        .expect("a link");
    // Whoever comes second finds the name taken by the same library.
    if fs::rename(beside.path(), folder).is_ok() {
        let _ = beside.keep();
    }
}

/// Compiles one file with the standard library alone.
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
