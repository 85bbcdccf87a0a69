//! Queue of the loop's hooks: which hook runs at which event, and the consequences of its end.
//!
//! Hooks run one after the other on a thread of their own, beside a job that computes, is being written or has ended.
//! `before_snapshot` runs on the snapshot's thread, which waits for it; only its veto changes what happens. The end of a
//! run waits for the hooks that were called.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc::Sender;

use super::hook_command::{self, Call, Ended, LINES_MAX, Outcome};
use super::process_group::HookGroup;
use crate::clock;
use crate::config::Occasion;
use crate::history;
use crate::run::environment::STORE_VARIABLE;
use crate::run::format::{chain, seconds};
use crate::run::image_facts::Trigger;
use crate::snapshot::take_snapshot::{Afterwards, Snapshotted};
use crate::store::ImageId;
use crate::supervisor::error::RunError;
use crate::supervisor::event::Event;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::handlers::background::News;
use crate::supervisor::handlers::signals::Signal;

/// Hooks that may wait for others: more than come of any occasion before the first is killed after its time.
const WAITING_MAX: usize = 64;
/// Time for the last hook's news, after its own time.
const NEWS_LIMIT: Duration = Duration::from_secs(5);

/// The hooks that were called.
#[derive(Debug, Default)]
pub(crate) struct Hooks {
    queue: Option<SyncSender<Call>>,
    /// Number of hooks that were called and have not ended, waiting ones included.
    running: u32,
    /// The last one before a snapshot, which may have ended.
    before_snapshot: Option<Arc<HookGroup>>,
}

impl Hooks {
    /// Has a hook run after those that were called before.
    fn call(&mut self, call: Call, events: &Sender<Event>) {
        let occasion = call.occasion.as_str();
        let queue = self.queue.get_or_insert_with(|| worker(events.clone()));
        if queue.try_send(call).is_ok() {
            self.running += 1;
        } else {
            tracing::warn!("hook {occasion} is not run: too many wait");
        }
    }
}

impl Drop for Hooks {
    /// The run ends, and with it the snapshot that waits for its hook. Others may have something to finish.
    fn drop(&mut self) {
        let before = self.before_snapshot.as_ref();
        if before.is_some_and(|hook_group| hook_group.kill()) {
            tracing::warn!("hook before_snapshot is killed, as the run ends");
        }
    }
}

/// A thread that runs hooks, one after the other. Without one, none is taken.
fn worker(events: Sender<Event>) -> SyncSender<Call> {
    let (queue, calls) = sync_channel::<Call>(WAITING_MAX);
    let work = move || {
        for call in calls {
            let ended = run(&call);
            // The loop only ends with the run.
            let _ = events.blocking_send(Event::Background(Box::new(News::HookEnded(ended))));
        }
    };
    if let Err(error) = thread::Builder::new().name("hooks".to_owned()).spawn(work) {
        tracing::warn!(%error, "hooks cannot be run");
    }
    queue
}

fn run(call: &Call) -> Ended {
    let name = call.occasion.as_str();
    hook_command::run(call, |line| tracing::info!("hook {name}: {line}"))
}

/// The hook of a snapshot that begins, run on its thread.
pub(crate) struct BeforeSnapshot {
    call: Option<Call>,
    afterwards: Afterwards,
    events: Sender<Event>,
}

impl BeforeSnapshot {
    /// Runs it; false when it called the snapshot off.
    pub fn allows(&self) -> bool {
        let Some(call) = &self.call else {
            return true;
        };
        let ended = run(call);
        let vetoed = ended.outcome == Outcome::Veto;
        // The loop only ends with the run.
        let _ = self
            .events
            .blocking_send(Event::Background(Box::new(News::BeforeSnapshotEnded(
                ended,
            ))));
        match self.afterwards {
            Afterwards::Continue | Afterwards::Pause => !vetoed,
            Afterwards::Stop => true,
        }
    }
}

impl Supervisor {
    /// The hook of a snapshot that begins.
    pub fn before_snapshot(&mut self, trigger: Trigger, afterwards: Afterwards) -> BeforeSnapshot {
        let facts = vec![("CKPT_RUN_TRIGGER", trigger.as_str().into())];
        let call = self.hook(Occasion::BeforeSnapshot, facts);
        self.background.hooks.before_snapshot =
            call.as_ref().map(|call| Arc::clone(&call.hook_group));
        self.hurry_hook();
        BeforeSnapshot {
            call,
            afterwards,
            events: self.events.clone(),
        }
    }

    /// Shortens the time of a snapshot's hook if the end of the run is near.
    pub fn hurry_hook(&self) {
        let hook_group = self.background.hooks.before_snapshot.as_ref();
        if let Some((hook_group, limit)) = hook_group.zip(self.stopping.hook_limit(clock::now())) {
            hook_group.shorten(limit);
        }
    }

    /// An image is durable.
    pub fn after_snapshot(&mut self, done: &Snapshotted) {
        self.background.notifier.image(done.id);
        let facts = vec![
            ("CKPT_RUN_IMAGE", done.id.to_string().into()),
            ("CKPT_RUN_TRIGGER", done.facts.trigger.as_str().into()),
            (
                "CKPT_RUN_FREEZE_SECONDS",
                format!("{:.3}", done.freeze.as_secs_f64()).into(),
            ),
        ];
        self.call_hook(Occasion::AfterSnapshot, facts);
    }

    /// An image is the running job.
    pub fn after_restore(&mut self, id: ImageId) {
        self.background.notifier.image(id);
        let facts = vec![("CKPT_RUN_IMAGE", id.to_string().into())];
        self.call_hook(Occasion::AfterRestore, facts);
    }

    /// The job is not restarted any more.
    pub fn on_give_up(&mut self, code: u8, reason: String) {
        let mut facts = vec![
            ("CKPT_RUN_EXIT_CODE", OsString::from(code.to_string())),
            ("CKPT_RUN_REASON", reason.into()),
        ];
        facts.extend(self.newest_fact());
        self.call_hook(Occasion::OnGiveUp, facts);
    }

    /// The run ends with an error of ours; only one that gives the job up is told.
    pub fn on_error(&mut self, error: &RunError) {
        if let RunError::NothingRestorable | RunError::NoRoom(_) = error {
            self.on_give_up(error.exit_code(), chain(error));
        }
    }

    /// The newest image that there is to go on from.
    pub fn newest_fact(&self) -> Option<(&'static str, OsString)> {
        let id = self.newest()?;
        Some(("CKPT_RUN_IMAGE", id.to_string().into()))
    }

    pub fn call_hook(&mut self, occasion: Occasion, facts: Vec<(&'static str, OsString)>) {
        if let Some(call) = self.hook(occasion, facts) {
            self.background.hooks.call(call, &self.events);
        }
    }

    /// The hook of an occasion with all that it is told, if there is one.
    fn hook(&self, occasion: Occasion, facts: Vec<(&'static str, OsString)>) -> Option<Call> {
        let settings = &self.context.config.hooks;
        let command = occasion.command(settings)?;
        let mut all = vec![
            ("CKPT_RUN_HOOK", occasion.as_str().into()),
            (STORE_VARIABLE, self.context.store.path().into()),
            (
                "CKPT_RUN_JOB",
                self.state.started_unix_ms.to_string().into(),
            ),
        ];
        all.extend(facts);
        Some(Call {
            occasion,
            command: command.clone(),
            hook_group: Arc::new(HookGroup::new(settings.timeout)),
            lines_max: LINES_MAX,
            directory: self.context.directory.clone(),
            facts: all,
        })
    }

    /// A hook that was called has ended.
    pub fn called_hook_ended(&mut self, ended: &Ended) {
        self.background.hooks.running = self.background.hooks.running.saturating_sub(1);
        self.hook_ended(ended);
    }

    /// Says how a hook ended, if not well.
    pub fn hook_ended(&mut self, ended: &Ended) {
        let (name, took) = (ended.occasion.as_str(), ended.took);
        match &ended.outcome {
            Outcome::Done => tracing::debug!(took = %seconds(took), "hook {name} done"),
            Outcome::Veto if ended.occasion == Occasion::BeforeSnapshot => {
                tracing::debug!(took = %seconds(took), "hook {name} called the snapshot off");
            }
            Outcome::Veto => {
                tracing::warn!("hook {name} failed, and nothing changes: exit code 75");
            }
            Outcome::Failed(why) => {
                tracing::warn!("hook {name} failed, and nothing changes: {why}");
            }
            Outcome::TimedOut => tracing::warn!(
                after = %seconds(took),
                "hook {name} was killed after its time ({}), and nothing changes",
                if took < self.context.config.hooks.timeout { "a part of the grace" } else { "hooks.timeout" }
            ),
        }
        self.tell(history::Event::Hook {
            hook: name.to_owned(),
            outcome: ended.outcome.as_str().to_owned(),
            seconds: took.as_secs_f64(),
        });
    }

    /// The run has ended: waits for the hooks that were called, each within its time. A SIGTERM ends the wait.
    pub async fn finish_hooks(&mut self) {
        let each = self.context.config.hooks.timeout;
        let deadline = clock::now() + each * self.background.hooks.running + NEWS_LIMIT;
        while self.background.hooks.running > 0 {
            self.tell_systemd(false);
            let left = deadline.saturating_duration_since(clock::now());
            let turn = self
                .background
                .notifier
                .wait()
                .map_or(left, |due| due.min(left));
            match self.next_event_within(turn).await {
                Some(Event::Background(news)) => match *news {
                    News::HookEnded(ended) => self.called_hook_ended(&ended),
                    other => drop(other),
                },
                None if turn < left => {}
                Some(Event::Signal(Signal::Terminate | Signal::Forward(_))) | None => {
                    tracing::warn!(
                        "a hook that still runs is left to itself, and those that wait are not run"
                    );
                    return;
                }
                Some(_) => {}
            }
        }
    }
}
