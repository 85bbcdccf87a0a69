//! CPU time of a job's processes, read from `/proc`: shows if the job computes, and how fast.

use std::time::Duration;

use procfs::process::Process as ProcessEntry;

use super::tree::Process;

/// Returns the CPU time of the processes and of their reaped children, with the kernel's resolution of one tick (10
/// ms). The time never decreases, unless a process outside the tree adopts one of its processes.
#[must_use]
pub fn cpu_time(processes: &[Process]) -> Duration {
    let ticks = |process: &Process| {
        let stat = ProcessEntry::new(process.host_pid).and_then(|entry| entry.stat());
        stat.map_or(0, |stat| {
            let waited_for = stat.cutime.max(0).unsigned_abs() + stat.cstime.max(0).unsigned_abs();
            stat.utime + stat.stime + waited_for
        })
    };
    let ticks: u64 = processes.iter().map(ticks).sum();
    let in_a_second = procfs::ticks_per_second().max(1);
    Duration::from_millis(ticks.saturating_mul(1000) / in_a_second)
}

#[cfg(test)]
mod tests {
    use super::super::tree::tree;
    use super::*;

    #[test]
    fn a_busy_child_uses_time_and_an_idle_one_does_not() {
        let used = |program: &[&str], seconds| {
            let mut child = std::process::Command::new(program[0])
                .args(&program[1..])
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            let begun = crate::clock::now();
            let mut used = Duration::ZERO;
            while used < Duration::from_millis(50) && begun.elapsed() < Duration::from_secs(seconds)
            {
                used = cpu_time(&tree(pid).unwrap());
            }
            child.kill().unwrap();
            child.wait().unwrap();
            used
        };
        assert!(used(&["yes"], 60) >= Duration::from_millis(50));
        assert!(used(&["sleep", "100"], 1) < Duration::from_millis(50));
    }
}
