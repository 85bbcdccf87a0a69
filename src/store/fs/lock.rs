//! Lock of a store: an `flock` on the file `lock` admits one writer.
//!
//! The kernel releases it with the last copy of the descriptor, so a dead supervisor leaves no stale lock. A child
//! forked without `exec` inherits a copy and keeps the store locked until it exits. Reading needs no lock.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::ops;
use super::store_place::{self, PlaceError};
use crate::clock;
use crate::store::format::FORMAT;
use crate::store::format::store_folder::Store;

/// Maximum length of the holder's description: a pid, a host name, a time, and a command line whose characters have up
/// to four bytes.
const HOLDER_BYTES_MAX: u64 = 1024;
/// Maximum length of the holder's command line, in characters: enough to recognize it.
const COMMAND_LETTERS_MAX: usize = 120;

/// Lock of a store, required by every call that writes. The store is released when the lock and the image writer begun
/// with it are dropped.
#[derive(Debug)]
pub struct StoreLock {
    held: Arc<Held>,
}

/// Error for a store that cannot be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process writes to the store.
    #[error(
        "the store {path} is in use by {holder}: wait until it exits, or use another --store; a run in progress \
         answers `ckpt-run status` and `ckpt-run snapshot`"
    )]
    Held {
        /// The store.
        path: PathBuf,
        /// Pid, host, command line and start of the other process, as far as known.
        holder: String,
    },
    /// The store has a newer format, and this version could lose parts of it.
    #[error(
        "the store {path} has format {found}, this version writes {FORMAT}: \
         use a newer ckpt-run or another store; its images can still be read"
    )]
    Newer {
        /// The store.
        path: PathBuf,
        /// The format of the store.
        found: u32,
    },
    /// Another user could replace the store through a folder above it.
    #[error("the store was not opened")]
    Place(#[from] PlaceError),
    /// The lock file cannot be used.
    #[error("cannot lock {path}")]
    Io {
        /// The lock file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

#[derive(Debug)]
struct Held {
    // Kept open for its lock.
    _file: Flock<File>,
    store: PathBuf,
    busy: AtomicBool,
}

/// Claim on the store for one change by this process, such as writing an image or removing files. Keeps the lock, too.
#[derive(Debug)]
pub(crate) struct Busy {
    held: Arc<Held>,
}

impl Store {
    /// Locks the store for writing, without waiting.
    ///
    /// # Errors
    /// [`LockError::Held`] names the process that holds the lock.
    pub fn lock(&self) -> Result<StoreLock, LockError> {
        if self.format() > FORMAT {
            return Err(LockError::Newer {
                path: self.path().to_owned(),
                found: self.format(),
            });
        }
        store_place::check(self.path())?;
        let path = self.lock_file();
        let failed = |source| LockError::Io {
            path: path.clone(),
            source,
        };
        let file = ops::open_or_create(&path, 0o600).map_err(failed)?;
        let file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((file, Errno::EWOULDBLOCK)) => {
                return Err(LockError::Held {
                    path: self.path().to_owned(),
                    holder: read_holder(file),
                });
            }
            Err((_, errno)) => return Err(failed(errno.into())),
        };
        if let Err(error) = write_holder(&file) {
            // The description is for messages only. A full disk must not prevent snapshots.
            tracing::debug!(%error, "cannot write the holder into the lock file");
        }
        Ok(StoreLock {
            held: Arc::new(Held {
                _file: file,
                store: self.path().to_owned(),
                busy: AtomicBool::new(false),
            }),
        })
    }
}

impl StoreLock {
    /// Claims the store for one change. Returns `None` while another change is in progress, such as an image that is
    /// being written, whose packs no manifest names yet.
    pub(crate) fn claim(&self, store: &Path) -> Option<Busy> {
        self.check(store);
        let was_busy = self.held.busy.swap(true, Ordering::AcqRel);
        (!was_busy).then(|| Busy {
            held: Arc::clone(&self.held),
        })
    }

    pub(crate) fn check(&self, store: &Path) {
        assert_eq!(self.held.store, store, "the lock belongs to another store");
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.held.busy.store(false, Ordering::Release);
    }
}

/// Writes the holder's description in three lines; older versions read only the first.
fn write_holder(file: &File) -> io::Result<()> {
    ops::set_len(file, 0)?; // first: no name is better than that of the holder before
    let host = nix::unistd::gethostname()?;
    let words: Vec<String> = std::env::args_os()
        .map(|word| printable(&word.to_string_lossy()))
        .collect();
    let lines = format!(
        "process {} on {}\n{}\n{}\n",
        std::process::id(),
        host.display(),
        clock::timestamp(),
        clipped(&words.join(" ")),
    );
    ops::write_at(file, lines.as_bytes(), 0)
}

/// Returns the holder's identity, command and start time, as far as known.
fn read_holder(file: File) -> String {
    let mut bytes = Vec::new();
    let read = file.take(HOLDER_BYTES_MAX).read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines().map(printable);
    // The holder may not have written its description yet.
    let (Ok(_), Some(who)) = (read, lines.next()) else {
        return "another process".to_owned();
    };
    let since = lines.next().and_then(|line| line.parse::<Timestamp>().ok());
    let since = since.map(|time| {
        let time = time.to_zoned(TimeZone::system());
        format!("since {}", time.strftime("%Y-%m-%d %H:%M:%S"))
    });
    let command = lines.next().filter(|line| !line.is_empty());
    let known: Vec<String> = command.into_iter().chain(since).collect();
    if known.is_empty() {
        return who;
    }
    format!("{who} ({})", known.join(", "))
}

fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Shortens a command line for a message.
fn clipped(line: &str) -> String {
    let mut letters = line.chars();
    let beginning: String = letters.by_ref().take(COMMAND_LETTERS_MAX).collect();
    match letters.next() {
        Some(_) => beginning + "…",
        None => beginning,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::support::{Child, temporary_store};

    #[test]
    fn second_lock_fails_until_the_first_is_dropped() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        assert!(matches!(store.lock(), Err(LockError::Held { .. })));
        drop(lock);
        store.lock().unwrap();
    }

    #[test]
    fn only_one_change_at_a_time_and_it_keeps_the_lock() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let busy = lock.claim(store.path()).unwrap();
        assert!(lock.claim(store.path()).is_none());
        drop(lock);
        assert!(store.lock().is_err());
        drop(busy);
        store.lock().unwrap();
    }

    #[test]
    fn another_process_is_named_and_its_death_frees_the_store() {
        let (_folder, store) = temporary_store();
        let holder = concat!(module_path!(), "::child_holds_the_lock");
        let child = Child::start(holder, store.path());
        let error = store.lock().unwrap_err().to_string();
        let expected = format!("in use by process {} on ", child.pid());
        assert!(error.contains(&expected), "{error}");
        // The message has the command, the start time and a remedy.
        for known in [
            holder.trim_start_matches("ckpt_run::"),
            ", since 2",
            "use another --store",
            "`ckpt-run status`",
        ] {
            assert!(error.contains(known), "{error}");
        }
        child.kill();
        store.lock().unwrap();
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn child_holds_the_lock() {
        Child::main(|path| Store::open(path).unwrap().lock().unwrap());
    }

    #[test]
    fn a_holder_that_cannot_write_its_name_has_the_lock() {
        let (_folder, store) = temporary_store();
        std::os::unix::fs::symlink("/dev/full", store.lock_file()).unwrap();
        let _lock = store.lock().unwrap();
        assert!(matches!(store.lock(), Err(LockError::Held { .. })));
    }

    #[test]
    fn holders_description_is_not_trusted() {
        let (folder, _store) = temporary_store();
        let read = |bytes: &[u8]| {
            let path = folder.path().join("holder");
            std::fs::write(&path, bytes).unwrap();
            read_holder(File::open(path).unwrap())
        };
        assert_eq!(read(b""), "another process");
        assert_eq!(read(b"process 7 on a\n"), "process 7 on a");
        assert_eq!(
            read(b"process 7 on a\nyesterday\nck\x1b[2Jpt\xff\n"),
            "process 7 on a (ck[2Jpt\u{fffd})"
        );
        assert!(read(&[b'x'; 5000]).len() <= 1024);
        assert_eq!(clipped(&"ä".repeat(121)), "ä".repeat(120) + "…");
    }

    #[test]
    fn a_newer_store_opens_but_is_not_written() {
        let (_folder, store) = temporary_store();
        std::fs::write(store.path().join("format"), "ckpt-run store 7\n").unwrap();
        let newer = Store::open(store.path()).unwrap();
        assert!(newer.images().unwrap().is_empty());
        let error = newer.lock().unwrap_err();
        assert!(
            matches!(error, LockError::Newer { found: 7, .. }),
            "{error}"
        );
    }
}
