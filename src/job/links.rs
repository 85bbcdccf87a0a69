//! Hard links by which CRIU finds a file that has lost the name it was opened by, and the locks for creating them.
//!
//! CRIU (4.2.1) names them `link_remap.N`, in the file's folder, for the duration of a dump, and a restore searches for
//! them there. N counts from the same number in each job, so jobs with files in one folder need the same names (POSIX
//! semaphores are in `/dev/shm`; workers of a `DataLoader` have some). Therefore jobs take turns by an `flock` on the
//! folder, which ends with its holder. A restore needs several names, so it cannot wait for one while it holds another.
//!
//! Links that exist when a turn begins belong to no running dump or restore: they were left by a ckpt-run that was
//! killed, or by a `criu dump` of another program. They are set aside for the duration of the turn, and those of the
//! same files are removed.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, DirEntry, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc::O_DIRECTORY;
use procfs::process::MMapPath;

use crate::clock;

use super::descriptors::Descriptors;
use super::files::{LINK_PREFIX, OpenFile, is_deleted};
use super::rewind::error::{RewindError, system};
use super::tree;
use crate::safe_path::Spot;

/// The suffix of a link that is set aside.
const ASIDE: &str = ".set-aside-by-ckpt-run";
/// Pause between two attempts to take the lock.
const PAUSE: Duration = Duration::from_millis(20);
/// Time that a dump waits for other ckpt-runs, in all folders together. They hold a folder for some seconds at most,
/// unless the driver copies much GPU memory meanwhile. Without the lock, the dump may collide with another job's name and
/// fail; it is tried again when the next one is due.
const DUMP_WAIT: Wait = Wait {
    ours: Duration::from_secs(20),
    others: Duration::from_secs(2),
};
/// Time that a restore waits. Many jobs that are restored at the same time follow one another, and a restore that gave up
/// would cost the job. A holder that cannot be seen may be a ckpt-run in another container.
const RESTORE_WAIT: Wait = Wait {
    ours: Duration::from_secs(300),
    others: Duration::from_secs(20),
};
/// Time before a message names the folder that is waited for.
const SILENCE: Duration = Duration::from_secs(2);

/// Limits on the wait for all folders of a turn.
#[derive(Clone, Copy, Debug)]
struct Wait {
    /// While a ckpt-run of this user holds a folder.
    ours: Duration,
    /// While something else does: whoever may look into a folder can lock it.
    others: Duration,
}

/// A file, by device and inode.
type Identity = (u64, u64);

/// The right to create links in folders, until it is dropped.
#[derive(Debug)]
pub struct DumpLock {
    folders: Vec<(PathBuf, Flock<File>)>,
}

impl DumpLock {
    /// Takes the lock for a dump of processes with these descriptors. Waits while other jobs dump or restore there, for a
    /// limited time.
    #[must_use]
    pub fn to_dump(open: &[Descriptors]) -> Self {
        let found: Vec<_> = open.iter().flat_map(renamed).collect();
        let own = found.iter().map(|(_, identity)| *identity).collect();
        let folders = found.into_iter().map(|(folder, _)| folder).collect();
        Self::take(folders, &own, DUMP_WAIT)
    }

    /// Takes the lock for a restore of a job with these files. Waits while other jobs dump or restore there, for a
    /// limited time.
    #[must_use]
    pub fn to_restore(files: &[OpenFile]) -> Self {
        let linked = files.iter().filter(|file| !file.links.is_empty());
        let own = linked.filter_map(|file| identity(&file.path)).collect();
        let links = files.iter().flat_map(|file| &file.links);
        let folders = links.filter_map(|link| Some(link.parent()?.to_owned()));
        Self::take(folders.collect(), &own, RESTORE_WAIT)
    }

    /// Locks one folder after the other, in the order that every process uses.
    fn take(folders: BTreeSet<PathBuf>, own: &BTreeSet<Identity>, wait: Wait) -> Self {
        let begun = clock::now();
        let take = |folder: PathBuf| {
            let held = lock(&folder, begun, wait)?;
            let there = path_of(&held);
            give_back(&there);
            set_aside(&there, own);
            Some((folder, held))
        };
        Self {
            folders: folders.into_iter().filter_map(take).collect(),
        }
    }

    /// Creates the links that a restore of these files needs.
    ///
    /// # Errors
    /// A link cannot be created.
    pub fn make_links(&self, files: &[OpenFile]) -> Result<(), RewindError> {
        for file in files {
            for link in file.links.iter().filter(|link| **link != file.path) {
                let made = Spot::of(&file.path).and_then(|file| {
                    let link = Spot::of(link)?;
                    fs::hard_link(file.path(), link.path())
                });
                match made {
                    Err(_) if same_file(&file.path, link) => {}
                    made => made.map_err(system("make the link", link))?,
                }
            }
        }
        Ok(())
    }
}

impl Drop for DumpLock {
    fn drop(&mut self) {
        for (_, held) in &self.folders {
            give_back(&path_of(held));
        }
    }
}

/// Removes the links that a restore needed, if any are left.
pub fn remove_links(files: &[OpenFile]) {
    for file in files {
        for link in &file.links {
            if *link == file.path || same_file(&file.path, link) {
                // A missing link is the goal; a remaining one is only an odd name.
                let _ = Spot::of(link).and_then(|link| fs::remove_file(link.path()));
            }
        }
    }
}

/// Returns a path that leads to a locked folder, whatever its name is.
fn path_of(held: &File) -> PathBuf {
    format!("/proc/self/fd/{}", held.as_raw_fd()).into()
}

/// Locks a folder; returns `None` if the folder is gone, or its holder does not finish in time.
fn lock(folder: &Path, begun: Instant, wait: Wait) -> Option<Flock<File>> {
    let spot = Spot::of(folder).ok()?;
    let mut file = spot.open(File::options().read(true), O_DIRECTORY).ok()?;
    let mut told = false;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(held) => return Some(held),
            Err((back, Errno::EWOULDBLOCK)) => file = back,
            Err(_) => return None,
        }
        let waited = clock::now() - begun;
        if waited >= wait.others && (waited >= wait.ours || !is_held_by_ckpt_run(&file)) {
            break;
        }
        if !told && waited >= SILENCE {
            let folder = folder.display();
            tracing::info!(%folder, "waiting for another job that has files there and is snapshotted or restored");
            told = true;
        }
        thread::sleep(PAUSE);
    }
    tracing::warn!(
        folder = %folder.display(),
        "another program holds a lock (flock) on a folder of the job's; not waited for any longer"
    );
    None
}

/// Returns true if a ckpt-run of this user holds the lock on a folder. Only its word counts: a holder may call itself
/// anything, and `/proc` shows a process that is not dumpable as root's.
fn is_held_by_ckpt_run(folder: &File) -> bool {
    let Ok(inode) = folder.metadata().map(|about| about.ino()) else {
        return false;
    };
    let locks = procfs::locks().unwrap_or_default();
    let mut holders = locks
        .into_iter()
        .filter(|lock| lock.lock_type == procfs::LockType::FLock && lock.inode == inode);
    holders.any(|lock| lock.pid.is_some_and(is_ckpt_run))
}

fn is_ckpt_run(pid: i32) -> bool {
    let Ok(process) = procfs::process::Process::new(pid) else {
        return false;
    };
    let user = nix::unistd::getuid().as_raw();
    let is_ours = process.status().is_ok_and(|status| status.ruid == user);
    let name = |path: &Path| path.file_name().map(OsStr::to_owned);
    let program = process.exe().ok().and_then(|path| name(&path));
    let us = std::env::current_exe().ok().and_then(|path| name(&path));
    is_ours
        && program.is_some_and(|program| {
            program.as_encoded_bytes().starts_with(b"ckpt-run") || Some(program) == us
        })
}

/// Returns the entries of a folder that have CRIU's names followed by the suffix `behind`.
fn links_in<'a>(
    folder: &Path,
    behind: &'a str,
) -> impl Iterator<Item = (DirEntry, String)> + use<'a> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let name = entry.file_name().into_string().ok()?;
        let link = name.strip_suffix(behind)?.to_owned();
        let number = link.strip_prefix(LINK_PREFIX)?;
        (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
            .then_some((entry, link))
    })
}

fn set_aside(folder: &Path, own: &BTreeSet<Identity>) {
    for (entry, link) in links_in(folder, "") {
        // A link that cannot be moved belongs to another user and is in the way: CRIU reports it.
        let file = entry
            .metadata()
            .ok()
            .map(|about| (about.dev(), about.ino()));
        let _ = match file {
            Some(file) if own.contains(&file) => fs::remove_file(entry.path()),
            _ => fs::rename(entry.path(), folder.join(format!("{link}{ASIDE}"))),
        };
    }
}

/// Restores the names of the links that were set aside, also by a holder that was killed.
fn give_back(folder: &Path) {
    for (entry, link) in links_in(folder, ASIDE) {
        // No renaming, because that would replace an existing file.
        if fs::hard_link(entry.path(), folder.join(link)).is_ok() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Returns true if frozen processes have files for which CRIU makes links.
#[must_use]
pub fn have_renamed(open: &[Descriptors]) -> bool {
    open.iter().any(|one| !renamed(one).is_empty())
}

/// Returns the files that a process opened by a name that they have lost, but that have another name, with their
/// folders: CRIU will link them.
fn renamed(open: &Descriptors) -> Vec<(PathBuf, Identity)> {
    let pid = open.process.host_pid;
    let opened = open.all.iter();
    let opened = opened.map(|one| (one.target.clone(), one.link.clone()));
    let maps = tree::maps(pid);
    let maps = maps.into_iter().flatten();
    let mapped = maps.filter_map(|map| match map.pathname {
        MMapPath::Path(path) => Some((path, tree::map_link(pid, map.address))),
        _ => None,
    });
    let lost = opened.chain(mapped).filter(|(path, _)| is_deleted(path));
    lost.filter_map(|(path, link)| {
        let about = fs::metadata(link).ok()?;
        let has_another = about.is_file() && about.nlink() > 0;
        has_another.then_some((path.parent()?.to_owned(), (about.dev(), about.ino())))
    })
    .collect()
}

fn identity(path: &Path) -> Option<Identity> {
    let about = Spot::of(path).ok()?.metadata().ok()?;
    Some((about.dev(), about.ino()))
}

fn same_file(one: &Path, other: &Path) -> bool {
    identity(one).is_some_and(|one| identity(other) == Some(one))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Child, Command, Stdio};
    use std::sync::mpsc::channel;

    use nix::sys::wait::{WaitPidFlag, waitpid};
    use nix::unistd::Pid;
    use tempfile::TempDir;

    /// A process with a file that has lost the name `first` and kept `second`.
    struct Holder {
        folder: TempDir,
        process: Child,
    }

    impl Holder {
        fn start() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let (first, second) = (folder.path().join("first"), folder.path().join("second"));
            let file = File::create(&first).unwrap();
            fs::hard_link(&first, &second).unwrap();
            fs::remove_file(&first).unwrap();
            let process = Command::new("sh")
                .args(["-c", "kill -STOP $$"])
                .stdin(file)
                .spawn()
                .unwrap();
            let holder = Self { folder, process };
            // The process opens and closes files while it starts.
            waitpid(Pid::from_raw(holder.pid()), Some(WaitPidFlag::WUNTRACED)).unwrap();
            holder
        }

        fn pid(&self) -> i32 {
            i32::try_from(self.process.id()).unwrap()
        }

        fn open(&self) -> Descriptors {
            Descriptors::of(self.pid()).unwrap()
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn is_in(&self, turn: &DumpLock) -> bool {
            let mut folders = turn.folders.iter();
            folders.any(|(folder, _)| folder == self.folder.path())
        }
    }

    impl Drop for Holder {
        fn drop(&mut self) {
            self.process.kill().unwrap();
            self.process.wait().unwrap();
        }
    }

    #[test]
    fn files_that_have_their_names_or_none_need_no_turn() {
        let folder = tempfile::tempdir().unwrap();
        let (named, gone) = (folder.path().join("named"), folder.path().join("gone"));
        let _files = [File::create(named).unwrap(), File::create(&gone).unwrap()];
        fs::remove_file(gone).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let mine = renamed(&Descriptors::of(me).unwrap());
        assert!(mine.iter().all(|(one, _)| one != folder.path()));
    }

    #[test]
    fn dumps_and_restores_of_files_in_one_folder_follow_one_another() {
        let holder = Holder::start();
        let second = holder.path("second");
        let mut files = super::super::collect(&[holder.open()]).unwrap();
        files.retain(|file| file.path == second);
        files[0].links = vec![holder.path("link_remap.7")];
        let turn = DumpLock::to_dump(&[holder.open()]);
        assert!(holder.is_in(&turn));
        let (done, waits) = channel();
        std::thread::scope(|scope| {
            let (files, holder) = (&files, &holder);
            scope.spawn(move || {
                let turn = DumpLock::to_restore(files);
                turn.make_links(files).unwrap();
                done.send(holder.is_in(&turn)).unwrap();
            });
            assert!(waits.recv_timeout(PAUSE * 5).is_err());
            drop(turn);
            assert!(waits.recv().unwrap());
        });
        assert!(same_file(&second, &files[0].links[0]));
        remove_links(&files);
        assert!(!files[0].links[0].exists());
    }

    /// Another program that holds the lock on a folder.
    struct Locker(Child);

    impl Locker {
        fn start(folder: &Path) -> Self {
            let mut locker = Command::new("flock");
            // Without a fork, the kill ends the holder.
            locker
                .arg("--no-fork")
                .arg(folder)
                .args(["sh", "-c", "echo; exec sleep 1000"]);
            let mut locker = Self(locker.stdout(Stdio::piped()).spawn().unwrap());
            let mut line = [0];
            locker
                .0
                .stdout
                .as_mut()
                .unwrap()
                .read_exact(&mut line)
                .unwrap();
            locker
        }
    }

    impl Drop for Locker {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn another_programs_lock_is_waited_for_as_long_as_is_stated() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let _lockers = [one.path(), two.path()].map(Locker::start);
        let wait = Wait {
            ours: Duration::from_secs(600),
            others: Duration::from_millis(200),
        };
        let folders = [one.path().to_owned(), two.path().to_owned()];
        let turn = DumpLock::take(folders.into(), &BTreeSet::new(), wait);
        assert!(turn.folders.is_empty());
    }

    #[test]
    fn the_lock_of_a_ckpt_run_of_this_user_is_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let open = || File::open(folder.path()).unwrap();
        assert!(!is_held_by_ckpt_run(&open()));
        let held = Flock::lock(open(), FlockArg::LockExclusive).unwrap();
        assert!(is_held_by_ckpt_run(&open()), "this process has our name");
        drop(held);
        let _locker = Locker::start(folder.path());
        assert!(!is_held_by_ckpt_run(&open()));
    }

    #[test]
    fn what_was_left_behind_is_set_aside_for_the_turn_and_removed_where_it_is_ones_own() {
        let holder = Holder::start();
        let path = |name: &str| holder.path(name);
        fs::write(path("link_remap.1"), "another's").unwrap();
        fs::write(
            path(&format!("link_remap.2{ASIDE}")),
            "by one who was killed",
        )
        .unwrap();
        fs::write(path("link_remap.x"), "no link").unwrap();
        fs::hard_link(path("second"), path("link_remap.3")).unwrap();
        let turn = DumpLock::to_dump(&[holder.open()]);
        let there = |names: [&str; 4]| names.map(|name| path(name).exists());
        let names = [
            "link_remap.1",
            "link_remap.2",
            "link_remap.3",
            "link_remap.x",
        ];
        assert_eq!(there(names), [false, false, false, true]);
        drop(turn);
        assert_eq!(there(names), [true, true, false, true]);
        assert_eq!(
            fs::read_to_string(path("link_remap.1")).unwrap(),
            "another's"
        );
        assert_eq!(fs::read_dir(holder.folder.path()).unwrap().count(), 4);
    }
}
