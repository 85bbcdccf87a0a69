//! Processes that have unmapped the kernel's code (`[vdso]`) and kept its data (`[vvar]`), as Valgrind does.
//!
//! CRIU (4.2) dumps them. A restore that finds the data looks for the code, too, because the kernel's pair may be at another
//! address, and fails (`vdso_proxify`: "Can't find vDSO area in image"). A process that has unmapped both is restored.
//! The mappings are read before the freeze only: programs unmap the code when they start.

use std::fs;

use super::{Finding, Obstacle};
use crate::job::tree::Process;

/// Searches for the first such process.
pub(super) fn find(processes: &[Process]) -> Option<Obstacle> {
    let lacks = |process: &&Process| {
        // A process that has exited has no mappings.
        let maps = fs::read(format!("/proc/{}/maps", process.host_pid)).unwrap_or_default();
        lacks_code(&maps)
    };
    let process = processes.iter().find(lacks)?;
    Some(Obstacle::of(process, Finding::NoVdso))
}

/// Returns true for the list of such a process (`/proc/PID/maps`). A name is at the end of a line; that of a file begins with
/// a slash.
fn lacks_code(maps: &[u8]) -> bool {
    let has = |name: &[u8]| {
        let mut lines = maps.split(|byte| *byte == b'\n');
        lines.any(|line| line.ends_with(name))
    };
    has(b" [vvar]") && !has(b" [vdso]")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_without_code_is_found() {
        let line =
            |name: &str| format!("7ffc6d5e2000-7ffc6d5e6000 r--p 00000000 00:00 0    {name}\n");
        let maps = |names: &[&str]| names.iter().map(|name| line(name)).collect::<String>();
        assert!(lacks_code(maps(&["[stack]", "[vvar]"]).as_bytes()));
        assert!(lacks_code(maps(&["[vvar]", "/x[vdso]"]).as_bytes()));
        for names in [&["[vvar]", "[vdso]"][..], &["[vdso]"], &["[stack]"], &[]] {
            assert!(!lacks_code(maps(names).as_bytes()), "{names:?}");
        }
        let own = fs::read("/proc/self/maps").unwrap();
        assert!(!lacks_code(&own));
    }
}
