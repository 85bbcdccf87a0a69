//! Steps of a restore, from the examination of an image to the running job.
//!
//! ```text
//! check machine → plan files → choose GPUs ─┬─▶ rewind files and streams → (fresh sandbox) → criu restore, chunks
//!                                           │   verified as they flow → resume CUDA ─┬─▶ the job computes
//!                                           └─▶ fill device memory ──────────────────┘
//! ```
//!
//! All checks that are possible in advance run before the first file is changed. A restore that fails later kills all
//! processes that it started. The caller records the reason, and sets a damaged image aside.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::unistd::geteuid;

use super::bundled_files;
use super::compatibility::{check_cpu, check_folder, check_read_files};
use super::criu_restore::{run_criu, tcp};
use super::error::RestoreError;
use super::files_plan::{Kept, has_come};
use super::gpu_resume::{self, Coming};
use crate::clock;
use crate::config;
use crate::criu::Tcp;
use crate::files::Done;
use crate::gpu::mapping::GpuPlan;
use crate::gpu::resident::{ResidentRestore, Standby};
use crate::job::{self, CutAway, Node, OpenFile, OtherBytes, Relation, RewindError};
use crate::network_socket::NetworkSocket;
use crate::run::format::size;
use crate::run::gpu_facts::CudaFacts;
use crate::run::image_facts::{ImageFacts, Phase, Stopwatch};
use crate::run::progress::{Step, Work};
use crate::run::run_context::RunContext;
use crate::run::running_job::SharedStreams;
use crate::run::streams::Ends;
use crate::sandbox::Sandbox;
use crate::store::{ImageId, ImageReader};
use crate::sync::locked;
use crate::sync::try_threads;

/// An examined image, which this machine can restore as far as known.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub id: ImageId,
    pub facts: ImageFacts,
    image: ImageReader,
    files: job::Plan,
    /// Files that the job writes; `None` for images without a list of them.
    kept: Option<Kept>,
    /// The chosen GPUs; `None` while GPUs are busy.
    gpus: Option<GpuPlan>,
}

/// Examines an image. Changes nothing, except that missing parts of ckpt-run are restored.
pub(crate) fn examine(
    context: &RunContext,
    standby: &Standby,
    id: ImageId,
) -> Result<Candidate, RestoreError> {
    let buffer = context.config.restore.buffer;
    let image = context.store.read(id)?.with_buffer(buffer);
    let mut facts: ImageFacts =
        serde_json::from_slice(&image.manifest().meta).map_err(RestoreError::Facts)?;
    if has_come(context, id) {
        // They are those of files on another machine.
        (facts.streams.stdout.file, facts.streams.stderr.file) = (None, None);
    }
    if let Some(user) = facts.namespace_of
        && user != geteuid().as_raw()
    {
        return Err(RestoreError::OtherUser(user));
    }
    check_cpu(&facts)?;
    check_folder(&facts, &context.directory)?;
    let look = |cuda_facts| gpu_resume::examine(context, standby, id, cuda_facts);
    let gpus = facts.cuda.as_ref().map(look).transpose()?.flatten();
    let other_bytes = other_bytes(context);
    // Here a file can have another name for now, of which only the image's list knows.
    if has_come(context, id) {
        check_read_files(&facts, other_bytes)?;
    }
    bundled_files::put_back(&image, &facts).map_err(RestoreError::Prepare)?;
    job::check_nodes(&facts.nodes)?;
    let kept = Kept::plan(context, &image, &facts)?;
    let is_kept = |file: &OpenFile| kept.as_ref().is_some_and(|kept| kept.has(file));
    let open = facts.files.iter().filter(|file| !is_kept(file));
    let present_path = |path| {
        kept.as_ref()
            .map_or(path, |kept| kept.rollback.present_path(path))
    };
    let makes = |node: &&Node| kept.as_ref().is_some_and(|kept| kept.makes(node));
    let nodes = facts.nodes.iter().filter(|node| !makes(node)).cloned();
    let nodes: Vec<Node> = nodes.collect();
    let files = job::plan(open, &nodes, other_bytes, present_path)?;
    job::check_unwritten(&facts.files)?;
    Ok(Candidate {
        id,
        facts,
        image,
        files,
        kept,
        gpus,
    })
}

/// The result of a restore and the time it took.
#[derive(Debug)]
pub(crate) struct Restored {
    pub phases: Vec<Phase>,
    pub total: Duration,
    pub cut: Vec<CutAway>,
    /// True if the job's input up to the crash is lost. The job continues with later input.
    pub input_lost: bool,
    /// Processes of the restored job that were moved to another GPU: see [`CudaFacts::moved`].
    pub moved: Vec<i32>,
}

/// Restores the candidate in `sandbox`, which must be new. Blocks until the job is running.
pub(crate) fn bring_back(
    context: &RunContext,
    standby: &Standby,
    sandbox: &Arc<Sandbox>,
    streams: &SharedStreams,
    candidate: Candidate,
) -> Result<Restored, RestoreError> {
    let begun = clock::now();
    let _busy = context.ongoing.begin(Work::Restore, Step::Rewind);
    try_threads()?;
    let mut watch = Stopwatch::start();
    let Candidate {
        id,
        facts,
        image,
        files,
        kept,
        gpus,
    } = candidate;
    if let Some(remote) = &context.remote {
        let returned = remote.return_to(id);
        returned.map_err(|error| RestoreError::Remote(Box::new(error)))?;
    }
    let started = context.store.start_download(id);
    started.map_err(RestoreError::Prepare)?;
    let expected = image.manifest().raw_bytes;
    context.ongoing.measure(image.given(), Some(expected));
    let restore = Restore {
        context,
        sandbox,
        streams,
        image: &image,
        facts: &facts,
    };
    let choose = |cuda_facts| gpu_resume::choose(context, standby, id, cuda_facts, gpus);
    let gpus = facts.cuda.as_ref().map(choose).transpose()?;
    let gpu = facts.cuda.as_ref().zip(gpus.as_ref());
    let rewound = thread::scope(|scope| {
        let memory = gpu.and_then(|(cuda, gpus)| {
            let refill = |facts| ResidentRestore::begin(context, standby, &image, facts, &gpus.map);
            let resident = cuda.resident.as_ref();
            resident.map(|facts| scope.spawn(move || refill(facts)))
        });
        let rewound = restore.rewind(files, kept)?;
        watch.lap("rewind");
        restore.create_processes(&rewound)?;
        let computing = restore.resume(gpu, memory, &mut watch);
        computing.map_err(RestoreError::late)?;
        Ok::<_, RestoreError>(rewound)
    })?;
    if gpu.is_some_and(|(cuda, _)| cuda.resident.is_some()) {
        standby.warm(&context.program);
    }
    restore.continue_at_terminal()?;
    let moved = gpu.map(|(cuda, gpus)| cuda.moved_by(&gpus.map));
    Ok(Restored {
        phases: watch.phases().to_vec(),
        total: clock::now() - begun,
        cut: rewound.cut,
        input_lost: rewound.input_lost,
        moved: moved.unwrap_or_default(),
    })
}

/// A restore under way.
struct Restore<'a> {
    context: &'a RunContext,
    sandbox: &'a Arc<Sandbox>,
    streams: &'a SharedStreams,
    image: &'a ImageReader,
    facts: &'a ImageFacts,
}

/// Limit on the wait for sockets that the kernel keeps after the job's death: for 60 s, and for 60 s more if the other end
/// closes the connection meanwhile.
const LEFTOVERS_LIMIT: Duration = Duration::from_secs(130);
/// Time between two looks at them.
const LEFTOVERS_POLL: Duration = Duration::from_millis(200);

/// Limit on the wait for the end of a sandbox in which a restore has failed, and the time between two looks.
const END_LIMIT: Duration = Duration::from_secs(10);
const END_POLL: Duration = Duration::from_millis(5);

/// Limit on the cut files that are named, a line each, after a restore.
pub(crate) const CUT_NAMED_MAX: usize = 5;

/// Reports a rollback of many files in one line.
fn report(done: Done, cut: &[CutAway], aside: &Path) {
    let is_summary = cut.len() > CUT_NAMED_MAX;
    if done.aside + done.put_back > 0 || is_summary {
        tracing::info!(
            put_back = done.put_back,
            set_aside = done.aside,
            not_saved = done.not_saved,
            shortened = cut.len(),
            shortened_by = %size(cut.iter().map(|cut| cut.bytes).sum()),
            kept = %aside.display(),
            "rolled the job's files back to the snapshot"
        );
    }
}

/// Files and streams of the job after their rollback.
struct Rewound {
    cut: Vec<CutAway>,
    /// Files that stay as they are, although they differ from the snapshot.
    left: HashSet<PathBuf>,
    ends: Ends,
    input_lost: bool,
}

impl Restore<'_> {
    /// Rolls files and streams back.
    fn rewind(&self, open: job::Plan, kept: Option<Kept>) -> Result<Rewound, RestoreError> {
        let (context, image, facts) = (self.context, self.image, self.facts);
        let id = image.manifest().id;
        let aside = context.aside(id);
        let relation = relation(context, facts);
        locked(self.streams).make_whole(&facts.streams, relation, &aside, other_bytes(context))?;
        // A new network namespace has none.
        if !self.sandbox.isolation().has_network() {
            self.free_addresses()?;
        }
        context.users.add(&facts.users, &facts.groups);
        let users = context.users.job_users();
        open.make_nodes(&users)?;
        let kept_files = kept.as_ref();
        let done = kept_files.map(|kept| kept.put_back(context, image, &aside, &users));
        let done = done.transpose()?.unwrap_or_default();
        let cut = open.execute(&aside);
        report(done, cut.as_deref().unwrap_or_default(), &aside);
        let cut = cut?;
        let settled = kept
            .as_ref()
            .map_or(Ok(()), |kept| kept.rollback.settle(&users));
        let reconnected = settled
            .map_err(RestoreError::from)
            .and_then(|()| Ok(job::clear_sockets(&facts.nodes, &users).map_err(RewindError::from)?))
            .and_then(|()| self.reconnect(&aside));
        let noted = reconnected.and_then(|ends| {
            let by_others = kept.as_ref().map(|kept| &*kept.rollback.by_others);
            let noted = context.files.note_run(by_others.unwrap_or_default());
            // From here on, changes of files are the job's.
            let noted = noted.map(|()| context.watch(self.sandbox));
            let noted = noted.and_then(|()| context.files.note_missing_watcher());
            noted.map(|()| ends).map_err(RestoreError::Prepare)
        });
        let (ends, input_lost) = noted.inspect_err(|_| {
            self.undo(&cut);
        })?;
        let left = kept.iter().flat_map(|kept| kept.rollback.left());
        let left = left.map(Path::to_owned).collect();
        if let Some(kept) = kept {
            context.files.now_at(id.number(), kept.into_set());
        }
        Ok(Rewound {
            cut,
            left,
            ends,
            input_lost,
        })
    }

    /// Removes what the dead job has left at its addresses. Without the privilege for that, waits until the kernel does it.
    fn free_addresses(&self) -> Result<(), RestoreError> {
        let sockets = &self.facts.sockets;
        let begun = clock::now();
        let mut told = false;
        loop {
            let Err(error) = sockets.destroy_leftovers(&NetworkSocket::open) else {
                return Ok(());
            };
            let is_over = clock::now() - begun > LEFTOVERS_LIMIT || self.sandbox.is_gone();
            let Some(address) = error
                .address_of_leftover()
                .filter(|_| sockets.closed && !is_over)
            else {
                return Err(error.into());
            };
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(
                    "the restore waits, for two minutes at most, until the kernel releases the job's address {address} \
                     (without root, only a network of the job's own avoids that: pasta, network.namespace)"
                );
            }
            thread::sleep(LEFTOVERS_POLL);
        }
    }

    /// Rolls the streams back and creates the ends that replace the old pipes or the old terminal.
    fn reconnect(&self, aside: &Path) -> Result<(Ends, bool), RestoreError> {
        let relation = relation(self.context, self.facts);
        let mut streams = locked(self.streams);
        let marks = &self.facts.streams;
        let input_known = match relation {
            Relation::Ours => streams.stdin.rewind(&marks.stdin),
            Relation::Earlier => {
                let taken_up = streams.stdin.take_up(&marks.stdin);
                taken_up.map_err(RestoreError::Prepare)?
            }
        };
        let (stdout, stderr) = (&streams.stdout, &streams.stderr);
        stdout.rewind(&marks.stdout, relation, aside, "stdout")?;
        stderr.rewind(&marks.stderr, relation, aside, "stderr")?;
        let ends = streams
            .connect_again(marks, self.sandbox)
            .map_err(RestoreError::Prepare)?;
        if let Some(user) = &self.context.user {
            let mut given = ends.iter().map(|(_, end)| user.own(end));
            given
                .try_for_each(|given| given)
                .map_err(RestoreError::Prepare)?;
        }
        Ok((
            ends,
            marks.stdin.pipe != 0 && marks.stdin.position > 0 && !input_known,
        ))
    }

    /// Writes truncated data back. It must not look like a change by another program.
    fn undo(&self, cut: &[CutAway]) -> bool {
        let is_whole = job::undo(cut);
        self.context.files.note_own_changes();
        is_whole
    }

    /// Ends the sandbox, with the watcher, which takes changes by this process for those of another program.
    fn await_end(&self) {
        self.sandbox.kill();
        let begun = clock::now();
        while !self.sandbox.is_gone() && clock::now() - begun < END_LIMIT {
            thread::sleep(END_POLL);
        }
    }

    /// Creates the job's processes by CRIU. If that fails, the files are put back.
    fn create_processes(&self, rewound: &Rewound) -> Result<(), RestoreError> {
        self.context.ongoing.step(Step::Restore);
        let files = &self.facts.files;
        let lock = job::DumpLock::to_restore(files);
        let users = self.facts.job_users();
        let created = lock.make_links(files, &users).map_err(RestoreError::from);
        let created = created.and_then(|()| {
            // Again: some seconds may have passed since the first check.
            job::check_unwritten(files)?;
            run_criu(
                self.context,
                self.sandbox,
                self.image,
                self.facts,
                &rewound.left,
                &rewound.ends,
            )
        });
        job::remove_links(files, &users);
        drop(lock);
        // No process of the job has run yet, unless CRIU was killed at its very end.
        created.map_err(|error| {
            self.await_end();
            if self.undo(&rewound.cut) {
                error
            } else {
                error.late()
            }
        })?;
        locked(self.streams).keep();
        Ok(())
    }

    /// Lets the created processes compute: connects them, and resumes their timers and their GPU state.
    fn resume(
        &self,
        gpu: Option<(&CudaFacts, &GpuPlan)>,
        memory: Option<Coming<'_, '_>>,
        watch: &mut Stopwatch,
    ) -> Result<(), RestoreError> {
        let (context, facts) = (self.context, self.facts);
        if tcp(context, facts) == Tcp::Established
            && context.config.network.tcp == config::Tcp::Close
        {
            let open = |kind| self.sandbox.socket(kind);
            facts.sockets.abort_outside(&open)?;
        }
        locked(self.streams).open();
        self.start_timers()?;
        watch.lap("restore");
        context.ongoing.step(Step::Resume);
        if let Some((cuda_facts, gpus)) = gpu {
            gpu_resume::resume(context, self.sandbox, facts, cuda_facts, gpus, memory)?;
            watch.lap("resume");
        }
        Ok(())
    }

    fn start_timers(&self) -> Result<(), RestoreError> {
        if self.facts.timers.is_empty() {
            return Ok(());
        }
        // A job that has exited needs no timers. Its exit is reported elsewhere.
        let Ok(root) = job::child_with_pid(self.sandbox.pid(), self.facts.pids.root) else {
            return Ok(());
        };
        Ok(job::arm_timers(&self.facts.timers, &job::tree(root)?)?)
    }

    /// Continues a job that was stopped at its terminal during the snapshot, and makes a full-screen job redraw the
    /// screen. The job's GPU state must be resumed.
    fn continue_at_terminal(&self) -> Result<(), RestoreError> {
        if self.facts.streams.terminal.is_some() {
            self.sandbox.signal(nix::libc::SIGCONT, false)?;
            self.sandbox.signal(nix::libc::SIGWINCH, false)?;
        }
        Ok(())
    }
}

/// Returns the supervisor that made the image.
fn relation(context: &RunContext, facts: &ImageFacts) -> Relation {
    if facts.instance == context.instance {
        Relation::Ours
    } else {
        Relation::Earlier
    }
}

fn other_bytes(context: &RunContext) -> OtherBytes {
    match context.config.files.on_lost {
        config::OnLost::Refuse => OtherBytes::Refuse,
        config::OnLost::Warn => OtherBytes::Warn,
    }
}
