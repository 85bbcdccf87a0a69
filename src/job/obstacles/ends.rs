//! Ends of processes that CRIU (4.2) restores differently:
//! - It keeps seven bits of the exit code of a process that was not waited for, and none of the real-time signals that kill
//!   one. The plugin restores both.
//! - Each restored process tells its parent of its end by SIGCHLD.
//! - A stopped process to which a deadly signal was sent ends at the restore, and not when it continues.

use nix::sys::signal::Signal;
use procfs::process::Stat;
use serde::{Deserialize, Serialize};

use super::{Finding, Obstacle};
use crate::checked;
use crate::job::tree::{Process, is_doomed, stat};

/// Smallest exit code of which CRIU loses a bit.
const EXIT_CODE_MIN: i32 = 128;
/// Bits of a wait status with the signal that ended a process, and the smallest one of these that CRIU does not know.
const SIGNAL_BITS: i32 = 0x7f;
const SIGNAL_MIN: i32 = 32;
/// Limit on such exit codes: the kernel limits a variable to 128 KiB, and each takes up to 12 bytes in the plugin's.
const EXIT_CODES_MAX: usize = 8192;

/// The way in which a process that was not waited for has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitCode {
    /// Pid as the job sees it.
    #[serde(deserialize_with = "checked::pid")]
    pub pid: i32,
    /// The exit code, or the signal.
    pub code: u8,
    /// True if a signal has ended the process.
    #[serde(default)]
    pub by_signal: bool,
}

/// Returns the exit codes and signals that CRIU does not restore.
#[must_use]
pub fn exit_codes(processes: &[Process]) -> Vec<ExitCode> {
    let ended = |process: &Process| {
        let (code, by_signal) = lost_code(&stat(process.host_pid).ok()?)?;
        Some(ExitCode {
            pid: process.pid,
            code,
            by_signal,
        })
    };
    processes.iter().filter_map(ended).collect()
}

/// Searches for the first process whose end cannot be restored.
pub(super) fn find(processes: &[(Process, Stat)]) -> Option<Obstacle> {
    let mut codes = 0;
    processes.iter().find_map(|(process, stat)| {
        codes += usize::from(lost_code(stat).is_some());
        let finding = if codes > EXIT_CODES_MAX {
            Finding::ExitCodes(EXIT_CODES_MAX)
        } else if stat.state == 'T' && is_doomed(process.host_pid) {
            Finding::Doomed
        } else {
            Finding::ExitSignal(other_signal(stat)?)
        };
        Some(Obstacle::of(process, finding))
    })
}

/// Returns the exit code, or the signal (true), of a process that has ended, if CRIU loses a bit of it.
fn lost_code(stat: &Stat) -> Option<(u8, bool)> {
    let status = stat.exit_code.filter(|_| stat.state == 'Z')?;
    let (code, signal) = (status >> 8, status & SIGNAL_BITS);
    let (number, by_signal) = if signal == 0 {
        (code, false)
    } else {
        (signal, true)
    };
    let is_lost = code >= EXIT_CODE_MIN || signal >= SIGNAL_MIN;
    Some((u8::try_from(number).ok().filter(|_| is_lost)?, by_signal))
}

/// Returns the signal of a process that lives, if it is another one.
fn other_signal(stat: &Stat) -> Option<i32> {
    let signal = stat.exit_signal.filter(|_| stat.state != 'Z')?;
    (signal != Signal::SIGCHLD as i32).then_some(signal)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::job::tree::describe;

    #[test]
    fn exit_codes_of_eight_bits_are_found() {
        for (script, expected) in [
            ("exit 127", None),
            ("exit 128", Some(128)),
            ("exit 255", Some(255)),
            ("kill -KILL $$", None),
            ("kill -40 $$", Some(40)),
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
            let found = exit_codes(&[process]);
            let codes: Vec<u8> = found.iter().map(|found| found.code).collect();
            assert_eq!(codes, Vec::from_iter(expected), "{script}");
            let many = vec![(process, over); EXIT_CODES_MAX + 1];
            assert_eq!(find(&many[1..]), None);
            let finding = find(&many).map(|found| found.finding);
            let too_many = expected.map(|_| Finding::ExitCodes(EXIT_CODES_MAX));
            assert_eq!(finding, too_many);
            child.wait().unwrap();
        }
        let mut own = stat(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(other_signal(&own), None);
        own.exit_signal = Some(10);
        assert_eq!(other_signal(&own), Some(10));
    }
}
