//! Mounts that the job has made in its sandbox. A restore begins in a fresh sandbox, which does not have them: paths would
//! lead to other files.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use procfs::ProcResult;
use procfs::process::{MountInfo, Process};

/// Folders in which the sandbox mounts file systems of its own.
const SANDBOXS_OWN: [&str; 2] = ["/proc", "/dev"];

/// Returns a mount point of the sandbox whose pid 1 has this host pid, if the mount is not the machine's.
///
/// # Errors
/// A list of mounts cannot be read.
pub fn own_mount(sandbox: i32) -> ProcResult<Option<PathBuf>> {
    let machines = Process::myself()?.mountinfo()?;
    let jobs = Process::new(sandbox)?.mountinfo()?;
    Ok(difference(machines, jobs))
}

fn difference(
    machines: impl IntoIterator<Item = MountInfo>,
    jobs: impl IntoIterator<Item = MountInfo>,
) -> Option<PathBuf> {
    let about = |mount: MountInfo| (mount.mount_point, mount.majmin, mount.root);
    let known: HashSet<_> = machines.into_iter().map(about).collect();
    let mut own = jobs
        .into_iter()
        .map(about)
        .filter(|(path, ..)| !is_sandboxs(path));
    own.find(|mount| !known.contains(mount))
        .map(|(path, ..)| path)
}

fn is_sandboxs(path: &Path) -> bool {
    SANDBOXS_OWN.iter().any(|folder| path.starts_with(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts() -> Vec<MountInfo> {
        let mounts = Process::myself().unwrap().mountinfo().unwrap();
        mounts.into_iter().collect()
    }

    #[test]
    fn a_mount_of_the_job_is_found_and_those_of_the_sandbox_are_not() {
        assert_eq!(difference(mounts(), mounts()), None);
        let mut jobs = mounts();
        jobs[0].mount_point = "/dev/pts".into();
        jobs[0].majmin = "0:9999".to_owned();
        assert_eq!(difference(mounts(), jobs.clone()), None);
        jobs[0].mount_point = "/work/scratch".into();
        assert_eq!(difference(mounts(), jobs), Some("/work/scratch".into()));
    }
}
