//! CRIU's part of a snapshot, and the recording of facts while the tasks are frozen.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::criu_dump::CriuDump;
use super::criu_log::CriuLog;
use super::durable_files::Writing;
use super::error::SnapshotError;
use super::job_facts::{Opened, Recorded};
use super::kept_files::{Beforehand, FileCopies};
use super::take_snapshot::{Snapshotted, Subject};
use crate::clock;
use crate::config;
use crate::criu::{Captured, OmittedState, Refused, lock_record};
use crate::gpu::inherited_devices::InheritedDevices;
use crate::job::{self, Descriptors, Process, TreeError, When};
use crate::run::gpu_facts::CudaFacts;
use crate::run::image_facts::{ImageFacts, OMITTED_STATE, Stopwatch};
use crate::run::progress::Step;
use crate::run::run_context::RunContext;
use crate::run::running_job::Job;
use crate::sandbox::SandboxError;
use crate::store::{ImageId, ImageWriter, StreamWriter};
use crate::sync::{ThreadsError, locked};

/// Limit on the threads that copy one image file.
const LANES_MAX: usize = 4;
/// A dump, before, during and after CRIU's work.
pub(crate) struct Dump<'a> {
    subject: Subject<'a>,
    /// The tree's first process, as the host sees it.
    root: i32,
    inherited: InheritedDevices,
    writer: Mutex<Option<ImageWriter>>,
    network: Mutex<Option<Network>>,
    recorded: Mutex<Option<Recorded>>,
    beforehand: Mutex<Option<Beforehand>>,
    keeping: Mutex<Option<FileCopies>>,
    image: ImageId,
    /// The lock, held until CRIU has exited.
    turn: Mutex<Option<job::DumpLock>>,
    /// CRIU's log, once CRIU has exited.
    log: OnceLock<Arc<CriuLog>>,
}

/// Record of the tasks' open files and descriptors.
enum Looking<T> {
    /// Made while CRIU dumps.
    Now(T),
    /// Made after CRIU's dump, because CRIU creates links to files that have lost their names, and the links belong to
    /// it.
    Later(Vec<Descriptors>),
}

/// The job's sockets, as they were when the tasks had just been frozen.
struct Network {
    sockets: job::Sockets,
    /// Holds packets back until the tasks are released.
    _lock: Option<job::PacketLock>,
}

impl<'a> Dump<'a> {
    pub fn new(
        subject: Subject<'a>,
        root: i32,
        inherited: InheritedDevices,
        (writer, beforehand): (ImageWriter, Beforehand),
        turn: job::DumpLock,
    ) -> Self {
        Self {
            subject,
            root,
            inherited,
            image: writer.id(),
            beforehand: Mutex::new(Some(beforehand)),
            keeping: Mutex::default(),
            writer: Mutex::new(Some(writer)),
            network: Mutex::default(),
            recorded: Mutex::default(),
            turn: Mutex::new(Some(turn)),
            log: OnceLock::new(),
        }
    }

    /// Lets CRIU begin. `while_frozen` is called when everything is read and recorded and the tasks are still frozen.
    pub fn run(
        &self,
        criu_dump: CriuDump<'_>,
        while_frozen: impl FnOnce(&Self) -> Result<(), SnapshotError> + Send,
    ) -> Result<Captured, SnapshotError> {
        self.context().ongoing.step(Step::Dump);
        let mut before = job::tree(self.root).unwrap_or_default();
        before.retain(|process| job::is_alive(process.host_pid));
        let omitted = criu_dump.omitted()?;
        let dumped = thread::scope(|scope| {
            let looking = Mutex::new(None);
            criu_dump.run(
                |name, pipe| self.receive(name, pipe),
                || {
                    let open = self.still_network()?;
                    let mut turn = locked(&self.turn);
                    let turn = turn.as_mut().ok_or(SnapshotError::Panicked)?;
                    let makes_links = turn.complete(&open).map_err(SnapshotError::Renamed)?;
                    *locked(&looking) = Some(if makes_links {
                        Looking::Later(open)
                    } else {
                        let look = move || self.look(open);
                        let thread = thread::Builder::new().spawn_scoped(scope, look);
                        Looking::Now(thread.map_err(ThreadsError::from)?)
                    });
                    Ok(())
                },
                || {
                    let looked = match taken(&looking)? {
                        Looking::Later(open) => self.look(open),
                        Looking::Now(thread) => {
                            thread.join().map_err(|_| SnapshotError::Panicked)?
                        }
                    };
                    self.record(looked?)?;
                    self.keep_omitted(&omitted)?;
                    while_frozen(self)
                },
            )
        });
        drop(locked(&self.network).take());
        drop(locked(&self.turn).take());
        self.log.get_or_init(|| dumped.log);
        let lacking = omitted.lacking();
        let result = match (omitted.refused(), lacking) {
            (Some((Refused::Keys, pid)), _) => Err(SnapshotError::Keys(pid)),
            (Some((Refused::Unshared, pid)), _) => Err(SnapshotError::Unshared(pid)),
            (Some((Refused::Deadline, pid)), _) => Err(SnapshotError::Deadline(pid)),
            (Some((Refused::Blocked, pid)), _) => Err(SnapshotError::Blocked(pid)),
            (None, Some(_)) if dumped.result.is_ok() => Err(SnapshotError::Criu {
                reason: "CRIU has left without giving back registers of the job".to_owned(),
                passes: false,
            }),
            (None, _) => dumped.result,
        };
        result.map_err(|error| {
            let processes = match job::tree(self.root) {
                Ok(processes) => processes,
                Err(TreeError::NoRoot) => return SnapshotError::Ended,
                Err(_) => return error,
            };
            if !self.subject.job.lives(&processes) {
                return SnapshotError::Ended;
            }
            // A process that still contains CRIU's code, or that died because of it; the other processes may not notice
            // its death.
            let is_dead = |process: &Process| !job::is_alive(process.host_pid);
            let hurt =
                job::with_remains_of_criu(&processes).or_else(|| before.into_iter().find(is_dead));
            let hurt = hurt.filter(|_| dumped.killed).map(|process| process.pid);
            match hurt.or(lacking) {
                Some(pid) => SnapshotError::Doubtful {
                    pid,
                    source: Box::new(error),
                },
                None => error,
            }
        })
    }

    /// Same as `run`, but the tasks never continue: they are killed when `commit` has succeeded.
    pub fn run_and_stop(
        &self,
        criu_dump: CriuDump<'_>,
        commit: impl FnOnce(&Self) -> Result<Snapshotted, SnapshotError> + Send,
    ) -> Result<Snapshotted, SnapshotError> {
        let mut done = None;
        let run = self.run(criu_dump, |dump| {
            let image = commit(dump)?;
            let id = image.id.number();
            done = Some(image);
            // Pid 1 takes a moment to die; no task may compute when CRIU releases it.
            let are_stopped = dump.stop_tasks().is_ok();
            dump.subject.job.sandbox.kill();
            // With a remote store, another machine may run the job in this folder before this one does again.
            if are_stopped && dump.context().remote.is_none() {
                dump.context().files.note_stop(id);
            }
            Ok(())
        });
        // Once the image is durable, CRIU's death by the kill above is not a failure.
        done.map_or_else(
            || {
                Err(run
                    .err()
                    .unwrap_or(SnapshotError::Sandbox(SandboxError::Gone)))
            },
            Ok,
        )
    }

    /// Sends SIGSTOP to every task of the job. The tasks are frozen, so none stops before CRIU releases it, and none is
    /// stopped in the image. ckpt-run's own first process is left out: it must notice the job's exit.
    pub fn stop_tasks(&self) -> Result<(), SnapshotError> {
        let ours = self.subject.job.pids.root;
        let processes = job::tree(self.root)?;
        for process in processes.iter().filter(|process| process.pid != ours) {
            let pid = Pid::from_raw(process.host_pid);
            match kill(pid, Signal::SIGSTOP) {
                // The pid of a zombie may be free by now.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => return Err(SnapshotError::Prepare(errno.into())),
            }
        }
        Ok(())
    }

    fn context(&self) -> &'a RunContext {
        self.subject.context
    }

    fn receive(&self, name: &str, pipe: &File) -> Result<u64, SnapshotError> {
        let mut stream = self.stream(&format!("criu/{name}"))?;
        stream.copy_from_pipe(pipe, lanes())?;
        Ok(stream.finish()?)
    }

    /// Starts the threads that empty the image's buffers: from now on the job computes, or waits for nothing else.
    pub fn start_workers(&self) {
        if let Some(writer) = locked(&self.writer).as_mut() {
            writer.start_workers();
        }
    }

    fn stream(&self, name: &str) -> Result<StreamWriter, SnapshotError> {
        let writer = locked(&self.writer);
        let writer = writer
            .as_ref()
            .ok_or_else(|| SnapshotError::Stream(io::ErrorKind::UnexpectedEof.into()))?;
        Ok(writer.stream(name)?)
    }

    /// Records the sockets of the frozen tasks before CRIU reads them, and holds back packets between them. Returns the
    /// open descriptors of the tasks.
    fn still_network(&self) -> Result<Vec<Descriptors>, SnapshotError> {
        let processes = job::tree(self.root)?;
        let open = Descriptors::of_all(&processes)?;
        let sockets = sockets(self.subject, &open)?;
        let sandbox = &self.subject.job.sandbox;
        let lock = sockets.hold_for_dump(&|kind| sandbox.socket(kind))?;
        *locked(&self.network) = Some(Network {
            sockets,
            _lock: lock,
        });
        Ok(open)
    }

    /// Checks the frozen tasks again, because their state no longer changes, and records their open files: sizes and
    /// contents.
    fn look(&self, open: Vec<Descriptors>) -> Result<(Opened, FileCopies), SnapshotError> {
        Descriptors::read_ahead(&open);
        let processes = job::tree(self.root)?;
        refuse_obstacles(self.subject.job, &processes, &open, When::Frozen)?;
        self.inherited.check(&open)?;
        let mut opened = Opened::record(open)?;
        let beforehand = taken(&self.beforehand)?;
        let keeping = FileCopies::begin(self.context(), self.image, &mut opened, beforehand)?;
        Ok((opened, keeping))
    }

    /// Records the other facts that CRIU does not record, such as positions of the standard streams.
    fn record(&self, (opened, keeping): (Opened, FileCopies)) -> Result<(), SnapshotError> {
        let processes = job::tree(self.root)?;
        if !self.subject.job.lives(&processes) {
            // CRIU also dumps a zombie, or a pending signal that is about to end a process; a restore would only repeat
            // the same crash.
            return Err(SnapshotError::Ended);
        }
        // Locked only for the mark: no other thread waits for the streams while file contents are read.
        let mark = || locked(self.subject.streams).mark();
        let network = taken(&self.network)?;
        let recorded = Recorded::take(processes, opened, network.sockets.clone(), mark)?;
        *locked(&self.recorded) = Some(recorded);
        *locked(&self.keeping) = Some(keeping);
        // CRIU has dumped all sockets.
        drop(network);
        Ok(())
    }

    /// Keeps the state that CRIU omits.
    fn keep_omitted(&self, omitted: &OmittedState) -> Result<(), SnapshotError> {
        let mut content = omitted.content().map_err(SnapshotError::Prepare)?;
        if let Some(recorded) = &*locked(&self.recorded) {
            for lock in recorded.locks() {
                content.extend(lock_record(lock.pid, lock.descriptor, lock.range()));
            }
        }
        if !content.is_empty() {
            let mut stream = self.stream(OMITTED_STATE)?;
            stream.write_all(&content)?;
            stream.finish()?;
        }
        Ok(())
    }

    /// Returns the facts that the image records about the job.
    pub fn facts(
        &self,
        cuda: Option<(Vec<i32>, CudaFacts)>,
        freeze: Duration,
    ) -> Result<ImageFacts, SnapshotError> {
        // CRIU cannot succeed without having run the action script, which runs `record`.
        let recorded = taken(&self.recorded)?;
        Ok(recorded.into_facts(self.subject, cuda, freeze))
    }

    /// Compresses, writes and commits the image. The job computes meanwhile, unless it is to stop. `files_limit` is the time
    /// for the job's files to reach their disks.
    pub fn commit(
        &self,
        facts: Result<ImageFacts, SnapshotError>,
        watch: &mut Stopwatch,
        begun: Instant,
        files_limit: Duration,
    ) -> Result<Snapshotted, SnapshotError> {
        let mut facts = facts?;
        let mut writer = taken(&self.writer)?;
        let taken_bytes = writer.taken().bytes();
        self.context().ongoing.step(Step::Write);
        self.context()
            .ongoing
            .measure(writer.stored(), Some(taken_bytes));
        writer.start_workers();
        let keeping = taken(&self.keeping)?;
        let (set, kept) = keeping.finish(self.context(), &writer)?;
        if self.context().files.is_news(&kept) {
            tracing::warn!("{}", kept.warning());
        }
        warn_of_contested(&self.context().files.newly_contested(&set));
        let open = facts.files.iter().enumerate();
        let kept_open = open.filter(|(_, file)| set.files.contains_key(&file.path));
        facts.kept_open = kept_open.map(|(position, _)| position).collect();
        facts.kept = Some(kept);
        job::sample_unwritten(&mut facts.files, &facts.kept_open);
        let writing = Writing::begin(self.context().store.path(), &set);
        writer.settle()?;
        writing.end(files_limit);
        watch.lap("write");
        facts.phases = watch.phases().to_vec();
        facts.writing = writer.work_shares();
        let meta =
            serde_json::to_vec(&facts).map_err(|error| SnapshotError::Prepare(error.into()))?;
        let manifest = writer.commit(&meta)?;
        self.context().files.now_at(manifest.id.number(), set);
        Ok(Snapshotted {
            id: manifest.id,
            freeze: Duration::from_secs_f64(facts.freeze_seconds),
            raw_bytes: manifest.raw_bytes,
            stored_bytes: manifest.stored_bytes,
            total: clock::now() - begun,
            facts,
        })
    }
}

/// Warns of files that both the job and another program write.
fn warn_of_contested(files: &[PathBuf]) {
    let Some(first) = files.first() else { return };
    let more = match files.len() - 1 {
        0 => String::new(),
        more => format!(" and {more} more of the job's files"),
    };
    tracing::warn!(
        "another program writes {}{more}, too: a restore is refused if both have changed such a file since the snapshot; \
         list it in files.shared to keep it as it is",
        first.display()
    );
}

/// Refuses a job with state that cannot be restored.
pub(super) fn refuse_obstacles(
    job: &Job,
    processes: &[Process],
    open: &[Descriptors],
    when: When,
) -> Result<(), SnapshotError> {
    refuse_mounts(job, open)?;
    refuse_message_queues(job)?;
    match job::find_obstacle(job.sandbox.pid(), processes, open, when)? {
        Some(obstacle) => Err(obstacle.into()),
        None => Ok(()),
    }
}

/// Refuses a job that has mounted a file system, or uses one that the machine no longer has.
fn refuse_mounts(job: &Job, open: &[Descriptors]) -> Result<(), SnapshotError> {
    let changes = job.sandbox.mount_changes();
    for mount in changes.newly_unmounted {
        tracing::warn!(
            "the machine has unmounted or remounted {} since the job began; the job still has it, a restored job finds \
             what the machine has there",
            mount.display()
        );
    }
    if let Some(mount) = changes.made.into_iter().next() {
        return Err(SnapshotError::Mount(mount));
    }
    match job::find_unmounted(open, &changes.unmounted) {
        Some(obstacle) => Err(obstacle.into()),
        None => Ok(()),
    }
}

/// Refuses a job with a POSIX message queue, even if no process has it open: a restored job would not find it.
fn refuse_message_queues(job: &Job) -> Result<(), SnapshotError> {
    let queues = job.sandbox.message_queues();
    match queues.map_err(SnapshotError::MessageQueues)?.pop() {
        Some(queue) => Err(SnapshotError::MessageQueue(queue.into())),
        None => Ok(()),
    }
}

/// Records the job's sockets among `open`.
pub(super) fn sockets(
    Subject { context, job, .. }: Subject<'_>,
    open: &[Descriptors],
) -> Result<job::Sockets, job::SocketsError> {
    let sockets = job::Sockets::record(open, backlog(context))?;
    let kept = context.config.network.tcp == config::Tcp::Keep;
    if job.sandbox.isolation().has_network() {
        sockets.without_carried(kept)
    } else if job.sandbox.keeps_connections() {
        Ok(sockets)
    } else {
        sockets.without_connections(kept)
    }
}

/// Returns the treatment of incoming connections that the job has not accepted.
fn backlog(context: &RunContext) -> job::Backlog {
    match context.config.network.tcp {
        config::Tcp::Close => job::Backlog::Dropped,
        config::Tcp::Keep => job::Backlog::Refused,
    }
}

/// Takes a value that can be used only once.
fn taken<T>(once: &Mutex<Option<T>>) -> Result<T, SnapshotError> {
    let taken = locked(once).take();
    taken.ok_or_else(|| SnapshotError::Stream(io::ErrorKind::UnexpectedEof.into()))
}

/// Returns the number of threads that copy a large image file. CRIU itself waits for them most of the time, and a few
/// threads reach the memory's bandwidth.
fn lanes() -> usize {
    thread::available_parallelism().map_or(1, |cores| cores.get().min(LANES_MAX))
}
