//! Holders of locks on folders in which CRIU makes links (`links`).

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Returns true if a ckpt-run of this user seems to hold the lock on a folder. The check relies on the program's name,
/// which any process can have. The user is read from `status`: the files in `/proc` of an undumpable process are
/// root's.
pub(super) fn is_held_by_ckpt_run(folder: &File) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Command, Stdio};

    use nix::fcntl::{Flock, FlockArg};

    #[test]
    fn the_lock_of_a_ckpt_run_of_this_user_is_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let open = || File::open(folder.path()).unwrap();
        assert!(!is_held_by_ckpt_run(&open()));
        let held = Flock::lock(open(), FlockArg::LockExclusive).unwrap();
        assert!(is_held_by_ckpt_run(&open()), "this process has our name");
        drop(held);
        let mut other = Command::new("flock");
        // `exec` avoids a fork, so that the kill ends the holder.
        let script = ["sh", "-c", "echo; exec sleep 1000"];
        other.arg("--no-fork").arg(folder.path()).args(script);
        let mut other = other.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = [0];
        other.stdout.take().unwrap().read_exact(&mut line).unwrap();
        assert!(!is_held_by_ckpt_run(&open()));
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
