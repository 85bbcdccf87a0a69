//! Queue of the hooks that follow events: which hook runs at which notice, with which facts.
//!
//! Hooks run one after the other on a thread of their own, beside a job that computes, is being written or has ended.
//! Nothing waits for them but the end of the run.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use tokio::sync::mpsc::Sender;

use super::hook_command::{Call, Ended};
use crate::config::Occasion;
use crate::run::run_context::RunContext;
use crate::store::ImageId;
use crate::supervisor::inbox::Message;
use crate::supervisor::notice::Notice;

/// Limit on the hooks that wait for others: more than arise before the first is killed after its time.
const WAITING_MAX: usize = 64;

type Fact = (&'static str, OsString);

#[derive(Debug)]
pub(crate) struct Hooks {
    context: Arc<RunContext>,
    inbox: Sender<Message>,
    queue: Option<SyncSender<Call>>,
    /// Number of hooks that were called and have not ended, waiting ones included.
    pub running: u32,
}

impl Hooks {
    pub fn new(context: Arc<RunContext>, inbox: Sender<Message>) -> Self {
        Self {
            context,
            inbox,
            queue: None,
            running: 0,
        }
    }

    /// Calls the hook of this notice of this run, if it has one.
    pub fn notice(&mut self, run: u64, notice: &Notice) {
        // The snapshot's own thread runs the hook before it.
        if let Notice::HookEnded(ended) = notice
            && ended.occasion != Occasion::BeforeSnapshot
        {
            self.running = self.running.saturating_sub(1);
        }
        let Some((occasion, facts)) = call_of(notice) else {
            return;
        };
        let Some(call) = Call::new(&self.context, run, occasion, facts) else {
            return;
        };
        let queue = self.queue.get_or_insert_with(|| worker(self.inbox.clone()));
        if queue.try_send(call).is_ok() {
            self.running += 1;
        } else {
            tracing::warn!("hook {} is not run: too many hooks wait", occasion.as_str());
        }
    }
}

/// Returns the hook of a notice and the facts that it is given.
fn call_of(notice: &Notice) -> Option<(Occasion, Vec<Fact>)> {
    let image = |id: &ImageId| ("CKPT_RUN_IMAGE", OsString::from(id.to_string()));
    let text = |text: &str| OsString::from(text);
    Some(match notice {
        Notice::Snapshot(done) => {
            let freeze = format!("{:.3}", done.freeze.as_secs_f64());
            let facts = vec![
                image(&done.id),
                ("CKPT_RUN_TRIGGER", text(done.facts.trigger.as_str())),
                ("CKPT_RUN_FREEZE_SECONDS", freeze.into()),
            ];
            (Occasion::AfterSnapshot, facts)
        }
        Notice::Restored { image: id, .. } => (Occasion::AfterRestore, vec![image(id)]),
        Notice::GaveUp {
            code,
            reason,
            newest,
            ..
        } => {
            let mut facts = vec![
                ("CKPT_RUN_EXIT_CODE", text(&code.to_string())),
                ("CKPT_RUN_REASON", text(reason)),
            ];
            facts.extend(newest.as_ref().map(image));
            (Occasion::OnGiveUp, facts)
        }
        Notice::Hung {
            reason,
            log,
            newest,
            ..
        } => {
            let mut facts = vec![("CKPT_RUN_REASON", text(reason))];
            facts.extend(log.iter().map(|log| ("CKPT_RUN_DIAGNOSIS", log.into())));
            facts.extend(newest.as_ref().map(image));
            (Occasion::OnHang, facts)
        }
        _ => return None,
    })
}

/// Starts a thread that runs hooks, one after the other. Without a thread, no hook is taken.
fn worker(inbox: Sender<Message>) -> SyncSender<Call> {
    let (queue, calls) = sync_channel::<Call>(WAITING_MAX);
    let work = move || {
        for call in calls {
            let ended: Ended = call.run();
            // The loop ends with the run only.
            let _ = inbox.blocking_send(Message::HookEnded(ended));
        }
    };
    if let Err(error) = thread::Builder::new().name("hooks".to_owned()).spawn(work) {
        tracing::warn!(%error, "cannot run hooks");
    }
    queue
}
