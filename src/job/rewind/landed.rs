//! Check that restored tasks have the expected files open.
//!
//! A user with write access to a folder on the way to a file can replace the file at any moment. Before CRIU starts,
//! the files at such paths are recorded, and their owners compared with the image. Before the first task runs, the
//! recorded files are compared with those that CRIU has opened: open files, mappings, working directories and roots.

use std::collections::{HashMap, HashSet};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, statfs};
use nix::unistd::geteuid;
use procfs::process::MMapPath;

use crate::job::descriptors::is_memfd;
use crate::job::files::{OpenFile, is_deleted};

use crate::job::nodes::{Borrower, Node, NodeKind, is_socket, map_link};
use crate::job::tree::{self, Process};
use crate::safe_path::{Spot, Way};

/// Kernel file systems, in which no user creates names.
const KERNEL_FOLDERS: [&str; 3] = ["/proc", "/sys", "/dev/pts"];

/// The kernel's name of anonymous shared memory.
const ANONYMOUS: &str = "/dev/zero (deleted)";

/// The kernel's times of files are this much behind its clock at most, a tick of 10 ms.
const TIMES_ARE_LATE: Duration = Duration::from_millis(20);

/// Reasons why restored tasks must not run.
#[derive(Debug, thiserror::Error)]
pub enum LandedError {
    /// Another user's file replaces the job's file.
    #[error("cannot open {} for the job: it belongs to user {now} now, and belonged to user {then} at the snapshot; put the old one back", path.display())]
    Owner {
        /// The path.
        path: PathBuf,
        /// Owner at the snapshot.
        then: u32,
        /// Current owner.
        now: u32,
    },
    /// The path contains a link that another user can have created.
    #[error("cannot open {} for the job: its path contains a link that another user than root can have created; put the folder itself there, or mount it there", .0.display())]
    Link(PathBuf),
    /// A path could not be inspected.
    #[error("cannot inspect {}, which the job needs", .0.display())]
    Inspect(PathBuf, #[source] io::Error),
    /// A task has a different file open.
    #[error("process {pid} received another file than the job's for {}: the file was replaced while it was opened; the process was killed before it ran", path.display())]
    Exchanged {
        /// Pid as the job sees it.
        pid: i32,
        /// The path of the task's file.
        path: PathBuf,
    },
    /// A process cannot be inspected.
    #[error("cannot inspect the restored process {0}")]
    Process(i32, #[source] io::Error),
}

/// Files that CRIU is expected to open for an image.
#[derive(Debug)]
pub struct Expected {
    /// All paths of the image.
    known: HashSet<PathBuf>,
    /// Device and inode of the files that another user can replace.
    watched: HashMap<PathBuf, (u64, u64)>,
    /// Device and inode of all files of the image.
    noted: HashSet<(u64, u64)>,
    /// Users as which the job's processes act, other than root and this process's user.
    others: Vec<u32>,
    /// The time at which this was recorded.
    since: SystemTime,
    /// ckpt-run's own folders.
    ours: Vec<PathBuf>,
    has_link: bool,
}

impl Expected {
    /// Records the files at the paths of an image whose processes belong to `users`. Returns `None` if only root and
    /// this process's user can replace files there.
    ///
    /// # Errors
    /// A path contains a link of another user, or leads to another user's file.
    pub fn note(
        users: &[u32],
        files: &[OpenFile],
        nodes: &[Node],
        ours: &[PathBuf],
    ) -> Result<Option<Self>, LandedError> {
        let is_other = |user: &u32| ![0, geteuid().as_raw()].contains(user);
        let mut expected = Self {
            known: HashSet::new(),
            watched: HashMap::new(),
            noted: HashSet::new(),
            others: users.iter().copied().filter(is_other).collect(),
            since: SystemTime::now() - TIMES_ARE_LATE,
            ours: ours.to_vec(),
            // Such a node is a socket that was bound by a name with a link.
            has_link: nodes.iter().any(|node| node.kind == NodeKind::Socket),
        };
        let files = files.iter().map(|file| (&file.path, file.owner.0));
        let nodes = nodes.iter().filter(|node| node.kind != NodeKind::Socket);
        let nodes = nodes.map(|node| (&node.path, node.owner.0));
        let mut ways: HashMap<&Path, Option<Way>> = HashMap::new();
        for (path, owner) in files.chain(nodes) {
            expected.add(path, owner, &mut ways)?;
        }
        let is_needed = !expected.watched.is_empty() || !expected.others.is_empty();
        Ok(is_needed.then_some(expected))
    }

    fn add<'a>(
        &mut self,
        path: &'a Path,
        then: u32,
        ways: &mut HashMap<&'a Path, Option<Way>>,
    ) -> Result<(), LandedError> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Ok(());
        };
        if !self.known.insert(path.to_owned()) {
            return Ok(());
        }
        let way = match ways.entry(parent) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(match Way::to(parent) {
                    Ok(way) => Some(way),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                    Err(error) if is_loop(&error) => {
                        return Err(LandedError::Link(path.to_owned()));
                    }
                    Err(error) => return Err(LandedError::Inspect(path.to_owned(), error)),
                })
            }
        };
        // CRIU reports missing files.
        let Some(way) = way else { return Ok(()) };
        self.has_link |= way.has_link();
        let is_ours = way.is_ours_to(Path::new(name));
        let found = match Spot::of(path).and_then(|spot| spot.metadata()) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) if is_ours => return Ok(()),
            Err(error) => return Err(LandedError::Inspect(path.to_owned(), error)),
        };
        self.noted.insert(identity(&found));
        if is_ours {
            return Ok(());
        }
        if found.is_symlink() {
            return Err(LandedError::Link(path.to_owned()));
        }
        if found.uid() != then {
            return Err(LandedError::Owner {
                path: path.to_owned(),
                then,
                now: found.uid(),
            });
        }
        self.watched.insert(path.to_owned(), identity(&found));
        Ok(())
    }

    /// Returns true if no path of the image contains a link. CRIU need not follow any then.
    #[must_use]
    pub fn needs_no_links(&self) -> bool {
        !self.has_link
    }

    /// Compares the files of the restored tasks with the recorded ones.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, processes: &[Process]) -> Result<(), LandedError> {
        for process in processes {
            self.check_process(process)?;
        }
        Ok(())
    }

    fn check_process(&self, process: &Process) -> Result<(), LandedError> {
        let pid = process.host_pid;
        let failed = |error| LandedError::Process(process.pid, error);
        if !tree::is_alive(pid) {
            return Ok(()); // a zombie has nothing open
        }
        for link in ["cwd", "root", "exe"] {
            self.check_link(process, &PathBuf::from(format!("/proc/{pid}/{link}")))?;
        }
        let borrower = Borrower::new(pid);
        for descriptor in fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)? {
            let link = descriptor.map_err(failed)?.path();
            let target = fs::read_link(&link).map_err(failed)?;
            if is_socket(&target) {
                let bound = borrower.as_ref().and_then(|it| it.path_of(&link));
                bound.map_or(Ok(()), |path| self.check_socket(process, path))?;
            } else {
                self.check_target(process, &link, target)?;
            }
        }
        let maps = tree::maps(pid).map_err(|error| failed(io::Error::other(error)))?;
        let mut seen = HashSet::new();
        for map in maps {
            // `/proc/PID/maps` is read as text, so a name that is not UTF-8 is checked through its link.
            if let MMapPath::Path(path) = &map.pathname
                && !is_memory(path)
                && seen.insert(path.clone())
            {
                let link = map_link(pid, &map);
                if link.is_symlink() {
                    self.check_link(process, &link)?;
                } else {
                    // An unprivileged process finds the file by another way than the link in `/proc`.
                    self.check_target(process, &link, path.clone())?;
                }
            }
        }
        Ok(())
    }

    /// Checks the folder in which a socket's file was created.
    fn check_socket(&self, process: &Process, path: PathBuf) -> Result<(), LandedError> {
        let is_right = path.parent().is_none_or(|folder| {
            let is_same = match self.watched.get(folder) {
                Some(wanted) => {
                    fs::symlink_metadata(folder).is_ok_and(|now| *wanted == identity(&now))
                }
                None => self.known.contains(folder),
            };
            folder.parent().is_none()
                || is_same
                || self.ours.iter().any(|ours| path.starts_with(ours))
        });
        if is_right {
            return Ok(());
        }
        // CRIU has created it for the job, as root. By now the path may lead to an older socket of another program.
        let _ = Spot::of(&path).and_then(|spot| {
            let found = spot.metadata()?;
            if found.file_type().is_socket() && self.is_new(&found) {
                spot.remove_file()
            } else {
                Ok(())
            }
        });
        Err(LandedError::Exchanged {
            pid: process.pid,
            path,
        })
    }

    fn check_link(&self, process: &Process, link: &Path) -> Result<(), LandedError> {
        match fs::read_link(link) {
            Ok(target) => self.check_target(process, link, target),
            // The mapping is not of a file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(LandedError::Process(process.pid, error)),
        }
    }

    /// Checks the file that a link in `/proc` leads to, whose path is `path`.
    fn check_target(
        &self,
        process: &Process,
        link: &Path,
        path: PathBuf,
    ) -> Result<(), LandedError> {
        let is_ours = |folder: &PathBuf| path.starts_with(folder);
        if !path.is_absolute()
            || path.parent().is_none()
            || KERNEL_FOLDERS.iter().any(|own| path.starts_with(own))
            || is_memory(&path)
            || self.ours.iter().any(is_ours)
        {
            return Ok(());
        }
        let wanted = self.watched.get(&path);
        if wanted.is_none() && self.known.contains(&path) {
            return Ok(());
        }
        let found = fs::metadata(link);
        let found = found.map_err(|error| LandedError::Process(process.pid, error))?;
        let is_right = match wanted {
            None if is_deleted(&path) => self.is_right_without_name(&found),
            Some(wanted) => *wanted == identity(&found) || is_of_layer(link, &path, &found),
            // Devices and sockets have no content and are not among the image's paths.
            None => !(found.is_file() || found.is_dir() || found.file_type().is_fifo()),
        };
        if is_right {
            return Ok(());
        }
        Err(LandedError::Exchanged {
            pid: process.pid,
            path,
        })
    }

    /// Returns true for a file that can be the job's although its name was removed: CRIU has just created it, it is a
    /// user's of the job, or it had another name. A user may have put another file there and removed its name, or given it
    /// a name with the kernel's mark.
    fn is_right_without_name(&self, found: &Metadata) -> bool {
        self.is_new(found)
            || self.others.contains(&found.uid())
            || self.noted.contains(&identity(found))
    }

    /// Returns true for a file that was created since the restore began.
    fn is_new(&self, found: &Metadata) -> bool {
        match found.created() {
            Ok(created) => created >= self.since,
            Err(_) => self.others.is_empty(),
        }
    }
}

/// Returns true for the kernel's name of memory without a file. Such names are in the root folder, except that of anonymous
/// shared memory; a memfd can have any name. Only root can make files there. Without root, the link of a mapping of
/// memory cannot be followed.
fn is_memory(path: &Path) -> bool {
    let is_in_root_folder = path
        .parent()
        .is_some_and(|folder| folder.parent().is_none());
    is_memfd(path) || is_deleted(path) && (is_in_root_folder || path == Path::new(ANONYMOUS))
}

/// Returns true for a mapping of a file on an overlay: the kernel shows the file of the layer below, on another device.
fn is_of_layer(link: &Path, path: &Path, found: &Metadata) -> bool {
    let is_mapping = link
        .parent()
        .is_some_and(|folder| folder.ends_with("map_files"));
    let overlay = |path: &Path| {
        statfs(path).is_ok_and(|about| about.filesystem_type() == OVERLAYFS_SUPER_MAGIC)
    };
    is_mapping
        && Spot::of(path).is_ok_and(|spot| {
            let is_other = spot
                .metadata()
                .is_ok_and(|named| named.dev() != found.dev());
            is_other && overlay(&spot.path())
        })
}

fn is_loop(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::ELOOP as i32)
}

fn identity(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Descriptors;
    use std::fs::{File, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::{Command, Stdio};

    use nix::sys::wait::{WaitPidFlag, waitpid};
    use nix::unistd::Pid;

    /// Runs `act` with a process that has a file open, in a folder where every user may rename.
    fn scene(act: impl FnOnce(&Path, &Expected, &[Process])) {
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), Permissions::from_mode(0o777)).unwrap();
        let path = place.path().join("file");
        fs::write(&path, "theirs").unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "kill -STOP $$"])
            .current_dir("/")
            .stdin(File::open(&path).unwrap())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        // A process opens and closes files while it starts.
        waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WUNTRACED)).unwrap();
        let processes = [Process {
            host_pid: pid,
            pid,
            resident: 0,
        }];
        let files = || crate::job::collect(&[Descriptors::of(pid).unwrap()]).unwrap();
        let expected = Expected::note(&[0], &files(), &[], &[]).unwrap().unwrap();
        act(&path, &expected, &processes);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn recorded_files_pass_and_another_file_fails() {
        scene(|path, expected, processes| {
            expected.check(processes).unwrap();
            assert_eq!(expected.watched.len(), 1, "only replaceable files");
            let mut other = Expected {
                known: expected.known.clone(),
                watched: HashMap::new(),
                noted: HashSet::new(),
                others: Vec::new(),
                since: SystemTime::now(),
                ours: Vec::new(),
                has_link: false,
            };
            other.watched.insert(path.to_owned(), (0, 0));
            let exchanged = other.check(processes).unwrap_err();
            assert!(matches!(exchanged, LandedError::Exchanged { .. }));
            other.watched.clear();
            other.known.remove(path);
            let stray = other.check(processes).unwrap_err();
            assert!(stray.to_string().contains("file"), "{stray}");
            fs::rename(path, path.with_file_name("file (deleted)")).unwrap();
            other.check(processes).unwrap_err();
            other.noted = expected.noted.clone();
            other.check(processes).unwrap();
            other.noted.clear();
            other.since = SystemTime::UNIX_EPOCH;
            other.check(processes).unwrap();
        });
    }

    #[test]
    fn foreign_links_and_owners_are_refused_in_advance() {
        scene(|path, _, processes| {
            let files = crate::job::collect(&Descriptors::of_all(processes).unwrap()).unwrap();
            let note = || Expected::note(&[0], &files, &[], &[]);
            fs::rename(path, path.with_file_name("moved")).unwrap();
            symlink("moved", path).unwrap();
            assert!(matches!(note(), Err(LandedError::Link(_))));
            fs::remove_file(path).unwrap();
            fs::write(path, "theirs").unwrap();
            assert!(note().is_ok());
            if geteuid().is_root() {
                std::os::unix::fs::chown(path, Some(65_534), None).unwrap();
                assert!(matches!(note(), Err(LandedError::Owner { .. })));
            }
        });
    }
}
