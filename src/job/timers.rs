#![allow(
    unsafe_code,
    reason = "a descriptor of another process, an ioctl that nix does not have"
)]
//! Periodic timers (`timerfd`) with unread expirations at a snapshot.
//!
//! The kernel stops such a timer until its owner reads it, and reports no time left. CRIU (4.2) treats it as disarmed,
//! and it would never expire again after a restore. Therefore these timers are recorded and armed again after a
//! restore.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::libc;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{Expiration, TimerFd, TimerSetTimeFlags};
use serde::{Deserialize, Serialize};

use super::descriptors::Descriptors;
use super::tree::Process;
use crate::checked;

nix::ioctl_write_ptr!(
    /// Sets the number of unread expirations of a timer (`TFD_IOC_SET_TICKS`).
    set_ticks, b'T', 0, u64
);

/// A timer with unread expirations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timer {
    /// Pid as the job sees it.
    #[serde(deserialize_with = "checked::pid")]
    pub pid: i32,
    /// The timer's descriptor in that process.
    #[serde(deserialize_with = "checked::descriptor")]
    pub descriptor: i32,
}

/// Reasons why a timer could not be armed again.
#[derive(Debug, thiserror::Error)]
pub enum TimersError {
    /// A restored timer is stopped and cannot be armed.
    #[error("cannot start timer {descriptor} of process {pid} again")]
    Arm {
        /// Pid as the host sees it.
        pid: i32,
        /// The timer's descriptor in that process.
        descriptor: i32,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// Lists the periodic timers of frozen processes with unread expirations.
#[must_use]
pub fn rung_timers(open: &[Descriptors]) -> Vec<Timer> {
    let mut found = Vec::new();
    for Descriptors { process, all } in open {
        for descriptor in all.iter().filter(|one| one.is_kernels("timerfd")) {
            let text = descriptor.present_info().unwrap_or_default();
            if State::parse(&text).is_some_and(|state| state.stopped() && state.ticks > 0) {
                found.push(Timer {
                    pid: process.pid,
                    descriptor: descriptor.number,
                });
            }
        }
    }
    found
}

/// Arms these timers again in the restored `processes`. They next expire after one period.
///
/// # Errors
/// The first timer that cannot be armed.
pub fn arm_timers(timers: &[Timer], processes: &[Process]) -> Result<(), TimersError> {
    for timer in timers {
        for process in processes.iter().filter(|process| process.pid == timer.pid) {
            let (pid, descriptor) = (process.host_pid, timer.descriptor);
            arm(pid, descriptor).map_err(|source| TimersError::Arm {
                pid,
                descriptor,
                source,
            })?;
        }
    }
    Ok(())
}

/// The state of a timer in `/proc`; seconds and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    ticks: u64,
    left: (i64, i64),
    period: (i64, i64),
}

impl State {
    fn stopped(&self) -> bool {
        self.left == (0, 0) && self.period != (0, 0)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let field = |name| {
            Some(
                text.lines()
                    .find_map(|line| line.strip_prefix(name))?
                    .trim(),
            )
        };
        let pair = |name| {
            let text = field(name)?.strip_prefix('(')?.strip_suffix(')')?;
            let (seconds, nanoseconds) = text.split_once(',')?;
            Some((
                seconds.trim().parse().ok()?,
                nanoseconds.trim().parse().ok()?,
            ))
        };
        Some(Self {
            ticks: field("ticks:")?.parse().ok()?,
            left: pair("it_value:")?,
            period: pair("it_interval:")?,
        })
    }
}

fn state(pid: i32, descriptor: i32) -> io::Result<State> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}"))?;
    State::parse(&text).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn arm(pid: i32, descriptor: i32) -> io::Result<()> {
    let state = state(pid, descriptor)?;
    // The owner has already armed the timer, or another descriptor for it was handled before.
    if !state.stopped() {
        return Ok(());
    }
    let borrowed = borrow(pid, descriptor)?;
    // SAFETY: this process alone owns the descriptor, and hands it over.
    let timer = unsafe { TimerFd::from_raw_fd(borrowed.into_raw_fd()) };
    let period = TimeSpec::new(state.period.0, state.period.1);
    timer.set(
        Expiration::IntervalDelayed(period, period),
        TimerSetTimeFlags::empty(),
    )?;
    if state.ticks > 0 {
        // SAFETY: the kernel reads one u64 from a valid pointer.
        unsafe { set_ticks(timer.as_fd().as_raw_fd(), &raw const state.ticks) }?;
    }
    Ok(())
}

/// Duplicates a descriptor of another process into this one (`pidfd_getfd`, Linux 5.6).
fn borrow(pid: i32, descriptor: i32) -> io::Result<OwnedFd> {
    // SAFETY: plain system call with integer arguments.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: as above.
    own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), descriptor, 0) })
}

fn own(result: libc::c_long) -> io::Result<OwnedFd> {
    let number = RawFd::try_from(Errno::result(result)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has just installed this descriptor for this process; it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sys::timerfd::{ClockId, TimerFlags};

    #[test]
    fn a_timer_with_unread_expirations_is_recorded() {
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC).unwrap();
        let descriptor = timer.as_fd().as_raw_fd();
        let pid = i32::try_from(std::process::id()).unwrap();
        let rung = || rung_timers(&[Descriptors::of(pid).unwrap()]);
        let mine = Timer { pid, descriptor };
        assert!(!rung().contains(&mine));
        let period = TimeSpec::new(0, 1_000_000);
        timer
            .set(Expiration::Interval(period), TimerSetTimeFlags::empty())
            .unwrap();
        let mut watched = [PollFd::new(timer.as_fd(), PollFlags::POLLIN)];
        poll(&mut watched, PollTimeout::NONE).unwrap();
        assert!(rung().contains(&mine));
    }

    #[test]
    fn only_a_periodic_timer_without_time_left_is_stopped() {
        let text = "ino:\t1\nclockid: 1\nticks: 2\nsettime flags: 00\nit_value: (0, 0)\nit_interval: (0, 3000)\n";
        let state = State::parse(text).unwrap();
        assert_eq!((state.ticks, state.stopped()), (2, true));
        assert!(!State::parse(&text.replace("3000", "0")).unwrap().stopped());
        assert!(
            !State::parse(&text.replace("(0, 0)", "(1, 0)"))
                .unwrap()
                .stopped()
        );
        assert_eq!(State::parse("ticks: 2\n"), None);
    }
}
