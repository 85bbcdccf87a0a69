//! The immutable context shared by a run's snapshots and restores.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

use super::environment;
use super::format::chain;
use super::gpu_facts::GpuPairs;
use super::housekeeping::{self, COPIES, COPY_DIGITS, COPY_PREFIX};
use super::progress::Ongoing;

use super::work_folder::{LOGS, WorkFolder};
use crate::agent_client::{self, Library, Token};
use crate::clock;
use crate::config::{self, Config, Memory, Watch};
use crate::criu::{self, Criu};
use crate::cuda;
use crate::files::{
    self, Choice, JobFiles, LOG_DESCRIPTOR, MOUNTS_VARIABLE, OnLost, WATCHER_ARGUMENT,
};
use crate::remote_run::{RemoteRun, RunLease, StoreLease};
use crate::safe_path::SeenUsers;
use crate::sandbox::{Hidden, Isolation, JobUser, Sandbox, ToolCommand};
use crate::store::fs::durable::{self, DurableError};
use crate::store::{ImageId, Store, StoreLock};

/// Number of CRIU logs that are kept; they show why an older snapshot failed.
const LOGS_KEPT: usize = 20;

/// Folder of CRIU's plugins in a store. Code may be stored there, as ckpt-run's own copy is; [`WORK_PARENT`] may be
/// mounted `noexec`.
const PLUGINS: &str = "plugins";

/// The constant part of a run.
#[derive(Debug)]
pub(crate) struct RunContext {
    /// Dropped before the lock, which protects its link.
    work: WorkFolder,
    pub config: Config,
    pub store: Store,
    pub lock: StoreLock,
    pub criu: Criu,
    pub command: Vec<OsString>,
    pub directory: PathBuf,
    /// User of a new job, if different from ckpt-run's.
    pub user: Option<JobUser>,
    /// Identifies this supervisor's process.
    pub instance: String,
    moved: Moved,
    /// The files that the job writes.
    pub files: JobFiles,
    /// Users as which its processes have acted.
    pub users: SeenUsers,
    /// The snapshot or restore in progress.
    pub ongoing: Ongoing,
    /// The copy of this binary that sandboxes run; images map it, so it must outlive an upgrade.
    pub program: PathBuf,
    /// The library that is preloaded into a new job and the token that names its agents; `None` without agents.
    pub agent: Option<(PathBuf, Token)>,
    /// The CUDA driver, loaded on first use because it is large.
    driver: OnceLock<cuda::Driver>,
    /// The GPUs, queried once: their free memory is not needed here, and a query wakes GPUs that may be asleep.
    gpus: OnceLock<cuda::Inventory>,
    /// The copy of the run in object storage.
    pub remote: Option<RemoteRun>,
    /// The lease of a store that several machines share.
    pub store_lease: Option<StoreLease>,
    /// NVML for a job that uses GPUs: loaded from its first snapshot on, while it is not paused.
    pub nvml: cuda::KeptNvml,
}

/// The GPUs to which the user moves the job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moved {
    pub map: GpuPairs,
    /// The last image made before the move; in later images the job has already moved.
    pub through: Option<ImageId>,
}

impl RunContext {
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
        housekeeping::remove_copies(&store, &lock, &program);
        renew_plugins(&store.path().join(PLUGINS))?;
        let agent = agent(config.cuda.memory, &store.path().join(COPIES))?;
        let choice = Choice {
            include: &config.files.include,
            exclude: &config.files.exclude,
            shared: &config.files.shared,
            on_lost: match config.files.on_lost {
                config::OnLost::Refuse => OnLost::Refuse,
                config::OnLost::Warn => OnLost::Warn,
            },
            settings: config::PROJECT_FILE,
        };
        let files = JobFiles::open(store.path(), work.path(), &directory, choice)?;
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
            files,
            users: SeenUsers::default(),
            moved,
            ongoing: Ongoing::default(),
            program,
            agent,
            user: None,
            driver: OnceLock::new(),
            gpus: OnceLock::new(),
            remote: None,
            store_lease: None,
            nvml: cuda::KeptNvml::default(),
        })
    }

    /// Adds the copy of the run in object storage.
    pub fn with_remote(self, remote: Option<RemoteRun>) -> Self {
        Self { remote, ..self }
    }

    pub fn with_store_lease(self, store_lease: Option<StoreLease>) -> Self {
        Self {
            store_lease,
            ..self
        }
    }

    /// Returns the leases whose loss ends the run.
    pub fn leases(&self) -> impl Iterator<Item = &RunLease> {
        let remote = self.remote.iter().map(RemoteRun::run_lease);
        remote.chain(self.store_lease.iter().map(StoreLease::run_lease))
    }

    /// Makes the job run as a user. That user has no access to the agent, which is in the store, so the job runs
    /// without it.
    pub fn with_user(mut self, user: Option<JobUser>) -> io::Result<Self> {
        if user.is_some() && self.agent.take().is_some() {
            if self.config.cuda.memory == Memory::Resident {
                let reason = "cuda.memory = \"resident\" is not possible together with the setting user: that user has \
                              no access to ckpt-run's agent; set cuda.memory = \"auto\"";
                return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
            }
            tracing::warn!(
                "the driver copies GPU memory through host memory, which is slower: the job's user has no access to \
                 ckpt-run's agent"
            );
        }
        self.user = user;
        Ok(self)
    }

    /// Returns the CUDA driver, loaded once.
    pub fn driver(&self) -> Result<&cuda::Driver, cuda::LoadError> {
        if let Some(driver) = self.driver.get() {
            return Ok(driver);
        }
        let driver = cuda::Driver::load()?;
        Ok(self.driver.get_or_init(|| driver))
    }

    /// Returns the machine's GPUs as they were at the first query: their identity, not their free memory. Returns an
    /// empty inventory if they cannot be listed.
    pub fn gpus(&self) -> cuda::Inventory {
        if let Some(known) = self.gpus.get() {
            return known.clone();
        }
        match cuda::inventory() {
            Ok(found) => self.gpus.get_or_init(|| found).clone(),
            Err(error) => {
                tracing::debug!(%error, "cannot list the GPUs");
                cuda::Inventory::default()
            }
        }
    }

    /// Returns the user's map of GPUs for a restore of this image; empty if ckpt-run chooses the GPUs.
    pub fn gpu_map_for(&self, id: ImageId) -> &[(String, String)] {
        if Some(id) <= self.moved.through {
            &self.moved.map
        } else {
            &[]
        }
    }

    /// Makes a process in the sandbox watch the files that the job writes, unless the settings disable that, there are
    /// no namespaces, or the kernel reports nothing in them: then snapshots scan for changes.
    pub fn watch(&self, sandbox: &Sandbox) {
        self.files.drop_watcher();
        let can_watch = sandbox.isolation().has_namespaces() && !sandbox.is_unprivileged();
        if !can_watch || self.config.files.watch == Watch::Off {
            return;
        }
        if let Err(error) = self.try_watch(sandbox) {
            self.files.drop_watcher();
            tracing::warn!(
                "the files that the job writes are not watched: {}",
                chain(&*error)
            );
        }
    }

    fn try_watch(&self, sandbox: &Sandbox) -> Result<(), Box<dyn std::error::Error>> {
        let descriptors = self.files.new_watcher()?;
        let watcher = ToolCommand {
            argv: [self.program.as_path(), Path::new(WATCHER_ARGUMENT)]
                .into_iter()
                .chain(self.files.ours().iter().map(PathBuf::as_path))
                .chain(files::ACCOUNTING.map(Path::new))
                .map(|word| word.as_os_str().to_owned())
                .collect(),
            environment: Vec::new(),
            first_descriptor: LOG_DESCRIPTOR,
            restores: None,
            hidden: Hidden::NOTHING,
            own_ipc: false,
            clock_offsets: None,
        };
        let numbers = descriptors.each_ref().map(AsRawFd::as_raw_fd);
        sandbox.watch(watcher, files::obituary(), &numbers)?;
        Ok(self.files.await_watcher()?)
    }

    /// Makes the job's programs report the files that they change, where no watcher can learn that from the kernel.
    pub fn preload_witness(
        &self,
        isolation: Isolation,
        environment: &mut Vec<(OsString, OsString)>,
    ) {
        // Another user has no access to the store.
        if self.user.is_some() || self.config.files.watch == Watch::Off {
            return;
        }
        let mut mounts = None;
        if isolation == Isolation::Namespaces {
            mounts = files::mounts_to_report();
            if mounts.is_none() {
                return;
            }
        }
        let folder = self.store.path().join(COPIES);
        let installed = agent_client::install(Library::Witness, &folder)
            .and_then(|library| Ok((library, self.files.begin_reports()?)));
        match installed {
            Ok((library, (name, reports))) => {
                environment::preload(environment, |present| {
                    let preload = agent_client::preload_before(&library, present);
                    let list = agent_client::PRELOAD_VARIABLE.into();
                    let mut variables = vec![(list, preload), (name.into(), reports.into())];
                    let mounts = mounts.map(|mounts| (MOUNTS_VARIABLE.into(), mounts));
                    variables.extend(mounts);
                    variables
                });
            }
            Err(error) => tracing::warn!(
                "the job's programs do not report the files that they change, so a restore is refused if such a file is \
                 not in files.include: {error}"
            ),
        }
    }

    /// Returns the folder of ckpt-run's CRIU plugin. The folder contains no plugin of the system, so none acts on the
    /// job.
    pub fn libdir(&self) -> PathBuf {
        self.store.path().join(PLUGINS)
    }

    /// Creates a folder for the sockets of one dump or restore.
    pub fn sockets(&self) -> io::Result<TempDir> {
        self.work.make_again()?;
        tempfile::Builder::new()
            .prefix("images.")
            .tempdir_in(self.work.path())
    }

    /// Returns the path of CRIU's log for this operation. Removes the oldest logs.
    pub fn log(&self, operation: &str, image: impl std::fmt::Display) -> PathBuf {
        let folder = self.store.path().join(LOGS);
        forget_old(&folder, LOGS_KEPT);
        folder.join(format!("{operation}-{image}-{}.log", clock::unix_ms()))
    }

    /// Returns the folder for the data that a restore of `image` cuts off files. Removes the oldest such folders.
    pub fn aside(&self, image: impl std::fmt::Display) -> PathBuf {
        housekeeping::aside(self.store.path(), image, clock::unix_ms())
    }
}

/// Returns the agent, which keeps the job's memory on the GPU, and its token. Returns `None` if no agent is wanted, or
/// if it is unavailable and not required.
fn agent(wanted: Memory, folder: &Path) -> io::Result<Option<(PathBuf, Token)>> {
    if wanted == Memory::Driver || !cuda::available() {
        return Ok(None);
    }
    let library = match agent_client::install(Library::Agent, folder) {
        Ok(library) => library,
        Err(error) if wanted == Memory::Auto => {
            tracing::warn!(
                "the driver copies GPU memory through host memory, which is slower: {error}"
            );
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
        durable::copy_program(program, &path).map_err(plain)?;
    }
    // Also for an existing copy: the process that made it may have been killed before this step.
    durable::sync_folder(&folder).map_err(plain)?;
    durable::sync_folder(store).map_err(plain)?;
    Ok(path)
}

/// Returns true if the file exists, is complete and can be executed.
fn is_program(path: &Path, hash: blake3::Hash) -> io::Result<bool> {
    let runs = |metadata: fs::Metadata| metadata.is_file() && metadata.mode() & 0o100 != 0;
    Ok(fs::symlink_metadata(path).is_ok_and(runs) && hash_of(path)? == hash)
}

/// Returns the hash of a file's content. The content is not kept in memory: a restore waits for this function, and
/// allocating memory takes longer.
pub(crate) fn hash_of(path: &Path) -> io::Result<blake3::Hash> {
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

/// Recreates the folder of CRIU's plugins: CRIU runs every plugin in it.
fn renew_plugins(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    create_private(folder)?;
    criu::install_plugin(folder)
}

/// Keeps the `keep` files of a folder that were last written to.
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
        // A log that cannot be removed only takes a little disk space.
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    //! Tests of the files that a context creates in its store.

    use super::*;

    #[test]
    fn the_folder_of_plugins_is_closed_and_holds_ours_alone() {
        let store = tempfile::tempdir().unwrap();
        let folder = store.path().join(PLUGINS);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("other.so"), "not ours").unwrap();
        fs::write(folder.join("ckpt-run.so"), "cut short").unwrap();
        renew_plugins(&folder).unwrap();
        let names: Vec<_> = folder
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names, ["ckpt-run.so"]);
        assert!(fs::metadata(folder.join("ckpt-run.so")).unwrap().len() > 1000);
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_damaged_copy_of_the_program_is_replaced() {
        let store = tempfile::tempdir().unwrap();
        let program = store.path().join("program");
        fs::write(&program, "the program").unwrap();
        let copy = keep_program(&program, store.path()).unwrap();
        let check = || {
            assert_eq!(keep_program(&program, store.path()).unwrap(), copy);
            assert_eq!(fs::read_to_string(&copy).unwrap(), "the program");
            let mode = fs::metadata(&copy).unwrap().mode();
            assert_eq!(mode & 0o777, 0o700);
        };
        check();
        fs::write(&copy, "the Program").unwrap();
        check();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o600)).unwrap();
        check();
    }
}
