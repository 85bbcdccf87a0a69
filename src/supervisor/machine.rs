//! What this machine is and has free.

use std::fs;

use procfs::{Current, Meminfo};

use super::image::CudaFacts;
use crate::cuda;

/// Host memory that can still be had, bytes: the machine's, or what the cgroup leaves. 0 when unknown.
pub(super) fn available_memory() -> u64 {
    let machine = Meminfo::current()
        .ok()
        .and_then(|info| info.mem_available)
        .unwrap_or(0);
    machine.min(cgroup_headroom().unwrap_or(u64::MAX))
}

/// What the memory cgroup leaves, v2 then v1; `None` without a limit.
fn cgroup_headroom() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let (folder, limit, usage) = if number == "0" {
            (
                format!("/sys/fs/cgroup{path}"),
                "memory.max",
                "memory.current",
            )
        } else if controllers.split(',').any(|one| one == "memory") {
            (
                format!("/sys/fs/cgroup/memory{path}"),
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        } else {
            return None;
        };
        let read = |name: &str| {
            fs::read_to_string(format!("{folder}/{name}"))
                .ok()?
                .trim()
                .parse::<u64>()
                .ok()
        };
        Some(read(limit)?.saturating_sub(read(usage)?))
    })
}

/// The machine's name; empty when it has none.
pub(super) fn host_name() -> String {
    nix::unistd::gethostname()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// The kernel's release; empty when unknown.
pub(super) fn kernel_release() -> String {
    nix::sys::utsname::uname()
        .map(|about| about.release().to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Driver and GPUs; no pids.
pub(super) fn cuda_facts() -> CudaFacts {
    let inventory = cuda::inventory().unwrap_or_default();
    CudaFacts {
        driver: inventory.driver.unwrap_or_default(),
        gpus: inventory.gpus.into_iter().map(|gpu| gpu.uuid).collect(),
        pids: Vec::new(),
    }
}

/// Device memory in use on all GPUs, by whomever, bytes: the most that a job can have there.
pub(super) fn gpu_memory_in_use() -> u64 {
    let gpus = cuda::inventory().unwrap_or_default().gpus;
    let memory = gpus.into_iter().filter_map(|gpu| gpu.memory);
    memory
        .map(|memory| memory.total_bytes.saturating_sub(memory.free_bytes))
        .sum()
}

/// Gives the memory of a snapshot's threads back to the system: the supervisor is small between events.
#[allow(unsafe_code, reason = "glibc's call has no safe wrapper")]
pub(super) fn return_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: has no preconditions; it locks what it touches.
    unsafe {
        nix::libc::malloc_trim(0);
    }
}
