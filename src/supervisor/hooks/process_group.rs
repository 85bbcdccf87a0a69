//! Control over one running hook: its time limit, which may be shortened while it runs, and its process group, which is
//! killed when no thread waits for it any more. One thread runs the hook, another holds this control.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::unistd::Pid;

use crate::sync::locked;

#[derive(Debug)]
pub(crate) struct HookGroup(Mutex<State>);

#[derive(Debug)]
enum State {
    /// The hook may start, with this time.
    Waiting(Duration),
    /// The hook is being started, which may hang on a hung disk; its time counts from then on.
    Starting(Duration),
    /// The hook is this process group, until the timer expires. Its leader is not reaped, so no other process gets the
    /// number.
    Running { group: Pid, timer: Arc<TimerFd> },
    /// The hook has exited, or must not start any more.
    Over,
}

impl HookGroup {
    /// Makes the control of a hook that has this time, once it has started.
    pub fn new(time: Duration) -> Self {
        Self(Mutex::new(State::Waiting(time)))
    }

    /// Starts the hook as the leader of a process group. The timer can be read from when its time is over. Before the
    /// child is waited for, the hold has to end.
    pub fn start(&self, command: &mut Command) -> io::Result<(Child, Arc<TimerFd>)> {
        let over = || io::Error::other("the run has ended");
        {
            let mut state = locked(&self.0);
            let State::Waiting(time) = *state else {
                return Err(over());
            };
            *state = State::Starting(time);
        }
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC)?;
        let timer = Arc::new(timer);
        let mut child = command.process_group(0).spawn()?;
        let group = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
        let mut state = locked(&self.0);
        let armed = match *state {
            State::Starting(time) => arm(&timer, time).map_err(io::Error::from),
            State::Waiting(_) | State::Running { .. } | State::Over => Err(over()),
        };
        if let Err(error) = armed {
            drop(state);
            kill_group(group);
            child.wait()?;
            return Err(error);
        }
        *state = State::Running {
            group,
            timer: Arc::clone(&timer),
        };
        Ok((child, timer))
    }

    /// Leaves the hook no more than this time from now on.
    pub fn shorten(&self, time: Duration) {
        match &mut *locked(&self.0) {
            State::Waiting(own) | State::Starting(own) => *own = time.min(*own),
            State::Running { timer, .. } => {
                // One that has run out says nothing.
                let longer = matches!(timer.get(), Ok(Some(Expiration::OneShot(left))) if Duration::from(left) > time);
                if longer && let Err(error) = arm(timer, time) {
                    tracing::debug!(%error, "cannot shorten a hook's time");
                }
            }
            State::Over => {}
        }
    }

    /// Kills the hook with its group, or keeps it from starting; false when it was over.
    pub fn kill(&self) -> bool {
        let state = std::mem::replace(&mut *locked(&self.0), State::Over);
        if let State::Running { group, .. } = state {
            kill_group(group);
        }
        !matches!(state, State::Over)
    }

    /// The hook has ended by itself, or was not started; what it left behind may stay.
    pub fn let_go(&self) {
        *locked(&self.0) = State::Over;
    }
}

/// The control over a snapshot's hook, which may have ended. Dropped with the run, it kills the hook: the snapshot that
/// waits for it ends with the run.
#[derive(Debug, Default)]
pub(crate) struct HookHold(pub Option<Arc<HookGroup>>);

impl HookHold {
    pub fn shorten(&self, limit: Duration) {
        if let Some(hook_group) = &self.0 {
            hook_group.shorten(limit);
        }
    }
}

impl Drop for HookHold {
    fn drop(&mut self) {
        if self.0.as_ref().is_some_and(|hook_group| hook_group.kill()) {
            tracing::warn!("hook before_snapshot was killed because the run ends");
        }
    }
}

/// Kills the group. All of its processes may just have exited.
fn kill_group(group: Pid) {
    let _ = killpg(group, Signal::SIGKILL);
}

/// Sets the timer. A time of zero would disarm it.
fn arm(timer: &TimerFd, time: Duration) -> nix::Result<()> {
    let time = TimeSpec::from_duration(time.max(Duration::from_nanos(1)));
    timer.set(Expiration::OneShot(time), TimerSetTimeFlags::empty())
}
