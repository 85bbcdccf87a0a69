//! CPU affinity of a thread.

use std::fmt;

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// Numbers of CPUs, ascending.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpus(Vec<usize>);

impl Cpus {
    /// Returns the CPUs that a thread (a host thread id; 0 for the caller) may run on.
    pub(super) fn of(thread: i32) -> Result<Self, Errno> {
        let set = sched_getaffinity(Pid::from_raw(thread))?;
        let is_in = |cpu: &usize| set.is_set(*cpu).unwrap_or(false);
        Ok(Self((0..CpuSet::count()).filter(is_in).collect()))
    }

    /// Restricts a thread to these CPUs.
    pub(super) fn give_to(&self, thread: i32) -> Result<(), Errno> {
        let mut set = CpuSet::new();
        for cpu in &self.0 {
            set.set(*cpu)?;
        }
        sched_setaffinity(Pid::from_raw(thread), &set)
    }
}

impl fmt::Display for Cpus {
    /// Formats the list as `taskset --cpu-list` accepts it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<String> = self
            .0
            .chunk_by(|one, next| one + 1 == *next)
            .map(|range| match (range[0], range[range.len() - 1]) {
                (first, last) if first == last => first.to_string(),
                (first, last) => format!("{first}-{last}"),
            })
            .collect();
        f.write_str(&ranges.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_written_as_ranges() {
        let text = |cpus: &[usize]| Cpus(cpus.to_vec()).to_string();
        assert_eq!(text(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(text(&[3]), "3");
        assert_eq!(text(&[]), "");
    }

    #[test]
    fn cpus_that_the_machine_lacks_are_omitted() {
        let test = || {
            let machine = Cpus::of(0).unwrap();
            let first = machine.0[0];
            // No machine has this CPU.
            let beyond = CpuSet::count() - 1;
            Cpus(vec![first, beyond]).give_to(0).unwrap();
            assert_eq!(Cpus::of(0).unwrap(), Cpus(vec![first]));
            assert_eq!(Cpus(vec![beyond]).give_to(0), Err(Errno::EINVAL));
        };
        std::thread::spawn(test).join().unwrap();
    }
}
