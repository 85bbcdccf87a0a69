//! Shared memory in mappings that CRIU (4.2) cannot dump or restore.
//!
//! - A read-only mapping of a sealed memfd: CRIU maps it by a descriptor for writing before it adds the seals, and the
//!   kernel refuses to seal (`F_SEAL_WRITE`) what can be mapped for writing.
//! - Without root, a System V segment in two mappings side by side: CRIU takes the second one for memory without a segment.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::unistd::geteuid;
use procfs::process::{MMPermissions, MMapPath, MemoryMap};

use super::{Finding, Obstacle};
use crate::job::descriptors::Descriptors;
use crate::job::nodes::map_link;
use crate::job::tree;

/// Searches for the first such mapping. A process that has exited has none.
pub(super) fn find(open: &[Descriptors]) -> Option<Obstacle> {
    open.iter().find_map(|one| {
        let maps = tree::maps(one.process.host_pid).ok()?.into_iter();
        let maps: Vec<MemoryMap> = maps.collect();
        let is_sealed = maps.iter().any(|map| is_sealed(one.process.host_pid, map));
        let is_split = || !geteuid().is_root() && maps.windows(2).any(are_of_one_segment);
        let finding = is_sealed.then_some(Finding::SealedMapping);
        let finding = finding.or_else(|| is_split().then_some(Finding::SplitSegment))?;
        Some(Obstacle::of(&one.process, finding))
    })
}

fn are_of_one_segment(pair: &[MemoryMap]) -> bool {
    let [left, right] = pair else {
        return false;
    };
    let is_segment = |map: &MemoryMap| matches!(map.pathname, MMapPath::Vsys(_));
    is_segment(left)
        && is_segment(right)
        && left.inode == right.inode
        && left.address.1 == right.address.0
}

fn is_sealed(pid: i32, map: &MemoryMap) -> bool {
    let is_memfd = matches!(&map.pathname, MMapPath::Path(path) if path.to_string_lossy().starts_with("/memfd:"));
    let only_read =
        map.perms & (MMPermissions::SHARED | MMPermissions::WRITE) == MMPermissions::SHARED;
    if !is_memfd || !only_read {
        return false;
    }
    // This link shows the mode of the descriptor by which the file was mapped. To follow it takes a privilege.
    let (begin, end) = map.address;
    let link = PathBuf::from(format!("/proc/{pid}/map_files/{begin:x}-{end:x}"));
    let is_for_writing =
        fs::symlink_metadata(link).is_ok_and(|link| link.permissions().mode() & 0o200 != 0);
    is_for_writing && File::open(map_link(pid, map)).is_ok_and(|file| may_not_be_written(&file))
}

fn may_not_be_written(file: &File) -> bool {
    let seals = fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_truncate);
    seals.is_ok_and(|seals| seals.contains(SealFlag::F_SEAL_WRITE))
}
