//! Hard links by which CRIU finds open files whose names were removed, and the locks for creating these links.
//!
//! CRIU (4.2.1) creates `link_remap.N` in the file's folder for the duration of a dump, and a restore searches for it
//! there. N starts at the same number in each job, so jobs with files in one folder need the same names. (POSIX
//! semaphores are in `/dev/shm`; workers of a `DataLoader` have some.) Therefore each dump and restore holds an `flock`
//! on the folder, which the kernel releases when its holder exits. A restore needs several names, so it cannot wait for
//! one while it holds another.
//!
//! Links that exist when the lock is taken belong to no running dump or restore. They were left by a killed ckpt-run,
//! or by a `criu dump` of another program. They are set aside while the lock is held. Links to the job's own files are
//! removed.

use std::collections::BTreeSet;
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

use super::folder_locks::is_held_by_ckpt_run;
use crate::job::descriptors::Descriptors;
use crate::job::files::{LINK_PREFIX, OpenFile, is_deleted};
use crate::job::nodes::map_link;
use crate::job::rewind::error::{RewindError, system};
use crate::job::tree;
use crate::safe_path::{JobUsers, Spot};

/// Number of looks in a row that find no ckpt-run with the lock: between two jobs, nobody has it for a moment.
const LOOKS_MIN: u32 = 5;
/// Suffix of a link that is set aside.
const ASIDE: &str = ".set-aside-by-ckpt-run";
/// Pause between two attempts to take the lock.
const PAUSE: Duration = Duration::from_millis(20);
/// Wait of a dump for other ckpt-runs, for all folders together. They hold a folder for a few seconds at most, unless
/// the driver copies much GPU memory meanwhile. Without the lock, the dump may collide with another job's name and
/// fail; the next due snapshot repeats it.
const DUMP_WAIT: Wait = Wait {
    ours: Duration::from_secs(20),
    others: Duration::from_secs(2),
};
/// Wait of a restore. Many jobs restored at the same time take the lock one after another, and a restore that gave up
/// would end its job. An invisible holder may be a ckpt-run in another container.
const RESTORE_WAIT: Wait = Wait {
    ours: Duration::from_secs(300),
    others: Duration::from_secs(20),
};
/// Delay before a message names the folder with the lock.
const SILENCE: Duration = Duration::from_secs(2);

/// Limits on the wait for the locks of all folders.
#[derive(Clone, Copy, Debug)]
struct Wait {
    /// Limit while a ckpt-run of this user holds a folder.
    ours: Duration,
    /// Limit while another program holds a folder: every user with access to a folder can lock it.
    others: Duration,
}

/// A file, by device and inode.
type Identity = (u64, u64);

/// Locks on folders, which allow the creation of links until they are dropped.
#[derive(Debug)]
pub struct DumpLock {
    folders: Vec<(PathBuf, Flock<File>)>,
    /// All folders whose locks were wanted. A lock is missing if another program keeps it.
    wanted: BTreeSet<PathBuf>,
}

impl DumpLock {
    /// Takes the locks for a dump of processes with these descriptors. Waits a limited time for other jobs' dumps and
    /// restores in these folders.
    #[must_use]
    pub fn to_dump(open: &[Descriptors]) -> Self {
        let found: Vec<_> = open.iter().flat_map(renamed).collect();
        let own = found.iter().map(|(_, identity)| *identity).collect();
        let folders = found.into_iter().map(|(folder, _)| folder).collect();
        Self::take(folders, &own, DUMP_WAIT)
    }

    /// Takes the locks for a restore of a job with these files. Waits a limited time for other jobs' dumps and restores
    /// in these folders.
    #[must_use]
    pub fn to_restore(files: &[OpenFile]) -> Self {
        let linked = files.iter().filter(|file| !file.links.is_empty());
        let own = linked.filter_map(|file| identity(&file.path)).collect();
        let links = files.iter().flat_map(|file| &file.links);
        let folders = links.filter_map(|link| Some(link.parent()?.to_owned()));
        Self::take(folders.collect(), &own, RESTORE_WAIT)
    }

    /// Locks the folders in the order of their paths, as every process does.
    fn take(folders: BTreeSet<PathBuf>, own: &BTreeSet<Identity>, wait: Wait) -> Self {
        let begun = clock::now();
        let take = |folder: PathBuf| {
            let held = lock(&folder, begun, wait)?;
            tidy(&held, own);
            Some((folder, held))
        };
        Self {
            wanted: folders.clone(),
            folders: folders.into_iter().filter_map(take).collect(),
        }
    }

    /// Takes the locks, without waiting, on those of the folders in which CRIU will make links that were not wanted before:
    /// the processes, frozen by now, have removed a file's name since. Returns false if CRIU will make no links.
    ///
    /// # Errors
    /// Another job has the lock of this folder. At its end CRIU removes its links by their names, which would be that job's
    /// then.
    pub fn complete(&mut self, open: &[Descriptors]) -> Result<bool, PathBuf> {
        let found: Vec<_> = open.iter().flat_map(renamed).collect();
        let own = found.iter().map(|(_, identity)| *identity).collect();
        let makes_links = !found.is_empty();
        for (folder, _) in found {
            if self.wanted.insert(folder.clone()) {
                let now = |file| Flock::lock(file, FlockArg::LockExclusiveNonblock).ok();
                let Some(held) = open_folder(&folder).and_then(now) else {
                    return Err(folder);
                };
                tidy(&held, &own);
                self.folders.push((folder, held));
            }
        }
        Ok(makes_links)
    }

    /// Creates the links that a restore of these files needs.
    ///
    /// # Errors
    /// A link cannot be created.
    pub fn make_links(&self, files: &[OpenFile], users: &JobUsers) -> Result<(), RewindError> {
        for file in files {
            for link in file.links.iter().filter(|link| **link != file.path) {
                let of = |path| Spot::of_job(path, file.owner.0, users);
                let made = of(&file.path).and_then(|file| file.link_to(&of(link)?));
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

/// Removes remaining links of a restore.
pub fn remove_links(files: &[OpenFile], users: &JobUsers) {
    for file in files {
        for link in &file.links {
            if *link == file.path || same_file(&file.path, link) {
                // A remaining link is harmless.
                let _ = Spot::of_job(link, file.owner.0, users).and_then(|link| link.remove_file());
            }
        }
    }
}

/// Returns a path that leads to a locked folder even if its name has changed.
fn path_of(held: &File) -> PathBuf {
    format!("/proc/self/fd/{}", held.as_raw_fd()).into()
}

fn open_folder(folder: &Path) -> Option<File> {
    let spot = Spot::of(folder).ok()?;
    spot.open(File::options().read(true), O_DIRECTORY).ok()
}

/// Locks a folder. Returns `None` if the folder does not exist, or its holder does not release it in time.
fn lock(folder: &Path, begun: Instant, wait: Wait) -> Option<Flock<File>> {
    let mut file = open_folder(folder)?;
    let mut is_logged = false;
    let mut looks = 0;
    // The wait for another program begins when no ckpt-run of this user has the lock any more.
    let mut last_ours = begun;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(held) => return Some(held),
            Err((back, Errno::EWOULDBLOCK)) => file = back,
            Err(_) => return None,
        }
        let now = clock::now();
        let waited = now - begun;
        looks += 1;
        if is_held_by_ckpt_run(&file) {
            (looks, last_ours) = (0, now);
        }
        let is_over = now - last_ours >= wait.others && looks >= LOOKS_MIN;
        if waited >= wait.ours || is_over {
            break;
        }
        if !is_logged && waited >= SILENCE {
            let folder = folder.display();
            tracing::info!(%folder, "waiting for the snapshot or restore of another job with files in this folder");
            is_logged = true;
        }
        thread::sleep(PAUSE);
    }
    tracing::warn!(
        folder = %folder.display(),
        "another program keeps its lock (flock) on a folder of the job; continuing without the lock"
    );
    None
}

/// Returns the entries of a folder whose names are CRIU's followed by the suffix `behind`.
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

/// Sets aside what is in a folder that has just been locked.
fn tidy(held: &File, own: &BTreeSet<Identity>) {
    let there = path_of(held);
    give_back(&there);
    set_aside(&there, own);
}

fn set_aside(folder: &Path, own: &BTreeSet<Identity>) {
    for (entry, link) in links_in(folder, "") {
        // A link that cannot be moved belongs to another user. CRIU reports the conflict.
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

/// Restores the names of links that were set aside, also by a killed holder.
fn give_back(folder: &Path) {
    for (entry, link) in links_in(folder, ASIDE) {
        // A rename would replace an existing file.
        if fs::hard_link(entry.path(), folder.join(link)).is_ok() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Returns the files of a process whose opened name was removed but that have another name, with their folders. CRIU
/// will create links for them.
fn renamed(open: &Descriptors) -> Vec<(PathBuf, Identity)> {
    let pid = open.process.host_pid;
    let opened = open.all.iter();
    let opened = opened.map(|one| (one.target.clone(), one.link()));
    let maps = tree::maps(pid);
    let maps = maps.into_iter().flatten();
    let mapped = maps.filter_map(|map| match &map.pathname {
        MMapPath::Path(path) => Some((path.clone(), map_link(pid, &map))),
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

    /// A process with a file whose name `first` was removed and `second` remains.
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
    fn files_with_their_names_or_without_any_need_no_lock() {
        let folder = tempfile::tempdir().unwrap();
        let (named, gone) = (folder.path().join("named"), folder.path().join("gone"));
        let _files = [File::create(named).unwrap(), File::create(&gone).unwrap()];
        fs::remove_file(gone).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let mine = renamed(&Descriptors::of(me).unwrap());
        assert!(mine.iter().all(|(one, _)| one != folder.path()));
    }

    #[test]
    fn dumps_and_restores_of_files_in_one_folder_take_turns() {
        let holder = Holder::start();
        let second = holder.path("second");
        let mut files = crate::job::collect(&[holder.open()]).unwrap();
        files.retain(|file| file.path == second);
        files[0].links = vec![holder.path("link_remap.7")];
        let mut earlier = DumpLock::to_dump(&[]);
        assert_eq!(earlier.complete(&[]), Ok(false));
        assert_eq!(earlier.complete(&[holder.open()]), Ok(true));
        assert!(holder.is_in(&earlier));
        let folder = holder.folder.path().to_owned();
        let late = DumpLock::to_dump(&[]).complete(&[holder.open()]);
        assert_eq!(late, Err(folder));
        drop(earlier);
        let turn = DumpLock::to_dump(&[holder.open()]);
        assert!(holder.is_in(&turn));
        let (done, waits) = channel();
        std::thread::scope(|scope| {
            let (files, holder) = (&files, &holder);
            scope.spawn(move || {
                let turn = DumpLock::to_restore(files);
                turn.make_links(files, &JobUsers::default()).unwrap();
                done.send(holder.is_in(&turn)).unwrap();
            });
            assert!(waits.recv_timeout(PAUSE * 5).is_err());
            drop(turn);
            assert!(waits.recv().unwrap());
        });
        assert!(same_file(&second, &files[0].links[0]));
        remove_links(&files, &JobUsers::default());
        assert!(!files[0].links[0].exists());
    }

    /// Another program that holds the lock on a folder.
    struct Locker(Child);

    impl Locker {
        fn start(folder: &Path) -> Self {
            let mut locker = Command::new("flock");
            // `exec` avoids a fork, so that the kill ends the holder.
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
    fn another_programs_lock_is_waited_for_within_the_limit() {
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
    fn foreign_stale_links_are_set_aside_and_own_ones_removed() {
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
