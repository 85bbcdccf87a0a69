//! The hook `before_snapshot`. It runs on the snapshot's thread, which waits for it; its veto cancels the snapshot.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::Sender;

use super::hook_command::{Call, Outcome};
use super::process_group::HookGroup;
use crate::config::Occasion;
use crate::run::image_facts::Trigger;
use crate::run::run_context::RunContext;
use crate::snapshot::take_snapshot::Afterwards;
use crate::supervisor::inbox::Message;

/// The hook of a snapshot that begins.
pub(crate) struct BeforeSnapshot {
    call: Option<Call>,
    afterwards: Afterwards,
    inbox: Sender<Message>,
}

impl BeforeSnapshot {
    /// Makes the hook of a snapshot of this run, if one is configured.
    pub fn new(
        context: &RunContext,
        run: u64,
        trigger: Trigger,
        afterwards: Afterwards,
        inbox: &Sender<Message>,
    ) -> Self {
        let facts = vec![("CKPT_RUN_TRIGGER", trigger.as_str().into())];
        Self {
            call: Call::new(context, run, Occasion::BeforeSnapshot, facts),
            afterwards,
            inbox: inbox.clone(),
        }
    }

    /// Returns the control over the hook.
    pub fn hold(&self) -> HookHold {
        HookHold(self.call.as_ref().map(|call| Arc::clone(&call.hook_group)))
    }

    /// Runs the hook; returns false if it cancelled the snapshot. The snapshot before a stop cannot be cancelled.
    pub fn allows(&self) -> bool {
        let Some(call) = &self.call else {
            return true;
        };
        let ended = call.run();
        let vetoed = ended.outcome == Outcome::Veto;
        // The loop ends with the run only.
        let _ = self
            .inbox
            .blocking_send(Message::BeforeSnapshotEnded(ended));
        match self.afterwards {
            Afterwards::Continue | Afterwards::Pause => !vetoed,
            Afterwards::Stop => true,
        }
    }
}

/// The control over a snapshot's hook, which may have ended. Dropped with the run, it kills the hook: the snapshot that
/// waits for it ends with the run.
#[derive(Debug, Default)]
pub(crate) struct HookHold(Option<Arc<HookGroup>>);

impl HookHold {
    /// Limits the remaining time of the hook.
    pub fn shorten(&self, limit: Duration) {
        if let Some(hook_group) = &self.0 {
            hook_group.shorten(limit);
        }
    }
}

impl Drop for HookHold {
    fn drop(&mut self) {
        if self.0.as_ref().is_some_and(|hook_group| hook_group.kill()) {
            tracing::warn!("hook before_snapshot is killed, as the run ends");
        }
    }
}
