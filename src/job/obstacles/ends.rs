//! Ends of processes that CRIU (4.2) restores differently: it keeps seven bits of the exit code of a process that was not
//! waited for, and each restored process tells its parent of its end by SIGCHLD.

use nix::sys::signal::Signal;
use procfs::process::Stat;

use super::{Finding, Obstacle};
use crate::job::tree::Process;

/// Smallest exit code of which a restored zombie lacks a bit.
const EXIT_CODE_MIN: i32 = 128;

/// Searches for the first such process.
pub(super) fn find(processes: &[(Process, Stat)]) -> Option<Obstacle> {
    processes
        .iter()
        .find_map(|(process, stat)| Some(Obstacle::of(process, lost(stat)?)))
}

fn lost(stat: &Stat) -> Option<Finding> {
    if stat.state == 'Z' {
        let code = stat.exit_code? >> 8;
        return (code >= EXIT_CODE_MIN).then_some(Finding::Zombie(code));
    }
    let signal = stat.exit_signal.unwrap_or(Signal::SIGCHLD as i32);
    (signal != Signal::SIGCHLD as i32).then_some(Finding::ExitSignal(signal))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::job::tree::{describe, stat};

    #[test]
    fn exit_codes_of_eight_bits_are_found() {
        for (script, expected) in [
            ("exit 127", None),
            ("exit 128", Some(Finding::Zombie(128))),
            ("kill -KILL $$", None),
        ] {
            let mut child = Command::new("sh").args(["-c", script]).spawn().unwrap();
            let process = describe(i32::try_from(child.id()).unwrap()).unwrap();
            let over = loop {
                let stat = stat(process.host_pid).unwrap();
                if stat.state == 'Z' {
                    break stat;
                }
                std::thread::yield_now();
            };
            let found = find(&[(process, over)]).map(|found| found.finding);
            assert_eq!(found, expected, "{script}");
            child.wait().unwrap();
        }
        let mut own = stat(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(lost(&own), None);
        own.exit_signal = Some(10);
        assert_eq!(lost(&own), Some(Finding::ExitSignal(10)));
    }
}
