//! The signals that the supervisor handles, and its reactions.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal as Number;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::Sender;

use crate::clock;
use crate::run::image_facts::Trigger;
use crate::snapshot::take_snapshot::Afterwards;
use crate::supervisor::error::RunError;
use crate::supervisor::event::Event;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::policy::restart::Stopping;
use crate::supervisor::stage::{Running, Stage};

/// Two SIGTERM within this time are one: `timeout` sends it to its child and then to its process group.
const SAME_SIGNAL: Duration = Duration::from_millis(300);

/// A signal, by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// SIGUSR1: snapshot, go on.
    Snapshot,
    /// SIGUSR2: snapshot, stop.
    SaveAndStop,
    /// SIGTERM: snapshot and stop within the grace period; a second one stops at once.
    Terminate,
    /// SIGINT, SIGQUIT, SIGHUP: for the job.
    Forward(Number),
    /// SIGTSTP: stop the job and ourselves.
    Suspend,
    /// SIGCONT: go on.
    Continue,
    /// SIGWINCH: the terminal's window has another size.
    Resize,
}

const MEANINGS: [(Number, Signal); 9] = [
    (Number::SIGUSR1, Signal::Snapshot),
    (Number::SIGUSR2, Signal::SaveAndStop),
    (Number::SIGTERM, Signal::Terminate),
    (Number::SIGINT, Signal::Forward(Number::SIGINT)),
    (Number::SIGQUIT, Signal::Forward(Number::SIGQUIT)),
    (Number::SIGHUP, Signal::Forward(Number::SIGHUP)),
    (Number::SIGTSTP, Signal::Suspend),
    (Number::SIGCONT, Signal::Continue),
    (Number::SIGWINCH, Signal::Resize),
];

/// Sends every signal as an event, from now on.
pub(crate) fn watch(events: &Sender<Event>) -> io::Result<()> {
    for (number, meaning) in MEANINGS {
        // What the caller has ignored for us (nohup, a shell's background job) stays ignored.
        if is_ignored(number) && matches!(meaning, Signal::Forward(_) | Signal::Suspend) {
            continue;
        }
        let mut arrivals = signal(SignalKind::from_raw(number as i32))?;
        let events = events.clone();
        tokio::spawn(async move {
            while arrivals.recv().await.is_some() {
                if events.send(Event::Signal(meaning)).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// Returns true if the caller has set the signal to be ignored.
pub(crate) fn is_ignored(number: Number) -> bool {
    let mask = procfs::process::Process::myself()
        .and_then(|me| me.status())
        .map(|status| status.sigign);
    mask.is_ok_and(|mask| mask & (1 << (number as u32 - 1)) != 0)
}

impl Supervisor {
    /// Returns true if the SIGTERM that set the stop by `deadline` came so short a time ago that another one is the
    /// same signal.
    fn began_just_now(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(clock::now());
        left + SAME_SIGNAL > self.context.config.snapshot.grace
    }

    /// Does what a signal asks for.
    pub fn signal(&mut self, signal: Signal) -> Result<(), RunError> {
        match signal {
            Signal::Snapshot => self.want(Trigger::Signal, Afterwards::Continue, None),
            Signal::SaveAndStop => {
                self.end_when_saved();
                self.save_and_stop()
            }
            Signal::Terminate => match self.stopping {
                Stopping::Until(deadline) if self.began_just_now(deadline) => Ok(()),
                Stopping::Until(_) => self.stop_now("a second SIGTERM"),
                Stopping::No | Stopping::ByTheJob(_) | Stopping::WhenSaved => {
                    self.stopping =
                        Stopping::Until(clock::now() + self.context.config.snapshot.grace);
                    self.hurry_hook();
                    self.save_and_stop()
                }
            },
            Signal::Forward(number) => self.forward(number as i32),
            Signal::Suspend => {
                self.suspend_wanted = true;
                self.suspend_when_idle();
                Ok(())
            }
            Signal::Continue => {
                self.suspend_wanted = false;
                self.keyboard.continued();
                let streams = self.streams();
                streams.stdin.resume();
                streams.resize();
                Ok(())
            }
            Signal::Resize => {
                self.streams().resize();
                Ok(())
            }
        }
    }

    /// Stops the job and ourselves, as the terminal asked; not in the middle of a snapshot, a start or a restore.
    pub fn suspend_when_idle(&mut self) {
        if !self.suspend_wanted {
            return;
        }
        let sandbox = match &self.stage {
            Stage::Starting(_)
            | Stage::Restoring(_)
            | Stage::Running(Running { busy: Some(_), .. }) => return,
            // A paused one stands still.
            Stage::Running(Running { pause: Some(_), .. })
            | Stage::Idle
            | Stage::Ending(_)
            | Stage::Waiting { .. } => None,
            Stage::Running(running) => Some(Arc::clone(&running.job.sandbox)),
        };
        self.suspend_wanted = false;
        let stopped = clock::now();
        self.background.clock.set(false, stopped);
        let tell = |signal| {
            if let Some(Err(error)) = sandbox.as_ref().map(|sandbox| sandbox.signal(signal, true)) {
                tracing::debug!(%error, "the job could not be told");
            }
        };
        tell(nix::libc::SIGSTOP);
        self.keyboard.give_back();
        // Returns when somebody continues us.
        if let Err(error) = signal_hook::low_level::emulate_default_handler(nix::libc::SIGTSTP) {
            tracing::warn!(%error, "cannot stop");
        }
        tell(nix::libc::SIGCONT);
        // Timers pause: the interval does not count the time that nothing computed.
        self.last.ended.monotonic += clock::now() - stopped;
        self.journal.stopped_for(clock::now() - stopped);
    }
}
