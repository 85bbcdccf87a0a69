//! Open files that CRIU (4.2) opens again, but which are not the same then.
//!
//! - A program of which the job has an `O_PATH` descriptor: CRIU takes the program of the process from that descriptor, and
//!   the kernel refuses it (`PR_SET_MM_EXE_FILE`, EBADF).
//! - Triggers of pressure: the kernel forgets what was written, and reports an error at once.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

use nix::fcntl::OFlag;

use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptor, Descriptors};
use crate::job::files::flags;

/// Searches for the first such file.
pub(super) fn find(open: &[Descriptors]) -> Option<Obstacle> {
    let with = |one: &Descriptor, flag| flags(one).is_ok_and(|flags| flags.contains(flag));
    let mut programs = None;
    open.iter().find_map(|of| {
        let mut files = of.all.iter().filter(|one| one.target.is_absolute());
        let finding = files.find_map(|one| {
            let is_writable = || with(one, OFlag::O_WRONLY) || with(one, OFlag::O_RDWR);
            if is_of_pressure(one) && is_writable() {
                return Some(Finding::PressureTrigger(one.number));
            }
            let about = one.metadata().filter(|about| about.is_file())?;
            let programs = programs.get_or_insert_with(|| programs_of(open));
            (programs.contains(&(about.dev(), about.ino())) && with(one, OFlag::O_PATH))
                .then_some(Finding::PathOfProgram(one.number))
        })?;
        Some(Obstacle::of(&of.process, finding))
    })
}

/// Returns device and inode of the programs that the processes run.
fn programs_of(open: &[Descriptors]) -> HashSet<(u64, u64)> {
    let of = |one: &Descriptors| fs::metadata(format!("/proc/{}/exe", one.process.host_pid)).ok();
    let programs = open.iter().filter_map(of);
    programs.map(|about| (about.dev(), about.ino())).collect()
}

fn is_of_pressure(descriptor: &Descriptor) -> bool {
    let name = descriptor.target.file_name().and_then(|name| name.to_str());
    descriptor.target.starts_with("/proc/pressure")
        || descriptor.target.starts_with("/sys/fs/cgroup")
            && name.is_some_and(|name| name.ends_with(".pressure"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn a_path_of_the_own_program_is_found() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let program = std::env::current_exe().unwrap();
        let found = || find(&[Descriptors::of(pid).unwrap()]).map(|found| found.finding);
        let read = File::open(&program).unwrap();
        assert_eq!(found(), None);
        let mut options = File::options();
        let options = options.read(true).custom_flags(nix::libc::O_PATH);
        let path = options.open(&program).unwrap();
        assert_eq!(found(), Some(Finding::PathOfProgram(path.as_raw_fd())));
        drop((read, path));
    }
}
