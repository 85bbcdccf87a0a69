//! The properties and free resources of this machine.

use std::fs;
use std::io;
use std::path::Path;

use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::Signal;
use nix::sys::statvfs::statvfs;
use procfs::{Current, Meminfo};

use crate::cuda;

/// Returns the available host memory in bytes: the machine's, or the cgroup's headroom if that is less. Returns 0 if it
/// is unknown.
pub(crate) fn available_memory() -> u64 {
    let machine = Meminfo::current()
        .ok()
        .and_then(|info| info.mem_available)
        .unwrap_or(0);
    machine.min(cgroup_headroom().unwrap_or(u64::MAX))
}

/// Returns the limit on open descriptors of this process; `u64::MAX` if the kernel does not report one.
pub(crate) fn descriptors() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

/// Returns the headroom in the memory cgroup and its ancestors, v2 and v1; `None` without a limit.
fn cgroup_headroom() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    own.lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let (root, names) = if number == "0" {
                (
                    "/sys/fs/cgroup",
                    ["memory.max", "memory.current", "inactive_file"],
                )
            } else if controllers.split(',').any(|one| one == "memory") {
                let names = [
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                ];
                ("/sys/fs/cgroup/memory", names)
            } else {
                return None;
            };
            let relative = Path::new(path.trim_start_matches('/'));
            relative
                .ancestors()
                .filter_map(|folder| headroom_of(&Path::new(root).join(folder), names))
                .min()
        })
        .min()
}

/// Returns the headroom in one cgroup. Inactive page cache counts as headroom because it can be reclaimed.
fn headroom_of(folder: &Path, [limit, usage, cache]: [&str; 3]) -> Option<u64> {
    let read = |name| fs::read_to_string(folder.join(name)).ok();
    let limit: u64 = read(limit)?.trim().parse().ok()?;
    let usage: u64 = read(usage)?.trim().parse().ok()?;
    let statistics = read("memory.stat").unwrap_or_default();
    let cached = statistics
        .lines()
        .find_map(|line| line.strip_prefix(cache)?.trim().parse::<u64>().ok());
    Some(limit.saturating_sub(usage.saturating_sub(cached.unwrap_or(0))))
}

/// Returns the number of bytes that ckpt-run may still write to the disk of a folder.
pub(crate) fn free_disk(folder: &Path) -> io::Result<u64> {
    let about = statvfs(folder)?;
    Ok(about
        .blocks_available()
        .saturating_mul(about.fragment_size()))
}

/// Returns the machine's name; an empty string if it has none.
pub(crate) fn host_name() -> String {
    nix::unistd::gethostname()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Returns the kernel's release; an empty string if it is unknown.
pub(crate) fn kernel_release() -> String {
    nix::sys::utsname::uname()
        .map(|about| about.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Returns the device memory in use by all programs, in bytes: the upper limit for a job.
pub(crate) fn gpu_memory_in_use() -> u64 {
    let gpus = cuda::inventory().unwrap_or_default().gpus;
    let memory = gpus.into_iter().filter_map(|gpu| gpu.memory);
    memory
        .map(|memory| memory.total_bytes.saturating_sub(memory.free_bytes))
        .sum()
}

/// Makes the kernel send SIGTERM to this process when the thread that started it exits.
///
/// # Errors
/// Practically none: the kernel accepts every existing signal.
pub fn end_with_parent() -> io::Result<()> {
    Ok(prctl::set_pdeathsig(Signal::SIGTERM)?)
}

/// Makes the allocator use one heap for all threads: only the main heap can be returned to the system completely.
///
/// The threads of a snapshot allocate little, so they hardly wait for each other.
#[allow(unsafe_code, reason = "glibc's call has no safe wrapper")]
pub(crate) fn use_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number; has no preconditions.
    unsafe {
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1);
    }
}

/// Returns the memory of a snapshot's threads to the system: the supervisor is small between events.
#[allow(unsafe_code, reason = "glibc's call has no safe wrapper")]
pub(crate) fn return_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: has no preconditions; it locks what it touches.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
