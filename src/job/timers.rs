#![allow(unsafe_code, reason = "an ioctl that nix does not have")]
//! Timers (`timerfd`) that CRIU (4.2) does not restore as they were.
//!
//! - Periodic timers with unread expirations at a snapshot: the kernel stops such a timer until its owner reads it, and
//!   reports no time left. CRIU treats it as disarmed, and it would never expire again. It is armed again after a restore.
//! - Idle timers that were last set to an absolute time: CRIU adds the present time to the time left, zero, so that they
//!   expire at once. They are disarmed before the restored processes run.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd};

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{Expiration, TimerFd, TimerSetTimeFlags};
use serde::{Deserialize, Serialize};

use super::descriptors::Descriptors;
use super::nodes::Borrower;
use super::tree::Process;
use crate::checked;

nix::ioctl_write_ptr!(
    /// Sets the number of unread expirations of a timer (`TFD_IOC_SET_TICKS`).
    set_ticks, b'T', 0, u64
);

/// A timer that CRIU does not restore as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timer {
    /// Pid as the job sees it.
    #[serde(deserialize_with = "checked::pid")]
    pub pid: i32,
    /// The timer's descriptor in that process.
    #[serde(deserialize_with = "checked::descriptor")]
    pub descriptor: i32,
    /// Unread expirations of an idle timer; `None` if the timer is periodic and has unread ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<u64>,
}

/// Reasons why a timer could not be armed again.
#[derive(Debug, thiserror::Error)]
pub enum TimersError {
    /// A restored timer cannot be armed or disarmed.
    #[error("cannot set timer {descriptor} of process {pid} as it was")]
    Set {
        /// Pid as the host sees it.
        pid: i32,
        /// The timer's descriptor in that process.
        descriptor: i32,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// Lists these timers of frozen processes.
#[must_use]
pub fn record_timers(open: &[Descriptors]) -> Vec<Timer> {
    let mut found = Vec::new();
    for Descriptors { process, all } in open {
        for descriptor in all.iter().filter(|one| one.is_kernels("timerfd")) {
            let text = descriptor.present_info().unwrap_or_default();
            let Some(state) = State::parse(&text) else {
                continue;
            };
            let has_rung = state.stopped() && state.ticks > 0;
            if has_rung || state.is_idle_after_absolute() {
                found.push(Timer {
                    pid: process.pid,
                    descriptor: descriptor.number,
                    idle: (!has_rung).then_some(state.ticks),
                });
            }
        }
    }
    found
}

/// Arms the periodic timers again in the restored `processes`. They next expire after one period.
///
/// # Errors
/// The first timer that cannot be armed.
pub fn arm_timers(timers: &[Timer], processes: &[Process]) -> Result<(), TimersError> {
    let rung = timers.iter().filter(|timer| timer.idle.is_none());
    set(rung, processes, |pid, timer| arm(pid, timer.descriptor))
}

/// Disarms the idle timers in the restored `processes`, which do not run yet.
///
/// # Errors
/// The first timer that cannot be disarmed.
pub fn disarm_timers(timers: &[Timer], processes: &[Process]) -> Result<(), TimersError> {
    set(timers.iter(), processes, |pid, timer| match timer.idle {
        Some(ticks) => disarm(pid, timer.descriptor, ticks),
        None => Ok(()),
    })
}

fn set<'a>(
    timers: impl Iterator<Item = &'a Timer>,
    processes: &[Process],
    action: impl Fn(i32, &Timer) -> io::Result<()>,
) -> Result<(), TimersError> {
    for timer in timers {
        for process in processes.iter().filter(|process| process.pid == timer.pid) {
            let (pid, descriptor) = (process.host_pid, timer.descriptor);
            action(pid, timer).map_err(|source| TimersError::Set {
                pid,
                descriptor,
                source,
            })?;
        }
    }
    Ok(())
}

/// `TFD_TIMER_ABSTIME`.
const ABSOLUTE: u32 = 1;

/// The state of a timer in `/proc`; seconds and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    ticks: u64,
    left: (i64, i64),
    period: (i64, i64),
    is_absolute: bool,
}

impl State {
    /// Returns true for a timer that is not armed and was last set to an absolute time, or disarmed in that way.
    fn is_idle_after_absolute(&self) -> bool {
        self.left == (0, 0) && self.period == (0, 0) && self.is_absolute
    }

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
            is_absolute: u32::from_str_radix(field("settime flags:")?, 8).ok()? & ABSOLUTE != 0,
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
    let timer = borrow(pid, descriptor)?;
    let period = TimeSpec::new(state.period.0, state.period.1);
    timer.set(
        Expiration::IntervalDelayed(period, period),
        TimerSetTimeFlags::empty(),
    )?;
    add_ticks(&timer, state.ticks)
}

fn disarm(pid: i32, descriptor: i32, ticks: u64) -> io::Result<()> {
    let timer = borrow(pid, descriptor)?;
    timer.unset()?;
    add_ticks(&timer, ticks)
}

fn add_ticks(timer: &TimerFd, ticks: u64) -> io::Result<()> {
    if ticks > 0 {
        // SAFETY: the kernel reads one u64 from a valid pointer.
        unsafe { set_ticks(timer.as_fd().as_raw_fd(), &raw const ticks) }?;
    }
    Ok(())
}

/// Duplicates a timer of another process into this one.
fn borrow(pid: i32, descriptor: i32) -> io::Result<TimerFd> {
    let borrowed = Borrower::new(pid).and_then(|process| process.borrow(descriptor));
    let borrowed = borrowed.ok_or(io::ErrorKind::NotFound)?;
    // SAFETY: this process alone owns the descriptor, and hands it over.
    Ok(unsafe { TimerFd::from_raw_fd(borrowed.into_raw_fd()) })
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
        let rung = || record_timers(&[Descriptors::of(pid).unwrap()]);
        let idle = None;
        let mine = Timer {
            pid,
            descriptor,
            idle,
        };
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
    fn an_idle_timer_is_disarmed_again() {
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK).unwrap();
        let descriptor = timer.as_fd().as_raw_fd();
        let pid = i32::try_from(std::process::id()).unwrap();
        let set = |flags| {
            let past = Expiration::OneShot(TimeSpec::new(0, 1));
            timer.set(past, flags).unwrap();
            let mut watched = [PollFd::new(timer.as_fd(), PollFlags::POLLIN)];
            poll(&mut watched, PollTimeout::NONE).unwrap();
            let found = record_timers(&[Descriptors::of(pid).unwrap()]);
            found.into_iter().find(|it| it.descriptor == descriptor)
        };
        assert_eq!(set(TimerSetTimeFlags::empty()), None, "a relative time");
        let idle = set(TimerSetTimeFlags::TFD_TIMER_ABSTIME).unwrap();
        assert_eq!(idle.idle, Some(1));
        // As CRIU leaves it.
        set(TimerSetTimeFlags::TFD_TIMER_ABSTIME);
        let own = super::super::tree::describe(pid).unwrap();
        disarm_timers(
            &[Timer {
                idle: Some(0),
                ..idle
            }],
            &[own],
        )
        .unwrap();
        assert_eq!(state(pid, descriptor).unwrap().ticks, 0);
        disarm_timers(&[idle], &[own]).unwrap();
        assert_eq!(state(pid, descriptor).unwrap().ticks, 1);
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
