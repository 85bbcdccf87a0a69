//! Transparent huge pages that a job had before its snapshot, created again while the restored job is running.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::clock;
use crate::job::{self, Process};
use crate::run::run_context::RunContext;
use crate::run::running_job::Job;

/// Interval between two checks for the end of a snapshot.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Starts a thread that requests the huge pages. If no thread can be started, the kernel creates them over time.
pub(crate) fn give_back(context: &Arc<RunContext>, job: &Job) {
    let (context, sandbox, root) = (Arc::clone(context), job.sandbox.pid(), job.pids.root);
    let work = move || {
        let root = job::child_with_pid(sandbox, root);
        match root.and_then(job::tree) {
            Ok(processes) => collapse(&context, &processes),
            Err(error) => tracing::debug!(%error, "no huge pages for the restored job"),
        }
    };
    let spawned = thread::Builder::new()
        .name("huge-pages".to_owned())
        .spawn(work);
    if let Err(error) = spawned {
        tracing::debug!(%error, "no thread for huge pages");
    }
}

fn collapse(context: &RunContext, processes: &[Process]) {
    let begun = clock::now();
    let mut bytes = 0;
    for process in processes {
        let mut last = None;
        match job::make_huge_pages(process.host_pid, || rest(context, &mut last)) {
            Ok(more) => bytes += more,
            Err(error) => tracing::debug!(pid = process.pid, %error, "no huge pages"),
        }
    }
    tracing::debug!(bytes, took = ?(clock::now() - begun), "requested huge pages");
}

/// Pauses between two steps. The job's memory is locked during a step, so each pause is as long as the previous step.
/// During a snapshot there are no steps.
fn rest(context: &RunContext, last: &mut Option<Instant>) {
    if let Some(last) = *last {
        thread::sleep(clock::now() - last);
    }
    while context.ongoing.now().is_some() {
        thread::sleep(CHECK_INTERVAL);
    }
    *last = Some(clock::now());
}
