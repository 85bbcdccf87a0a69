//! What every snapshot and restore of a run needs and none of them changes.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use tempfile::TempDir;

use crate::clock;
use crate::config::Config;
use crate::criu::{Criu, HOLD_PROGRAM};
use crate::cuda;
use crate::job::{Input, Output, OutputMark};
use crate::sandbox::{JobPids, Sandbox};
use crate::store::{Store, StoreLock};

/// CRIU logs that are kept; they tell why an older snapshot failed.
const LOGS_KEPT: usize = 20;

/// The constant part of a run.
#[derive(Debug)]
pub(super) struct Workshop {
    pub config: Config,
    pub store: Store,
    pub lock: StoreLock,
    pub criu: Criu,
    pub command: Vec<OsString>,
    pub directory: PathBuf,
    /// Marks this supervisor's process.
    pub instance: String,
    /// The copy of this binary that sandboxes run; images map it, so it must outlive an upgrade.
    pub program: PathBuf,
    /// Private folder with short paths, for sockets.
    work: TempDir,
    /// Loaded when it is first needed: it is large.
    driver: OnceLock<cuda::Driver>,
}

/// A job that runs, or is about to.
#[derive(Debug)]
pub(super) struct Job {
    pub sandbox: std::sync::Arc<Sandbox>,
    pub pids: JobPids,
}

/// The job's standard streams; they outlive each start of it.
#[derive(Debug)]
pub(super) struct Streams {
    pub stdin: Input,
    pub stdout: Output,
    /// Idle when `joined`.
    pub stderr: Output,
    /// Both go to one place of the caller's (`2>&1`): the job gets one pipe for both, so that its
    /// lines stay in their order.
    pub joined: bool,
}

impl Streams {
    /// Gives the job new pipes; its ends for stdout and stderr.
    pub fn connect_outputs(&mut self) -> io::Result<[OwnedFd; 2]> {
        let stdout = self.stdout.connect()?;
        let stderr = if self.joined {
            stdout.try_clone()?
        } else {
            self.stderr.connect()?
        };
        Ok([stdout, stderr])
    }

    /// Where stdout and stderr stand. Exact while the job stands still.
    pub fn mark_outputs(&self) -> io::Result<[OutputMark; 2]> {
        let stdout = self.stdout.mark()?;
        let stderr = if self.joined {
            stdout
        } else {
            self.stderr.mark()?
        };
        Ok([stdout, stderr])
    }
}

/// The streams as snapshots, restores and the loop share them.
pub(super) type SharedStreams = std::sync::Arc<Mutex<Streams>>;

impl Workshop {
    pub fn new(
        config: Config,
        store: Store,
        lock: StoreLock,
        criu: Criu,
        command: Vec<OsString>,
        directory: PathBuf,
    ) -> io::Result<Self> {
        let work = tempfile::Builder::new()
            .prefix("ckpt-run.")
            .tempdir_in("/tmp")?;
        let program = keep_program(store.path())?;
        std::os::unix::fs::symlink(&program, work.path().join(HOLD_PROGRAM))?;
        fs::create_dir(work.path().join("plugins"))?;
        for folder in ["logs", "aside"] {
            create_private(&store.path().join(folder))?;
        }
        let instance = format!("{}-{}", std::process::id(), clock::unix_ms());
        Ok(Self {
            config,
            store,
            lock,
            criu,
            command,
            directory,
            instance,
            program,
            work,
            driver: OnceLock::new(),
        })
    }

    /// The CUDA driver, loaded once.
    pub fn driver(&self) -> Result<&cuda::Driver, cuda::LoadError> {
        if let Some(driver) = self.driver.get() {
            return Ok(driver);
        }
        let driver = cuda::Driver::load()?;
        Ok(self.driver.get_or_init(|| driver))
    }

    /// The action script of a dump.
    pub fn hold(&self) -> PathBuf {
        self.work.path().join(HOLD_PROGRAM)
    }

    /// An empty folder: no plugin of the system's acts on our job.
    pub fn libdir(&self) -> PathBuf {
        self.work.path().join("plugins")
    }

    /// A fresh folder for the sockets of one dump or restore.
    pub fn sockets(&self) -> io::Result<TempDir> {
        tempfile::Builder::new()
            .prefix("images.")
            .tempdir_in(self.work.path())
    }

    /// Where CRIU logs this operation. The oldest logs go.
    pub fn log(&self, operation: &str, image: impl std::fmt::Display) -> PathBuf {
        let folder = self.store.path().join("logs");
        forget_old(&folder, LOGS_KEPT);
        folder.join(format!("{operation}-{image}-{}.log", clock::unix_ms()))
    }

    /// Where what a restore of `image` cuts off files is kept.
    pub fn aside(&self, image: impl std::fmt::Display) -> PathBuf {
        self.store
            .path()
            .join("aside")
            .join(format!("{image}-{}", clock::unix_ms()))
    }
}

/// Copies the running binary into the store, under a name made from its content.
fn keep_program(store: &Path) -> io::Result<PathBuf> {
    let folder = store.join("bin");
    create_private(&folder)?;
    let content = fs::read("/proc/self/exe")?;
    let name = blake3::hash(&content).to_hex();
    let path = folder.join(format!("ckpt-run-{}", &name[..16]));
    if fs::metadata(&path).is_ok_and(|metadata| metadata.len() == content.len() as u64) {
        return Ok(path);
    }
    let new = tempfile::NamedTempFile::new_in(&folder)?;
    fs::write(new.path(), &content)?;
    fs::set_permissions(new.path(), fs::Permissions::from_mode(0o700))?;
    new.persist(&path).map_err(|error| error.error)?;
    Ok(path)
}

fn create_private(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        Ok(()) | Err(_) => fs::set_permissions(folder, fs::Permissions::from_mode(0o700)),
    }
}

/// Keeps the newest `keep` files of a folder, by name of their end: the time of their making.
fn forget_old(folder: &Path, keep: usize) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.sort_by_key(|path| {
        fs::metadata(path)
            .and_then(|metadata| metadata.modified())
            .ok()
    });
    let old = paths.len().saturating_sub(keep);
    for path in &paths[..old] {
        // A log that cannot be removed is only a little disk space.
        let _ = fs::remove_file(path);
    }
}
