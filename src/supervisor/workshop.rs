//! What every snapshot and restore of a run needs and none of them changes.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use tempfile::TempDir;

use super::dump_log;
use super::gpu_plan::GpuPairs;
use super::intrusion::Intrusion;
use super::leftovers::{self, COPIES, COPY_DIGITS, COPY_PREFIX};
use super::progress::Ongoing;
use super::resident::Standby;
use super::streams::Streams;
use crate::clock;
use crate::config::{Config, Memory};
use crate::criu::{self, Criu, HOLD_PROGRAM};
use crate::cuda;
use crate::job::{self, Process, TreeError};
use crate::resident::{self, Token};
use crate::sandbox::{JobPids, Sandbox};
use crate::store::durable::{self, DurableError};
use crate::store::{ImageId, Store, StoreLock};

/// Folder of CRIU's logs in the store.
const LOGS: &str = "logs";
/// CRIU logs that are kept; they tell why an older snapshot failed.
const LOGS_KEPT: usize = 20;

/// Where work folders are: short, for a socket's path has 107 bytes at most.
const WORK_PARENT: &str = "/tmp";
/// How their names begin.
const WORK_PREFIX: &str = "ckpt-run.";
/// Folder of CRIU's plugins in a store: code may lie there, as our own copy does, where [`WORK_PARENT`] may be
/// mounted `noexec`.
const PLUGINS: &str = "plugins";
/// The link in a store to its supervisor's work folder.
const WORK_LINK: &str = "work";

/// The constant part of a run.
#[derive(Debug)]
pub(super) struct Workshop {
    /// Dropped before the lock, which guards its link.
    work: WorkFolder,
    pub config: Config,
    pub store: Store,
    pub lock: StoreLock,
    pub criu: Criu,
    pub command: Vec<OsString>,
    pub directory: PathBuf,
    /// Marks this supervisor's process.
    pub instance: String,
    moved: Moved,
    /// What is done at present.
    pub ongoing: Ongoing,
    /// The copy of this binary that sandboxes run; images map it, so it must outlive an upgrade.
    pub program: PathBuf,
    /// What is preloaded into a job that starts, and what it is called by, if anything is.
    pub agent: Option<(PathBuf, Token)>,
    /// The copier of the next restore.
    pub standby: Standby,
    /// Loaded when it is first needed: it is large.
    driver: OnceLock<cuda::Driver>,
    /// Asked for once: what they have free is not in question, and asking wakes them where they may sleep.
    gpus: OnceLock<cuda::Inventory>,
    /// For a job that uses GPUs, from its first snapshot on while it is not paused.
    pub nvml: cuda::KeptNvml,
}

/// Private folder with short paths, for sockets. The store links to it, so that the next supervisor
/// finds the folder of one that was killed.
#[derive(Debug)]
struct WorkFolder {
    folder: TempDir,
    link: PathBuf,
}

impl WorkFolder {
    /// Removes the folder of a killed supervisor and makes a new one. The caller has the store's lock.
    fn new(store: &Path) -> io::Result<Self> {
        let link = store.join(WORK_LINK);
        if let Ok(previous) = fs::read_link(&link) {
            if is_work_folder(&previous) {
                dump_log::keep_all(&previous, &store.join(LOGS));
                if let Err(error) = fs::remove_dir_all(&previous) {
                    tracing::warn!(folder = %previous.display(), %error, "cannot remove an old work folder");
                }
            }
            fs::remove_file(&link)?;
        }
        let folder = tempfile::Builder::new()
            .prefix(WORK_PREFIX)
            .tempdir_in(WORK_PARENT)?;
        symlink(folder.path(), &link)?;
        Ok(Self { folder, link })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn link_program(&self, program: &Path) -> io::Result<()> {
        symlink(program, self.path().join(HOLD_PROGRAM))
    }

    /// Puts back what was cleaned away; in [`WORK_PARENT`] that happens to what is old.
    fn make_again(&self, program: &Path) -> io::Result<()> {
        match DirBuilder::new().mode(0o700).create(self.path()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            // Everybody may make folders there, and what is in this one CRIU runs.
            Err(_) if !is_work_folder(self.path()) => {
                let reason = format!("{} is somebody else's now", self.path().display());
                return Err(io::Error::other(reason));
            }
            Ok(()) | Err(_) => {}
        }
        match self.link_program(program) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // The folder first: while it is there, it can be found. What stays is a link to nothing.
        let _ = fs::remove_dir_all(self.folder.path());
        let _ = fs::remove_file(&self.link);
    }
}

/// Removes the work folder that a killed supervisor has left; for whoever removes its store, too.
pub fn remove_work_folder(store: &Path) {
    if let Ok(folder) = fs::read_link(store.join(WORK_LINK))
        && is_work_folder(&folder)
    {
        // What stays there is small, and in a folder that is cleaned up by others.
        let _ = fs::remove_dir_all(folder);
    }
}

/// Whether a link leads to what a supervisor of this user made, and not to anything else.
fn is_work_folder(path: &Path) -> bool {
    let named = path.parent() == Some(Path::new(WORK_PARENT))
        && path
            .file_name()
            .is_some_and(|name| name.as_bytes().starts_with(WORK_PREFIX.as_bytes()));
    let user = nix::unistd::geteuid().as_raw();
    named
        && fs::symlink_metadata(path)
            .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user)
}

/// Where the user moves the job.
#[derive(Clone, Debug, Default)]
pub(super) struct Moved {
    pub map: GpuPairs,
    /// The last image from before: in later ones it has moved already.
    pub through: Option<ImageId>,
}

/// A job that runs, or is about to.
#[derive(Debug)]
pub(super) struct Job {
    pub sandbox: std::sync::Arc<Sandbox>,
    pub pids: JobPids,
    /// What its agents are called by, if it was started with any.
    pub token: Option<Token>,
    /// Its [`CudaFacts::moved`].
    pub moved: Vec<i32>,
    /// What we do in it, for those who look for signs that it lives.
    pub intrusion: Intrusion,
}

impl Job {
    /// Whether its first process is among those that are there, and not about to die.
    pub fn lives(&self, processes: &[Process]) -> bool {
        self.first_among(processes)
            .is_some_and(|pid| !job::is_doomed(pid))
    }

    /// Whether its first process has, by a look of our own: the sandbox's word of it may come later.
    pub fn has_ended(&self) -> bool {
        let root = job::child_with_pid(self.sandbox.pid(), self.pids.root);
        match root.and_then(job::tree) {
            Ok(there) => self.first_among(&there).is_none(),
            Err(error) => matches!(error, TreeError::NoRoot),
        }
    }

    /// Its first process, as the host sees it, if it lives.
    fn first_among(&self, processes: &[Process]) -> Option<i32> {
        let first = processes
            .iter()
            .find(|process| process.pid == self.pids.job)?;
        job::is_alive(first.host_pid).then_some(first.host_pid)
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
        moved: Moved,
    ) -> io::Result<Self> {
        for folder in [LOGS, "aside"] {
            create_private(&store.path().join(folder))?;
        }
        let work = WorkFolder::new(store.path())?;
        let program = keep_program(Path::new("/proc/self/exe"), store.path())?;
        leftovers::remove_copies(&store, &lock, &program);
        work.link_program(&program)?;
        renew_plugins(&store.path().join(PLUGINS))?;
        let agent = agent(config.cuda.memory, &store.path().join(COPIES))?;
        let instance = format!("{}-{}", std::process::id(), clock::unix_ms());
        Ok(Self {
            work,
            config,
            store,
            lock,
            criu,
            command,
            directory,
            instance,
            moved,
            ongoing: Ongoing::default(),
            program,
            agent,
            standby: Standby::default(),
            driver: OnceLock::new(),
            gpus: OnceLock::new(),
            nvml: cuda::KeptNvml::default(),
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

    /// The machine's GPUs as they were when first asked for: which ones they are, not what is free on them. None
    /// where they cannot be listed.
    pub fn gpus(&self) -> cuda::Inventory {
        if let Some(known) = self.gpus.get() {
            return known.clone();
        }
        match cuda::inventory() {
            Ok(found) => self.gpus.get_or_init(|| found).clone(),
            Err(error) => {
                tracing::debug!(%error, "the GPUs cannot be listed");
                cuda::Inventory::default()
            }
        }
    }

    /// The user's map of GPUs for a restore of this image; empty leaves the choice to us.
    pub fn gpu_map_for(&self, id: ImageId) -> &[(String, String)] {
        if Some(id) <= self.moved.through {
            &self.moved.map
        } else {
            &[]
        }
    }

    /// The action script of a dump.
    pub fn hold(&self) -> PathBuf {
        self.work.path().join(HOLD_PROGRAM)
    }

    /// Folder of our plugin: none of the system's acts on our job.
    pub fn libdir(&self) -> PathBuf {
        self.store.path().join(PLUGINS)
    }

    /// A fresh folder for the sockets of one dump or restore.
    pub fn sockets(&self) -> io::Result<TempDir> {
        self.work.make_again(&self.program)?;
        tempfile::Builder::new()
            .prefix("images.")
            .tempdir_in(self.work.path())
    }

    /// Where CRIU logs this operation. The oldest logs go.
    pub fn log(&self, operation: &str, image: impl std::fmt::Display) -> PathBuf {
        let folder = self.store.path().join(LOGS);
        forget_old(&folder, LOGS_KEPT);
        folder.join(format!("{operation}-{image}-{}.log", clock::unix_ms()))
    }

    /// Where what a restore of `image` cuts off files is kept. The oldest such folders go.
    pub fn aside(&self, image: impl std::fmt::Display) -> PathBuf {
        leftovers::aside(self.store.path(), image, clock::unix_ms())
    }
}

/// What keeps the job's memory on the GPU, and its secret; none where that is not wanted, or not possible and not
/// insisted on.
fn agent(wanted: Memory, folder: &Path) -> io::Result<Option<(PathBuf, Token)>> {
    if wanted == Memory::Driver || !cuda::available() {
        return Ok(None);
    }
    let library = match resident::install(folder) {
        Ok(library) => library,
        Err(error) if wanted == Memory::Auto => {
            tracing::warn!("GPU memory goes the driver's way, which is slower: {error}");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    Ok(Some((library, Token::random()?)))
}

/// Copies a program into the store, under a name made from its content.
fn keep_program(program: &Path, store: &Path) -> io::Result<PathBuf> {
    let folder = store.join(COPIES);
    create_private(&folder)?;
    let hash = hash_of(program)?;
    let path = folder.join(format!("{COPY_PREFIX}{}", &hash.to_hex()[..COPY_DIGITS]));
    if !is_program(&path, hash)? {
        durable::write_program(&path, &fs::read(program)?).map_err(plain)?;
    }
    // Also for a copy that is there: whoever made it may have been killed before this.
    durable::sync_folder(&folder).map_err(plain)?;
    durable::sync_folder(store).map_err(plain)?;
    Ok(path)
}

/// Whether the file is there, whole, and can be run.
fn is_program(path: &Path, hash: blake3::Hash) -> io::Result<bool> {
    let runs = |metadata: fs::Metadata| metadata.is_file() && metadata.mode() & 0o100 != 0;
    Ok(fs::symlink_metadata(path).is_ok_and(runs) && hash_of(path)? == hash)
}

/// The hash of a file's content, which is not kept in memory: a restore waits for this, and fresh memory takes longer.
pub(super) fn hash_of(path: &Path) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(hasher.finalize())
}

fn plain(error: DurableError) -> io::Error {
    io::Error::new(error.io_error().kind(), error)
}

fn create_private(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        Ok(()) | Err(_) => fs::set_permissions(folder, fs::Permissions::from_mode(0o700)),
    }
}

/// Makes the folder of CRIU's plugins anew: it runs whatever is in there.
fn renew_plugins(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    create_private(folder)?;
    criu::install_plugin(folder)
}

/// Keeps the `keep` files of a folder that were written to last.
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

#[cfg(test)]
mod tests;
