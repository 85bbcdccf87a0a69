//! A simulated world for the machine: it answers actions as threads, processes and clocks would, and checks each action
//! against its own state.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::action::Action;
use super::event::{Event, Now, StoreImages, Suspect, Timer};
use super::stage::Beginning;
use super::state_machine::Machine;
use crate::clock;
use crate::config::{Config, RestartLimit};
use crate::job::{InputMark, OutputMark};
use crate::path_text::CommandLine;
use crate::run::image_facts::ImageFacts;
use crate::run::run_state::RunState;
use crate::snapshot::paused::StillPaused;
use crate::snapshot::take_snapshot::Afterwards;
use crate::store::{ImageEntry, ImageId, ReadError};
use crate::supervisor::notice::Notice;
use crate::supervisor::policy::schedule::Moment;

/// Time after the grace period in which output may be delivered.
pub(super) const DELIVERY_LIMIT: Duration = Duration::from_secs(5);
/// Restores of an image before its job runs: one, and another if the reason lay outside it.
const TRIES_MAX: u32 = 2;
/// Images that the world keeps.
pub(super) const IMAGES_KEPT: usize = 4;
/// Time of a hook that nothing limits.
const HOOK_TIME: Duration = Duration::from_secs(3600);

/// The life of the processes in the present sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// No sandbox, or every process of it is gone and reported.
    Gone,
    /// The job is being started, or restored.
    Coming,
    /// The job runs.
    Alive,
    /// The job's first process has exited; the report is due.
    Exited(i32),
    /// The exit was reported.
    Reported,
    /// Somebody killed the sandbox; the report is due.
    Lost,
    /// The machine killed the sandbox; the report is due.
    Killed,
}

/// Work of a thread or a process that ends some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Work {
    Start,
    /// A snapshot whose job may compute again already.
    Snapshot,
    Restore,
    Unpause,
    Drain,
    Diagnosis,
}

/// Outcome of a work, as the test chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Success,
    /// A failure after which the same may succeed.
    Passing,
    /// A failure of the object itself.
    Lasting,
    /// A failure with which the job is lost, or may have run.
    Lost,
}

/// The world, and the machine in it.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct World {
    pub machine: Machine,
    pub(super) now: Moment,
    pub(super) images: Vec<ImageEntry>,
    pub(super) images_made: u64,
    /// False while the store cannot be read.
    pub store_answers: bool,
    pub life: Life,
    pub(super) works: BTreeMap<Work, Detail>,
    /// True while the tasks of a job are stopped for a pause.
    pub(super) frozen: bool,
    /// True if a job died while it was paused: nothing but a request restores it.
    pub(super) held: bool,
    /// True if signs of a hang are searched for.
    pub(super) armed: bool,
    pub(super) snapshot_clients: Vec<oneshot::Receiver<Result<ImageId, String>>>,
    pub(super) unpause_clients: Vec<oneshot::Receiver<Result<(), StillPaused>>>,
    /// Time at which the run must be over, once SIGTERM or the notice of a cloud arrived.
    pub(super) deadline: Option<Moment>,
    pub has_lost_lease: bool,
    pub over: bool,
    /// True if the run ended with an error.
    failed: bool,
    /// Restarts since the last image.
    restarts: u32,
    /// Restores of each image since the job ran last.
    tries: BTreeMap<ImageId, u32>,
    pub events: u64,
    /// Number of times that the machine has read the list of images.
    pub lists_read: Rc<Cell<u64>>,
    /// A diagnosis of a dead job that is not finished.
    pub(super) late_diagnosis: Option<Suspect>,
}

/// The order of a work, as far as its end depends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Detail {
    pub(super) afterwards: Afterwards,
    /// End of the hook that runs before the work.
    pub(super) hook_until: Moment,
    /// The subject of a diagnosis.
    pub(super) suspect: Option<Suspect>,
}

pub(super) fn later(moment: Moment, time: Duration) -> Moment {
    Moment {
        monotonic: moment.monotonic + time,
        unix_ms: moment.unix_ms + u64::try_from(time.as_millis()).unwrap(),
    }
}

pub(super) fn image(number: u64, run: u64) -> ImageEntry {
    ImageEntry {
        id: ImageId::new(number).unwrap(),
        created_unix_ms: 0,
        raw_bytes: 0,
        stored_bytes: 0,
        meta: format!("{{\"run\":{run}}}").into_bytes(),
        damaged: None,
        pinned: None,
    }
}

pub(super) static FACTS: LazyLock<ImageFacts> = LazyLock::new(|| {
    let (input, output) = (InputMark::default(), OutputMark::default());
    serde_json::from_value(serde_json::json!({
        "trigger": "request", "command": ["job"], "directory": "/", "host": "", "kernel": "", "criu": "",
        "run": 1, "instance": "", "freeze_seconds": 0.5, "phases": [], "processes": 1,
        "pids": {"root": 2, "job": 3}, "isolated": true, "cuda": null, "files": [],
        "sockets": {"listening": [], "connections": []}, "timers": [],
        "stdin": input, "stdout": output, "stderr": output,
    }))
    .unwrap()
});

impl World {
    /// Begins a run with so many images.
    pub fn new(settings: Config, beginning: Beginning, images: u64) -> Self {
        let now = Moment {
            monotonic: clock::now() + Duration::from_secs(1 << 20),
            unix_ms: 1_000_000,
        };
        let command = CommandLine::from(vec![OsString::from("job")]);
        let state = RunState::new(command, "/".into(), 1);
        let images: Vec<ImageEntry> = (1..=images).map(|number| image(number, 1)).collect();
        let images_made = images.len() as u64;
        let found = images.clone();
        let facts = Now {
            at: now,
            images: StoreImages::new(move || Ok(found.clone())),
        };
        let mut world = Self {
            machine: Machine::new(settings, state, 7, facts),
            now,
            images,
            images_made,
            store_answers: true,
            life: Life::Gone,
            works: BTreeMap::new(),
            frozen: false,
            held: false,
            armed: true,
            snapshot_clients: Vec::new(),
            unpause_clients: Vec::new(),
            deadline: None,
            has_lost_lease: false,
            over: false,
            failed: false,
            restarts: 0,
            tries: BTreeMap::new(),
            events: 0,
            lists_read: Rc::default(),
            late_diagnosis: None,
        };
        world.happens(Event::Begin(beginning));
        world
    }

    /// Delivers an event, and those that its actions produce at once.
    pub(super) fn happens(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            if self.over {
                return;
            }
            self.events += 1;
            let stale_unpause = matches!(event, Event::Unpaused(_));
            let now = Now {
                at: self.now,
                images: self.store_images(),
            };
            let (needs_images, lists_read) = (may_need_images(&event), self.lists_read.get());
            let actions = self.machine.on(event, now);
            let has_read = self.lists_read.get() != lists_read;
            assert!(needs_images || !has_read, "the store is read for nothing");
            if has_read && self.store_answers && !self.machine.is_over() {
                let known = &self.machine.last_available;
                assert_eq!(*known, self.available(), "the status counts other images");
            }
            for action in actions {
                assert!(!self.over, "{action:?} after the end");
                events.extend(self.act(action, stale_unpause));
            }
            self.check();
        }
    }

    fn available(&self) -> Vec<ImageId> {
        let (state, refused) = (self.machine.state(), &self.machine.attempts.refused);
        let images = self.images.iter();
        let ours = images.filter(|image| image.damaged.is_none() && state.goes_on_from(image));
        let ids = ours.map(|image| image.id);
        ids.filter(|id| !refused.contains(id)).collect()
    }

    fn store_images(&self) -> StoreImages {
        let images = self.store_answers.then(|| self.images.clone());
        let lists_read = Rc::clone(&self.lists_read);
        let image = ImageId::new(1).unwrap();
        StoreImages::new(move || {
            lists_read.set(lists_read.get() + 1);
            images.clone().ok_or(ReadError::Missing { image })
        })
    }

    fn act(&mut self, action: Action, stale_unpause: bool) -> Option<Event> {
        let works = |work| self.works.contains_key(&work);
        match action {
            Action::Start => {
                assert_eq!(self.life, Life::Gone, "two jobs");
                self.life = Life::Coming;
                self.held = false;
                self.begin(Work::Start);
            }
            Action::Examine(id) => return Some(self.examine(id)),
            Action::BringBack => {
                assert_eq!(self.life, Life::Coming);
                assert!(!works(Work::Restore), "two restores");
                self.begin(Work::Restore);
                let tries = self.tries.values().max().copied();
                assert!(
                    tries <= Some(TRIES_MAX),
                    "an image is tried again and again"
                );
            }
            Action::AdoptRestored(..) => self.job_runs(),
            Action::Snapshot(order) => {
                assert!(!works(Work::Snapshot), "two snapshots");
                assert!(!works(Work::Diagnosis), "a snapshot beside a debugger");
                assert!(!self.frozen, "a snapshot of a frozen job");
                if let Life::Exited(_) | Life::Lost = self.life {
                    return Some(Event::Leaving);
                }
                assert_eq!(self.life, Life::Alive, "a snapshot of a dead job");
                if let Some(deadline) = self.deadline {
                    let left = deadline.monotonic - self.now.monotonic;
                    let limit = order.hook_limit.expect("a hook delays the stop");
                    assert!(limit <= left / 2, "a hook delays the stop");
                }
                let detail = Detail {
                    afterwards: order.afterwards,
                    hook_until: later(self.now, order.hook_limit.unwrap_or(HOOK_TIME)),
                    suspect: None,
                };
                self.works.insert(Work::Snapshot, detail);
            }
            Action::Hurry(limit) => {
                let until = later(self.now, limit);
                if let Some(detail) = self.works.get_mut(&Work::Snapshot)
                    && detail.hook_until.monotonic > until.monotonic
                {
                    detail.hook_until = until;
                }
            }
            Action::Notify(notice) => return self.notice(&notice),
            other => return self.act_besides(other, stale_unpause),
        }
        None
    }

    /// Carries out what is not the begin of a job's life, of a restore or of a snapshot.
    fn act_besides(&mut self, action: Action, stale_unpause: bool) -> Option<Event> {
        let works = |work| self.works.contains_key(&work);
        match action {
            Action::Unpause(_) => {
                assert!(self.frozen, "a job is resumed that is not paused");
                assert!(!works(Work::Unpause), "two resumptions");
                self.begin(Work::Unpause);
            }
            Action::AbandonPause => {
                self.held |= self.frozen && !stale_unpause;
                self.frozen = false;
            }
            Action::FindRoom(_) => return Some(Event::Room(self.lacking())),
            Action::Kill => {
                let is_needed = self.life != Life::Gone;
                assert!(is_needed || self.has_lost_lease, "a kill of nothing");
                self.life = if is_needed { Life::Killed } else { Life::Gone };
                self.works.remove(&Work::Start);
            }
            Action::Drain => {
                assert_eq!(self.life, Life::Gone, "output of a living job is drained");
                assert!(!works(Work::Restore), "a restore and a drain at once");
                assert!(!works(Work::Drain), "two drains");
                assert!(!works(Work::Unpause), "a resumption and a drain at once");
                assert!(!self.frozen, "a frozen job is left");
                self.begin(Work::Drain);
            }
            Action::Diagnose(suspect) => {
                assert!(
                    !self.frozen && !works(Work::Snapshot),
                    "a debugger in the way"
                );
                self.begin(Work::Diagnosis);
                if let Some(detail) = self.works.get_mut(&Work::Diagnosis) {
                    detail.suspect = Some(suspect);
                }
            }
            Action::WatchAnew => self.armed = true,
            Action::StopSelf { .. } => {
                let killed = matches!(self.life, Life::Killed | Life::Gone);
                assert!(
                    killed || !works(Work::Snapshot),
                    "stopped during a snapshot"
                );
                let stopped = Duration::from_secs(3);
                self.now = later(self.now, stopped);
                // Who stops the supervisor delays its end.
                self.deadline = self.deadline.map(|deadline| later(deadline, stopped));
                return Some(Event::Continued(stopped));
            }
            Action::SetAside(id, reason) => {
                let found = self.images.iter_mut().find(|image| image.id == id);
                let found = found.filter(|_| self.store_answers);
                let done = found.map(|image| image.damaged = Some(reason)).is_some();
                return Some(Event::SetAside { done });
            }
            // A client whose answer nobody reads has gone away.
            Action::AnswerSnapshot(reply, answer) => drop(reply.send(answer)),
            Action::AnswerUnpause(reply, answer) => drop(reply.send(answer)),
            Action::Exit(_) => self.over = true,
            Action::Fail(_) => (self.over, self.failed) = (true, true),
            // The rest changes nothing here.
            _ => {}
        }
        None
    }

    fn begin(&mut self, work: Work) {
        let detail = Detail {
            afterwards: Afterwards::Continue,
            hook_until: self.now,
            suspect: None,
        };
        self.works.insert(work, detail);
    }

    fn examine(&mut self, id: ImageId) -> Event {
        assert_eq!(self.life, Life::Gone, "two jobs");
        assert!(!self.held, "a paused job is restored");
        if !self.images.iter().any(|image| image.id == id) {
            let missing = ReadError::Missing { image: id };
            return Event::Unfit(Box::new(missing.into()));
        }
        self.life = Life::Coming;
        *self.tries.entry(id).or_default() += 1;
        Event::Fit
    }

    fn job_runs(&mut self) {
        assert!(matches!(
            self.life,
            Life::Coming | Life::Exited(_) | Life::Reported | Life::Lost | Life::Gone
        ));
        self.tries.clear();
        if self.life == Life::Coming {
            self.life = Life::Alive;
        }
    }

    /// Counts restarts since the last image, each of which is taken for progress.
    fn notice(&mut self, notice: &Notice) -> Option<Event> {
        match notice {
            Notice::RestoreDue(..) | Notice::RestartDue(..) => {
                self.restarts += 1;
                if let RestartLimit::Times(max) = self.machine.settings.restart.max {
                    assert!(self.restarts <= max, "more restarts than restart.max");
                }
            }
            Notice::Started(_) => self.job_runs(),
            Notice::Snapshot(_) => {
                self.restarts = 0;
                return Some(Event::NewGround);
            }
            _ => {}
        }
        None
    }

    fn lacking(&mut self) -> Option<String> {
        let lacks = self.now.unix_ms.is_multiple_of(3);
        self.held = lacks;
        lacks.then(String::new)
    }

    /// Checks what holds after each event.
    pub(super) fn check(&mut self) {
        let over = self.over;
        self.snapshot_clients
            .retain_mut(|client| is_waiting(&client.try_recv(), over));
        self.unpause_clients
            .retain_mut(|client| is_waiting(&client.try_recv(), over));
        if self.over {
            let resumes = self.works.contains_key(&Work::Unpause);
            assert!(
                resumes || !self.frozen || self.failed,
                "a frozen job is left"
            );
            return;
        }
        if let Some(deadline) = self.deadline {
            assert!(
                self.now.monotonic <= deadline.monotonic,
                "SIGTERM is not honoured: {:?}",
                self.machine
            );
        }
        let watched = self.armed || self.machine.is_suspect();
        let idle = self.life == Life::Alive && self.works.is_empty() && !self.frozen;
        assert!(watched || !idle, "nobody searches for signs of a hang");
    }
}

/// Returns false for events that can be decided about without the list of images, whatever the stage.
fn may_need_images(event: &Event) -> bool {
    !matches!(
        event,
        Event::Signal(Signal::SIGWINCH | Signal::SIGCONT | Signal::SIGTSTP)
            | Event::Interrupted
            | Event::Started(_)
            | Event::Computing(_)
            | Event::NewGround
            | Event::Suspected(_)
            | Event::Continued(_)
            | Event::Timer(Timer::Schedule | Timer::Left)
    )
}

/// Returns true if a client still waits. The end of the run closes the connection of a client without an answer.
fn is_waiting<T>(answer: &Result<T, TryRecvError>, over: bool) -> bool {
    match answer {
        Ok(_) => false,
        Err(TryRecvError::Empty) => true,
        Err(TryRecvError::Closed) => {
            assert!(over, "a client gets no answer");
            false
        }
    }
}
