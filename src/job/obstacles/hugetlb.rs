//! Private memory from the kernel's pool of huge pages (`MAP_HUGETLB`, `glibc.malloc.hugetlb=2`).
//!
//! Forked processes share such pages until one of them writes. CRIU gives each process separate pages, so an image may
//! need more huge pages than the machine has.

use std::collections::BTreeMap;
use std::fs;

use procfs::process::{MMPermissions, MemoryMap, VmFlags};

use super::{Finding, Obstacle};
use crate::job::tree::{self, Process};

/// Folder with an entry for each size of huge pages.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// Bytes by size of huge page, in KiB.
type Needs = BTreeMap<u64, u64>;

/// Returns true if one of `processes` has memory from the kernel's pool of huge pages.
#[must_use]
pub fn have_huge_pages(processes: &[Process]) -> bool {
    processes.iter().any(has_some)
}

fn has_some(process: &Process) -> bool {
    tree::status(process.host_pid)
        .is_ok_and(|status| status.hugetlbpages.is_some_and(|kib| kib > 0))
}

/// Searches for processes whose huge pages could not be restored. The kernel checks each page of a process for this, so
/// the search does not run while the job is frozen.
pub(super) fn find(processes: &[Process]) -> Option<Obstacle> {
    let mut needs = Needs::new();
    for process in processes.iter().filter(|one| has_some(one)) {
        let Ok(maps) = tree::smaps(process.host_pid) else {
            continue;
        };
        for map in &maps {
            add(&mut needs, map);
        }
        if let Some((kib, needed, pool)) = excess(&needs, pool) {
            let finding = Finding::HugePages { kib, needed, pool };
            return Some(Obstacle::of(process, finding));
        }
    }
    None
}

fn add(needs: &mut Needs, map: &MemoryMap) {
    let of = |key| map.extension.map.get(key).copied().unwrap_or(0);
    let flags = map.extension.vm_flags;
    if !flags.contains(VmFlags::HT) || !map.perms.contains(MMPermissions::PRIVATE) {
        return;
    }
    // The kernel reserves pages for the whole mapping when it is created, unless MAP_NORESERVE is set.
    let bytes = if flags.contains(VmFlags::NR) {
        of("Private_Hugetlb") + of("Shared_Hugetlb")
    } else {
        map.address.1 - map.address.0
    };
    *needs.entry(of("KernelPageSize") >> 10).or_default() += bytes;
}

/// Returns the first size with too few pages: KiB, number of pages needed, and number available.
fn excess(needs: &Needs, pool: impl Fn(u64) -> Option<u64>) -> Option<(u64, u64, u64)> {
    needs.iter().find_map(|(kib, bytes)| {
        let needed = bytes.div_ceil((kib << 10).max(1));
        let pool = pool(*kib)?;
        (needed > pool).then_some((*kib, needed, pool))
    })
}

/// Returns the number of huge pages of a size that the kernel has or may create; `None` if it is not reported.
fn pool(kib: u64) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(format!("{POOLS}/hugepages-{kib}kB/{name}")).ok()?;
        text.trim().parse().ok()
    };
    Some(number("nr_hugepages")? + number("nr_overcommit_hugepages").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_need_beyond_the_kernels_pool_is_found() {
        let pool = |kib| (kib == 2048).then_some(10);
        let needs = |kib, pages: u64| Needs::from([(kib, (pages * kib) << 10)]);
        assert_eq!(excess(&needs(2048, 10), pool), None);
        assert_eq!(excess(&needs(2048, 11), pool), Some((2048, 11, 10)));
        assert_eq!(excess(&needs(1 << 20, 11), pool), None, "not reported");
        assert_eq!(excess(&Needs::new(), pool), None);
    }
}
