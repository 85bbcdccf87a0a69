//! Mappings and programs that CRIU (4.2) cannot dump or restore.
//!
//! - The kernel's data (`[vvar]`) without its code (`[vdso]`), as Valgrind leaves it: a restore that finds the data looks for
//!   the code, too, because the kernel's pair may be at another address (`vdso_proxify`: "Can't find vDSO area in image"). A
//!   process that has unmapped both is restored.
//! - A read-only mapping of a sealed memfd: CRIU maps it by a descriptor for writing before it adds the seals, and the
//!   kernel refuses to seal (`F_SEAL_WRITE`) what can be mapped for writing.
//! - A program that was executed from a memfd ("No entry for reg-file-ID").
//! - A System V segment that is mapped in part ("Sysv shmem with a hole not supported").
//! - A file of which CRIU finds no name.
//! - Locked memory with guard pages (`MADV_GUARD_INSTALL`): a restore locks it first, and the kernel refuses the guards then.
//! - Without root, a System V segment in two mappings side by side: CRIU takes the second one for memory without a segment.
//!
//! They are searched before the freeze only: programs make such mappings when they start.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::unistd::geteuid;
use procfs::process::{MMPermissions, MMapPath, MemoryMap};

use super::{Finding, Obstacle};
use crate::job::descriptors::is_memfd;
use crate::job::files::{is_deleted, path_without_names};
use crate::job::nodes::map_link;
use crate::job::tree::{self, Process};

/// Searches for the first such mapping. A process that has exited has none.
pub(super) fn find(processes: &[Process]) -> Option<Obstacle> {
    processes.iter().find_map(|process| {
        let maps: Vec<MemoryMap> = tree::maps(process.host_pid).ok()?.into_iter().collect();
        let is_sealed = |map| is_sealed(process.host_pid, map);
        let finding = if lacks_code(&maps) {
            Finding::NoVdso
        } else if maps.iter().any(is_sealed) {
            Finding::SealedMapping
        } else if has_locked_guards(process.host_pid) {
            Finding::LockedGuards
        } else if is_from_memory(process) {
            Finding::MemoryProgram
        } else if has_part_of_segment(&maps) {
            Finding::SegmentPart
        } else if !geteuid().is_root() && maps.windows(2).any(are_of_one_segment) {
            Finding::SplitSegment
        } else {
            let mut files = maps.iter();
            files.find_map(|map| name_elsewhere(process.host_pid, map))?
        };
        Some(Obstacle::of(process, finding))
    })
}

fn lacks_code(maps: &[MemoryMap]) -> bool {
    let have = |part| maps.iter().any(|map| map.pathname == part);
    have(MMapPath::Vvar) && !have(MMapPath::Vdso)
}

fn name_elsewhere(pid: i32, map: &MemoryMap) -> Option<Finding> {
    let MMapPath::Path(path) = &map.pathname else {
        return None;
    };
    let about = is_deleted(path).then(|| map_link(pid, map).metadata())?;
    path_without_names(path, &about.ok()?).map(Finding::NameElsewhere)
}

/// Kernels before 6.18 do not show which memory has guard pages.
fn has_locked_guards(pid: i32) -> bool {
    let has_locked = tree::status(pid).is_ok_and(|status| status.vmlck.is_some_and(|kib| kib > 0));
    has_locked
        && fs::read_to_string(format!("/proc/{pid}/smaps")).is_ok_and(|text| {
            let mut flags = text
                .lines()
                .filter_map(|line| line.strip_prefix("VmFlags:"));
            flags.any(|flags| {
                ["lo", "gu"]
                    .iter()
                    .all(|one| flags.split(' ').any(|it| it == *one))
            })
        })
}

fn is_from_memory(process: &Process) -> bool {
    let program = fs::read_link(format!("/proc/{}/exe", process.host_pid));
    program.is_ok_and(|program| is_memfd(&program))
}

/// Returns true if a segment is mapped from a place behind its beginning, and what is before that is not mapped before it.
fn has_part_of_segment(maps: &[MemoryMap]) -> bool {
    let is_inside = |map: &MemoryMap| matches!(map.pathname, MMapPath::Vsys(_)) && map.offset != 0;
    let continues = |number: usize| {
        let pair = number
            .checked_sub(1)
            .and_then(|left| maps.get(left..=number));
        pair.is_some_and(are_of_one_segment)
    };
    let mut numbered = maps.iter().enumerate();
    numbered.any(|(number, map)| is_inside(map) && !continues(number))
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
    let is_memfd = matches!(&map.pathname, MMapPath::Path(path) if is_memfd(path));
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

#[cfg(test)]
mod tests {
    use procfs::FromBufRead;
    use procfs::process::MemoryMaps;

    use super::*;

    #[test]
    fn a_part_of_a_segment_is_found() {
        let has_part = |lines: &[(u64, u64, u64)]| {
            let line = |(from, to, offset): &(u64, u64, u64)| {
                format!(
                    "{from:08x}-{to:08x} rw-s {offset:08x} 00:01 7    /SYSV00000000 (deleted)\n"
                )
            };
            let text: String = lines.iter().map(line).collect();
            let maps = MemoryMaps::from_buf_read(text.as_bytes()).unwrap();
            has_part_of_segment(&maps.into_iter().collect::<Vec<_>>())
        };
        assert!(!has_part(&[(0x1000, 0x3000, 0), (0x5000, 0x7000, 0)]));
        assert!(
            !has_part(&[(0x1000, 0x2000, 0), (0x2000, 0x3000, 0x1000)]),
            "mprotect"
        );
        assert!(
            has_part(&[(0x1000, 0x2000, 0), (0x3000, 0x4000, 0x2000)]),
            "a hole"
        );
        assert!(has_part(&[(0x2000, 0x3000, 0x1000)]), "the beginning");
    }

    #[test]
    fn data_without_code_is_found() {
        let line =
            |name: &&str| format!("7ffc6d5e2000-7ffc6d5e6000 r--p 00000000 00:00 0    {name}\n");
        let lacks = |names: &[&str]| {
            let text: String = names.iter().map(line).collect();
            let maps = MemoryMaps::from_buf_read(text.as_bytes()).unwrap();
            lacks_code(&maps.into_iter().collect::<Vec<_>>())
        };
        assert!(lacks(&["[stack]", "[vvar]"]));
        assert!(lacks(&["[vvar]", "/x[vdso]"]));
        for names in [&["[vvar]", "[vdso]"][..], &["[vdso]"], &["[stack]"], &[]] {
            assert!(!lacks(names), "{names:?}");
        }
        let me = i32::try_from(std::process::id()).unwrap();
        let own = tree::maps(me).unwrap().into_iter();
        assert!(!lacks_code(&own.collect::<Vec<_>>()));
    }
}
