//! Lease of a run whose store several machines can write: a folder on NFS, Lustre or another shared file system.
//!
//! The store's `flock` is not enough there. Some file systems keep it on one machine, and a server releases the locks of a
//! machine that it has not heard of for a while, which may still run the job. The lease is the one of a remote store,
//! with its log of states in the store's folder `lease/`. A fence keeps out what a former holder still writes.

use std::io;
use std::ops::Deref;
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
use super::lease_wait::Patience;
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
/// Lease of a verb, which it renews while it works.
const VERB_TTL: Duration = Duration::from_secs(60);
/// Time between two attempts to lock a store that another machine has locked.
const LOOK: Duration = Duration::from_secs(1);

/// File systems that several machines can have in use. The numbers are from `linux/magic.h` and the sources of the
/// projects.
const SHARED: [FsType; 15] = [
    NFS_SUPER_MAGIC,
    SMB_SUPER_MAGIC,
    AFS_SUPER_MAGIC, // OpenAFS
    CODA_SUPER_MAGIC,
    // sshfs, JuiceFS, GlusterFS, virtiofs and others.
    FUSE_SUPER_MAGIC,
    FsType(0x6b41_4653), // the kernel's AFS
    FsType(0xff53_4d42), // CIFS
    FsType(0xfe53_4d42), // SMB 2
    FsType(0x0bd0_0bd0), // Lustre
    FsType(0x4750_4653), // GPFS
    FsType(0x00c3_6400), // Ceph
    FsType(0x1983_0326), // BeeGFS
    FsType(0x0116_1970), // GFS2
    FsType(0x7461_636f), // OCFS2
    FsType(0x0102_1997), // 9P
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
        let Some(states) = states(store, sharing, ttl)? else {
            return Ok(None);
        };
        let own = this_machine().store;
        let patience = if take_over {
            Patience::TakeOver
        } else {
            Patience::UntilExpired { own }
        };
        Self::take(
            store,
            &states,
            patience,
            ttl,
            "; --take-over takes it at once, if that machine is gone",
        )
        .map(Some)
    }

    fn take(
        store: &Store,
        states: &Bucket,
        patience: Patience,
        ttl: Duration,
        remedy: &str,
    ) -> Result<Self, RemoteError> {
        let terms = Terms {
            holder: this_machine(),
            ttl,
            patience,
            fresh: false,
        };
        let (lease, _) = Lease::acquire(states, &terms, |holder, left| {
            tracing::info!(
                "waiting {} s for the lease of the store {}: the supervisor on {} holds it, or has not ended it{remedy}",
                left.as_secs() + 1,
                store.path().display(),
                holder.host
            );
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
        // Who has taken the lease meanwhile may not have seen this fence.
        taken.lease.change(&Change::Renew)?;
        Ok(taken)
    }

    /// Notes that the job can run here from now on: the lease stays until its [`end`](Self::end).
    pub(crate) fn has_begun(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }

    pub(crate) fn run_lease(&self) -> &RunLease {
        &self.run_lease
    }

    /// Returns the machine that has taken the lease, if one has, as far as the file system answers.
    pub(crate) fn next_holder(&self) -> Option<String> {
        match self.lease.change(&Change::Renew) {
            Err(RemoteError::Fenced { host, .. }) => Some(host),
            // A lease that cannot be renewed is lost after its time.
            Ok(()) | Err(_) => None,
        }
    }

    /// Ends the lease, so that no other machine needs to wait.
    pub(crate) fn end(&self) {
        self.has_begun();
        self.lease.end(&Change::Release { finished: false });
    }
}

/// A supervisor that could not begin, or a verb that has ended, lets others begin.
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

/// Locks a store for a run. If another machine has locked a shared one, waits for the end of its run, or until the server
/// of the file system has released the lock of a machine that is gone.
///
/// # Errors
/// [`LockError::Held`] if another process of this machine has locked it.
pub(crate) fn lock_for_run(store: &Store) -> Result<StoreLock, LockError> {
    let mut is_reported = false;
    loop {
        match store.lock() {
            Err(LockError::Held { holder, .. }) if is_held_elsewhere(store) => {
                if !std::mem::replace(&mut is_reported, true) {
                    tracing::info!(
                        "waiting for the store {}, which is in use by {holder}",
                        store.path().display()
                    );
                }
                std::thread::sleep(LOOK);
            }
            locked => return locked,
        }
    }
}

fn is_held_elsewhere(store: &Store) -> bool {
    let Ok(Some(states)) = existing_states(store) else {
        return false;
    };
    let Ok(Some(Entry { state, .. })) = StateLog::new(states).newest(None) else {
        return false;
    };
    !state.released && state.holder.store != this_machine().store
}

/// Sole access to a store for a verb that changes it.
pub(crate) struct SoleAccess {
    lock: StoreLock,
    _lease: Option<StoreLease>,
}

impl Deref for SoleAccess {
    type Target = StoreLock;

    fn deref(&self) -> &StoreLock {
        &self.lock
    }
}

/// Locks a store for a verb that changes it, and takes its lease if a run has made one. Waits until the lease of another
/// machine has expired, if it was not released.
///
/// # Errors
/// [`LockError::Held`] if another process holds the lock, or renews the lease.
pub(crate) fn lock_alone(store: &Store) -> Result<SoleAccess, LockError> {
    let lock = store.lock()?;
    let failed = |error: RemoteError| match error {
        RemoteError::Held { host, .. } => LockError::Held {
            path: store.path().to_owned(),
            holder: format!("the supervisor on {host}"),
        },
        error => LockError::Io {
            path: store.path().join(FOLDER),
            source: io::Error::other(chain(&error)),
        },
    };
    let own = Some(this_machine().store);
    let take = |states: Bucket| {
        let patience = Patience::UntilRenewed { own };
        StoreLease::take(store, &states, patience, VERB_TTL, "")
    };
    let states = existing_states(store).map_err(failed)?;
    let lease = states.map(take).transpose().map_err(failed)?;
    Ok(SoleAccess {
        lock,
        _lease: lease,
    })
}

/// Returns the folder of the states of a store; `None` if no run has made it.
fn existing_states(store: &Store) -> Result<Option<Bucket>, RemoteError> {
    if !store.path().join(FOLDER).exists() {
        return Ok(None);
    }
    let limit = VERB_TTL / STATE_LIMIT;
    Bucket::open_existing(&address(store)?, limit).map(Some)
}

/// Returns the folder of the states of a shared store, and makes it; `None` if the store is not shared.
fn states(store: &Store, sharing: Sharing, ttl: Duration) -> Result<Option<Bucket>, RemoteError> {
    match sharing {
        Sharing::No => return Ok(None),
        Sharing::Auto if !is_shared(store.path()) => return Ok(None),
        Sharing::Auto | Sharing::Yes => {}
    }
    let open = || {
        let states = Bucket::open(&address(store)?, ttl / STATE_LIMIT)?;
        states.check_create_only().map(|()| states)
    };
    match open() {
        Ok(states) => Ok(Some(states)),
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

fn address(store: &Store) -> Result<String, RemoteError> {
    let refused = |reason: String| RemoteError::Address {
        url: store.path().display().to_string(),
        reason,
    };
    // An address has no links and no `..`.
    let path = store.path().canonicalize();
    let path = path.map_err(|error| refused(error.to_string()))?;
    let url = Url::from_file_path(path.join(FOLDER));
    url.map(String::from)
        .map_err(|()| refused("it is not absolute".to_owned()))
}

/// Returns true if several machines can have the file system in use.
fn is_shared(path: &Path) -> bool {
    statfs(path).is_ok_and(|about| SHARED.contains(&about.filesystem_type()))
}

/// Returns this machine as a holder. On one boot of a machine the store's lock admits one supervisor, so the next one does
/// not wait for the lease of a killed one. Without a known boot, each process counts as another machine.
fn this_machine() -> Holder {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let boot = match clock::boot() {
        "" => format!("process {} of {}", std::process::id(), clock::unix_ns()),
        boot => boot.to_owned(),
    };
    Holder {
        store: boot,
        host: host.to_string_lossy().into_owned(),
    }
}
