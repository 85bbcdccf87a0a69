//! Lease of a run whose store several machines can write: a folder on NFS, Lustre or another shared file system.
//!
//! The store's `flock` is not enough there. Some file systems keep it on one machine, and a server releases the locks of a
//! machine that it has not heard of for a while, which may still run the job. The lease is the one of a remote store,
//! with its log of states in the store's folder `lease/`. A fence keeps out what a former holder still writes.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::statfs::{
    AFS_SUPER_MAGIC, CODA_SUPER_MAGIC, FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC,
    statfs,
};
use url::Url;

use super::begin_remote::STATE_LIMIT;
use super::lease_keeper::{Lease, Terms};
use super::lease_wait::{LeaseWait, Patience};
use super::run_lease::RunLease;
use super::shared_state::{Change, Holder};
use super::state_log::{Entry, StateLog};
use crate::clock;
use crate::config::Sharing;
use crate::printable::chain;
use crate::store::remote::bucket::Bucket;
use crate::store::{LockError, RemoteError, Store, StoreLock, fence};

/// Folder of the lease in the store.
const FOLDER: &str = "lease";
/// Time for one operation of a verb on the lease.
const VERB_LIMIT: Duration = Duration::from_secs(15);

/// File systems that several machines can have in use. The numbers are from `linux/magic.h` and the sources of the
/// projects.
const SHARED: [FsType; 15] = [
    NFS_SUPER_MAGIC,
    SMB_SUPER_MAGIC,
    AFS_SUPER_MAGIC,
    CODA_SUPER_MAGIC,
    // sshfs, JuiceFS, GlusterFS and others.
    FUSE_SUPER_MAGIC,
    FsType(0xff53_4d42), // CIFS
    FsType(0xfe53_4d42), // SMB 2
    FsType(0x0bd0_0bd0), // Lustre
    FsType(0x4750_4653), // GPFS
    FsType(0x00c3_6400), // Ceph
    FsType(0x1983_0326), // BeeGFS
    FsType(0x0116_1970), // GFS2
    FsType(0x7461_636f), // OCFS2
    FsType(0x0102_1997), // 9P
    FsType(0x6a65_6a63), // virtiofs
];

/// Lease of a store, which this process holds. Dropped before the job can run, it is released.
pub(crate) struct StoreLease {
    lease: Lease,
    run_lease: RunLease,
    has_begun: AtomicBool,
}

impl std::fmt::Debug for StoreLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StoreLease").finish_non_exhaustive()
    }
}

impl StoreLease {
    /// Waits for the lease of a shared store, takes it and raises the fence. `None` if the store is not shared.
    ///
    /// # Errors
    /// The lease cannot be taken. Nothing of the store has changed but the folder of the lease.
    pub(crate) fn acquire(
        store: &Store,
        sharing: Sharing,
        ttl: Duration,
        take_over: bool,
    ) -> Result<Option<Self>, RemoteError> {
        let Some(states) = states(store, sharing, ttl / STATE_LIMIT)? else {
            return Ok(None);
        };
        let terms = Terms {
            holder: this_machine(),
            ttl,
            take_over,
            fresh: false,
        };
        let (lease, _) = Lease::acquire(&states, &terms, |holder, left| {
            report_wait(store, holder, left);
        })?;
        let taken = Self {
            run_lease: RunLease::new(&lease)?,
            lease,
            has_begun: AtomicBool::new(false),
        };
        let epoch = taken.lease.state().epoch;
        fence::raise(store.path(), epoch).map_err(|error| RemoteError::Request {
            url: states.url().to_owned(),
            what: "keep out what a former holder still writes".to_owned(),
            reason: chain(&error),
        })?;
        Ok(Some(taken))
    }

    /// Notes that the job can run here from now on: the lease stays until its [`end`](Self::end).
    pub(crate) fn has_begun(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }

    pub(crate) fn run_lease(&self) -> &RunLease {
        &self.run_lease
    }

    /// Ends the lease, so that no other machine needs to wait.
    pub(crate) fn end(&self) {
        self.has_begun();
        match self.lease.release(&Change::Release { finished: false }) {
            // Another supervisor has taken the lease.
            Ok(()) | Err(RemoteError::Fenced { .. }) => {}
            Err(error) => tracing::warn!(
                "the lease of the store was not released, another machine waits until it has expired: {}",
                chain(&error)
            ),
        }
    }
}

/// A supervisor that could not begin lets others begin.
impl Drop for StoreLease {
    fn drop(&mut self) {
        if !self.has_begun.load(Ordering::Relaxed) {
            // Not in this thread, which may be one of an async runtime.
            std::thread::scope(|scope| {
                scope.spawn(|| self.end());
            });
        }
    }
}

/// Locks a store for a verb that changes it. Waits until the lease of another machine has expired, if it was not
/// released.
///
/// # Errors
/// [`LockError::Held`] if another process holds the lock, or renews the lease.
pub(crate) fn lock_alone(store: &Store) -> Result<StoreLock, LockError> {
    let lock = store.lock()?;
    let folder =
        std::path::absolute(store.path().join(FOLDER)).map_err(|source| LockError::Io {
            path: store.path().to_owned(),
            source,
        })?;
    if !folder.exists() {
        return Ok(lock);
    }
    match wait_until_free(store, &folder) {
        Ok(()) => Ok(lock),
        Err(RemoteError::Held { host, .. }) => Err(LockError::Held {
            path: store.path().to_owned(),
            holder: format!("the supervisor on {host}"),
        }),
        Err(error) => Err(LockError::Io {
            path: folder,
            source: io::Error::other(chain(&error)),
        }),
    }
}

fn wait_until_free(store: &Store, folder: &Path) -> Result<(), RemoteError> {
    let log = StateLog::new(Bucket::open_existing(&address(folder)?, VERB_LIMIT)?);
    let known = log.newest(None)?;
    let is_ours = |entry: &Entry| entry.state.holder == this_machine();
    if known.as_ref().is_some_and(is_ours) {
        // The lock shows that its holder has exited.
        return Ok(());
    }
    let mut report = |holder: &Holder, left: Duration| report_wait(store, holder, left);
    LeaseWait::new(&log, Patience::UntilRenewed, &mut report).until_free(known)?;
    Ok(())
}

fn report_wait(store: &Store, holder: &Holder, left: Duration) {
    tracing::info!(
        "waiting {} s for the lease of the store {}: the supervisor on {} holds it, or has not ended it; --take-over \
         takes it at once, if that machine is gone",
        left.as_secs() + 1,
        store.path().display(),
        holder.host
    );
}

/// Returns the folder of the states of a shared store; `None` if the store is not shared.
fn states(store: &Store, sharing: Sharing, limit: Duration) -> Result<Option<Bucket>, RemoteError> {
    match sharing {
        Sharing::No => return Ok(None),
        Sharing::Auto if !is_shared(store.path()) => return Ok(None),
        Sharing::Auto | Sharing::Yes => {}
    }
    let states = Bucket::open(&address(&store.path().join(FOLDER))?, limit)?;
    match states.check_create_only() {
        Ok(()) => Ok(Some(states)),
        Err(error) if sharing == Sharing::Auto => {
            tracing::warn!(
                "the store {} has no lease, so two machines can run the job at the same time: {}",
                store.path().display(),
                chain(&error)
            );
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn address(folder: &Path) -> Result<String, RemoteError> {
    let url = Url::from_file_path(folder).map_err(|()| RemoteError::Address {
        url: folder.display().to_string(),
        reason: "it is not absolute".to_owned(),
    })?;
    Ok(url.into())
}

/// Returns true if several machines can have the file system in use.
fn is_shared(path: &Path) -> bool {
    statfs(path).is_ok_and(|about| SHARED.contains(&about.filesystem_type()))
}

/// Returns this machine as a holder. On one boot of a machine the store's lock admits one supervisor, so the next one does not
/// wait for the lease of a killed one.
fn this_machine() -> Holder {
    let host = nix::unistd::gethostname().unwrap_or_default();
    Holder {
        store: clock::boot().to_owned(),
        host: host.to_string_lossy().into_owned(),
    }
}
