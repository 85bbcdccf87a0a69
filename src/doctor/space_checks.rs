//! The checks of the free disk space and memory, and of the access to the store.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access, geteuid};
use procfs::Current;

use super::checks::Check;

/// Minimum free disk space: with less, not even a small process fits into the store.
const DISK_LEAST: u64 = 1 << 30;

/// Minimum free memory: with less, the buffers of a snapshot push the job towards the OOM killer.
const MEMORY_LEAST: u64 = 512 << 20;

/// Mode bits that give access to users other than the owner.
const OTHERS: u32 = 0o077;

/// Runs all checks of this file, for a store that need not exist yet.
pub(crate) fn checks(store: &Path) -> Vec<Check> {
    let memory = procfs::Meminfo::current();
    let total = memory.as_ref().map_or(0, |memory| memory.mem_total);
    let available = memory.ok().and_then(|memory| memory.mem_available);
    let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let in_cgroup = cgroup_headroom(Path::new("/sys/fs/cgroup"), &cgroups);
    vec![
        disk(store, total),
        memory_check(available, in_cgroup),
        permissions(store),
    ]
}

fn disk(store: &Path, memory_total: u64) -> Check {
    const NAME: &str = "disk";
    const REMEDY: &str = "free space, or choose another --store";
    let found = nearest_existing(store)
        .and_then(|folder| Ok((statvfs(&folder).map_err(io::Error::from)?, folder)));
    let (stat, folder) = match found {
        Ok(found) => found,
        Err(error) => {
            let detail = format!(
                "cannot determine the free space at {}: {error}",
                store.display()
            );
            return Check::problem(NAME, detail, "choose another --store");
        }
    };
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    let detail = format!("{} free at {}", ByteSize(free), folder.display());
    if free < DISK_LEAST {
        Check::problem(NAME, detail, REMEDY)
    } else if free < memory_total {
        let detail = format!("{detail}, less than the memory that a job may use");
        Check::note(NAME, detail, REMEDY)
    } else {
        Check::ok(NAME, detail)
    }
}

fn memory_check(available: Option<u64>, in_cgroup: Option<u64>) -> Check {
    const NAME: &str = "memory";
    let Some(available) = available else {
        return Check::note(NAME, "MemAvailable unknown", "mount /proc");
    };
    let (free, limit) = match in_cgroup {
        Some(room) if room < available => (room, "within the cgroup's limit"),
        Some(_) | None => (available, "available"),
    };
    let detail = format!("{} {limit}", ByteSize(free));
    if free < MEMORY_LEAST {
        return Check::problem(
            NAME,
            detail,
            "free memory, or raise the limit of the cgroup",
        );
    }
    Check::ok(
        NAME,
        format!("{detail}; a suspended GPU job needs as much as it uses on the GPU"),
    )
}

/// Returns the least headroom under any memory limit on the path from ckpt-run's cgroup to the root. Page cache that
/// can be dropped counts as headroom. `cgroups` is the text of /proc/self/cgroup.
pub(crate) fn cgroup_headroom(root: &Path, cgroups: &str) -> Option<u64> {
    let lines = cgroups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        Some((parts.next()?, parts.next()?))
    });
    lines
        .filter_map(|(controllers, path)| {
            if controllers.is_empty() {
                Some((root.to_owned(), path, &V2))
            } else {
                let memory = controllers.split(',').any(|name| name == "memory");
                memory.then(|| (root.join("memory"), path, &V1))
            }
        })
        .flat_map(|(base, path, names)| {
            // A cgroup namespace shows cgroups above its root as `..`; those are not visible here.
            let path = path.trim_start_matches('/');
            let start = if path.contains("..") {
                base.clone()
            } else {
                base.join(path)
            };
            let folders: Vec<PathBuf> = start
                .ancestors()
                .take_while(|f| f.starts_with(&base))
                .map(Path::to_owned)
                .collect();
            folders
                .into_iter()
                .filter_map(|folder| headroom_in(&folder, names))
        })
        .min()
}

/// Names of the memory controller's files.
struct Names {
    limit: &'static str,
    usage: &'static str,
    cache: &'static str,
}

const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: "total_inactive_file ",
};

const V2: Names = Names {
    limit: "memory.max",
    usage: "memory.current",
    cache: "inactive_file ",
};

/// Returns the headroom of one cgroup; `None` if it has no limit.
fn headroom_in(folder: &Path, names: &Names) -> Option<u64> {
    let number = |name| {
        fs::read_to_string(folder.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let limit = number(names.limit)?;
    let usage = number(names.usage)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cache = stat
        .lines()
        .find_map(|line| line.strip_prefix(names.cache)?.parse().ok());
    Some(limit.saturating_sub(usage.saturating_sub(cache.unwrap_or(0))))
}

fn permissions(store: &Path) -> Check {
    const NAME: &str = "store";
    let place = store.display();
    match fs::metadata(store) {
        Ok(meta) if !meta.is_dir() => {
            let detail = format!("{place} is not a folder");
            Check::problem(NAME, detail, "choose another --store")
        }
        Ok(meta) if meta.uid() != geteuid().as_raw() => {
            let detail = format!("{place} belongs to user {}", meta.uid());
            Check::problem(NAME, detail, format!("run as that user, or chown {place}"))
        }
        Ok(meta) if meta.mode() & OTHERS != 0 => {
            let detail =
                format!("{place} is open to other users, and images contain the job's secrets");
            Check::problem(NAME, detail, format!("chmod 700 {place}"))
        }
        Ok(_) => writable(store, format!("{place} is private")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match nearest_existing(store) {
            Ok(parent) => writable(&parent, format!("{place} will be created")),
            Err(error) => {
                let detail = format!("cannot check {place}: {error}");
                Check::problem(NAME, detail, "choose another --store")
            }
        },
        Err(error) => {
            let detail = format!("cannot read {place}: {error}");
            Check::problem(NAME, detail, "choose another --store")
        }
    }
}

fn writable(folder: &Path, otherwise: String) -> Check {
    const NAME: &str = "store";
    match access(folder, AccessFlags::W_OK | AccessFlags::X_OK) {
        Ok(()) => Check::ok(NAME, otherwise),
        Err(errno) => {
            let detail = format!("cannot write to {}: {}", folder.display(), errno.desc());
            Check::problem(NAME, detail, "choose another --store")
        }
    }
}

/// Returns the store's folder if it exists, otherwise the closest existing parent in which it would be created.
fn nearest_existing(store: &Path) -> io::Result<PathBuf> {
    let store = std::path::absolute(store)?;
    let existing = store.ancestors().find(|folder| folder.exists());
    Ok(existing.unwrap_or(Path::new("/")).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::checks::Status;
    use std::os::unix::fs::PermissionsExt;

    fn put(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
    }

    #[test]
    fn tightest_cgroup_on_the_way_up_counts() {
        let root = tempfile::tempdir().unwrap();
        put(
            &root.path().join("a"),
            &[("memory.max", "3000\n"), ("memory.current", "2500\n")],
        );
        put(
            &root.path().join("a/b"),
            &[("memory.max", "max\n"), ("memory.current", "100\n")],
        );
        put(
            &root.path().join("other"),
            &[("memory.max", "1\n"), ("memory.current", "1\n")],
        );
        assert_eq!(cgroup_headroom(root.path(), "0::/a/b\n"), Some(500));
        assert_eq!(cgroup_headroom(root.path(), "0::/\n"), None);
    }

    #[test]
    fn cache_that_can_be_dropped_is_room() {
        let root = tempfile::tempdir().unwrap();
        let files = [
            ("memory.limit_in_bytes", "1000\n"),
            ("memory.usage_in_bytes", "900\n"),
            (
                "memory.stat",
                "cache 700\ninactive_file 1\ntotal_inactive_file 600\n",
            ),
        ];
        put(&root.path().join("memory/job"), &files);
        let cgroups = "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n";
        assert_eq!(cgroup_headroom(root.path(), cgroups), Some(700));
    }

    #[test]
    fn strange_cgroup_text_is_survived() {
        let root = tempfile::tempdir().unwrap();
        put(
            root.path(),
            &[("memory.max", "10"), ("memory.current", "50")],
        );
        assert_eq!(cgroup_headroom(root.path(), "0::/../../x\n"), Some(0));
        assert_eq!(cgroup_headroom(root.path(), "nonsense\n\n::\n"), Some(0));
        assert_eq!(cgroup_headroom(root.path(), ""), None);
    }

    #[test]
    fn headroom_below_the_cgroup_limit_counts() {
        assert_eq!(
            memory_check(Some(8 << 30), Some(1 << 20)).status,
            Status::Problem
        );
        assert_eq!(
            memory_check(Some(8 << 30), Some(u64::MAX)).status,
            Status::Ok
        );
        assert_eq!(memory_check(Some(1 << 20), None).status, Status::Problem);
        assert_eq!(memory_check(None, None).status, Status::Note);
    }

    #[test]
    fn disk_smaller_than_memory_is_noted() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(disk(dir.path(), u64::MAX).status, Status::Note);
        assert_eq!(
            disk(&dir.path().join("not/yet/there"), 0).status,
            Status::Ok
        );
    }

    #[test]
    fn store_open_to_others_is_a_problem() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o750)).unwrap();
        let check = permissions(dir.path());
        assert_eq!(check.status, Status::Problem);
        assert!(check.remedy.unwrap().starts_with("chmod 700"));
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(permissions(dir.path()).status, Status::Ok);
    }

    #[test]
    fn store_that_is_a_file_or_below_one_is_a_problem() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(permissions(&file).status, Status::Problem);
        assert_eq!(permissions(&file.join("store")).status, Status::Problem);
    }

    #[test]
    fn store_not_yet_made_is_fine_where_its_parent_is_writable() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(permissions(&dir.path().join("a/b")).status, Status::Ok);
    }
}
