//! CRIU at work on a dump. CRIU is started before the freeze and waits until ckpt-run lets it begin. Its start takes
//! tens of milliseconds, for loading it and for its checks of the kernel; this way they are not part of the freeze.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::criu_log::CriuLog;
use super::error::SnapshotError;
use super::take_snapshot::Subject;
use crate::clock;
use crate::config;
use crate::criu::{
    Capture, CaptureError, Captured, DumpOptions, OmittedState, Tcp, Unaccepted, asks_at_dump,
    dump_arguments, plugin_interposes, plugin_leaves_filters, plugin_numbers, plugin_repeats,
    plugin_takes, reports_passing,
};
use crate::job::{self, TreeError};
use crate::run::format::why;
use crate::sandbox::{Ended, Hidden, SandboxError, ToolCommand, ToolRun};
use crate::store::ImageId;
use crate::sync::locked;

/// Time for CRIU to release the tasks and exit, once a dump was cancelled.
const CALL_OFF_LIMIT: Duration = Duration::from_secs(10);
/// Interval between two checks of the processes while CRIU works.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Interval, in milliseconds, between two checks for a CRIU that has exited instead of requesting the tasks.
const LISTEN_MS: u8 = 20;
/// Time for CRIU to die of SIGKILL.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// Descriptor of CRIU's output before it opens its log.
const STDERR: RawFd = 2;
/// Descriptor of the state that CRIU omits.
const OMITTED: RawFd = 3;

/// A CRIU that was started for a dump. It exits when the value is dropped; before [`run`](Self::run) it has not changed
/// the job.
pub(crate) struct CriuDump<'a> {
    /// `None` once CRIU has exited.
    tool: Option<ToolRun<'a>>,
    /// `None` once CRIU is at work.
    capture: Option<Capture>,
    /// The tree's first process, as the host sees it.
    root: i32,
    log: Arc<CriuLog>,
    printed: File,
    omitted: OmittedState,
    /// Time limit for CRIU.
    limit: Duration,
}

/// The outcome of CRIU's work on a dump.
pub(crate) struct Dumped {
    pub result: Result<Captured, SnapshotError>,
    /// True if CRIU did not exit by itself. An orderly exit undoes CRIU's changes to the job.
    pub killed: bool,
    /// CRIU's log, to be dropped when the job computes.
    pub log: Arc<CriuLog>,
}

impl<'a> CriuDump<'a> {
    /// Starts CRIU and waits until it is about to freeze the tasks below `root`. `majors` are the devices that its
    /// plugin may leave out.
    pub fn start(
        subject: Subject<'a>,
        root: i32,
        id: ImageId,
        majors: &[u32],
    ) -> Result<Self, SnapshotError> {
        Self::begin(subject, root, id, majors).map_err(|error| match job::tree(root) {
            Ok(there) if subject.job.lives(&there) => error,
            Ok(_) | Err(TreeError::NoRoot) => SnapshotError::Ended,
            Err(_) => error,
        })
    }

    fn begin(
        subject: Subject<'a>,
        root: i32,
        id: ImageId,
        majors: &[u32],
    ) -> Result<Self, SnapshotError> {
        let Subject { context, job, .. } = subject;
        let sockets = context.sockets().map_err(SnapshotError::Prepare)?;
        let log = CriuLog::new(sockets, context.log("dump", id));
        let sockets = log.folder();
        let printed = tempfile::tempfile_in(sockets).map_err(SnapshotError::Prepare)?;
        let omitted = OmittedState::holding(&[]).map_err(SnapshotError::Prepare)?;
        let capture = Capture::bind(sockets).map_err(SnapshotError::Prepare)?;
        let streams = locked(subject.streams);
        let terminals = streams.terminals().map_err(SnapshotError::Prepare)?;
        drop(streams);
        let mut argv = context.criu.argv();
        argv.extend(dump_arguments(&DumpOptions {
            root_pid: job.pids.root,
            directory: sockets,
            log: &log.path(),
            libdir: &context.libdir(),
            log_level: context.config.criu.log_level,
            external: &terminals,
            unaccepted: match context.config.network.tcp {
                config::Tcp::Close => Unaccepted::LeftOut,
                config::Tcp::Keep => Unaccepted::Refused,
            },
            tcp: if job.sandbox.keeps_connections() {
                Tcp::Established
            } else {
                Tcp::Closed
            },
            unprivileged: job.sandbox.is_unprivileged(),
        }));
        let interposes = plugin_interposes(&context.libdir(), sockets);
        let has_namespaces = job.sandbox.isolation().has_namespaces();
        let tool = ToolCommand {
            argv,
            environment: [
                plugin_takes(majors),
                interposes.map_err(SnapshotError::Prepare)?,
                OmittedState::variable(OMITTED),
                plugin_repeats(job.runs_for()),
            ]
            .into_iter()
            .chain(
                job.sandbox
                    .inherited_filters(root)
                    .map(plugin_leaves_filters),
            )
            .chain(has_namespaces.then(plugin_numbers))
            .chain(asks_at_dump(sockets))
            .collect(),
            first_descriptor: STDERR,
            restores: None,
            hidden: Hidden::NOTHING,
            own_ipc: false,
            clock_offsets: None,
        };
        let descriptors = [printed.as_raw_fd(), omitted.descriptor()];
        let tool = job.sandbox.run_tool(tool, &descriptors)?;
        let mut criu_dump = Self {
            tool: Some(tool),
            capture: Some(capture),
            root,
            log: Arc::new(log),
            printed,
            omitted,
            limit: context.config.snapshot.timeout,
        };
        criu_dump.wait_until_asked()?;
        Ok(criu_dump)
    }

    /// Waits until CRIU requests the tasks.
    fn wait_until_asked(&mut self) -> Result<(), SnapshotError> {
        let (Some(capture), Some(tool)) = (&self.capture, &self.tool) else {
            return Ok(());
        };
        let deadline = clock::now() + self.limit;
        let ended = loop {
            let asked = capture.is_asked(LISTEN_MS.into());
            if asked.map_err(SnapshotError::Prepare)? {
                return Ok(());
            }
            match tool.wait(Duration::ZERO) {
                Err(SandboxError::Slow(_)) if clock::now() < deadline => {}
                Err(SandboxError::Slow(_)) => return Err(SnapshotError::Slow(self.limit)),
                ended => break ended,
            }
        };
        self.tool = None;
        let nothing = Err(CaptureError::Incomplete);
        outcome((&self.log, &self.printed), ended, nothing).map(drop)
    }

    /// Returns the state that CRIU omits, complete when all image files were read.
    pub fn omitted(&self) -> Result<OmittedState, SnapshotError> {
        self.omitted.handle().map_err(SnapshotError::Prepare)
    }

    /// Dumps the tasks. `stopped` is called when the tasks are frozen and CRIU has not looked at their sockets yet,
    /// `receive` for each image file, and `frozen` when all of them were read and the tasks are still frozen.
    pub fn run(
        mut self,
        receive: impl Fn(&str, &File) -> Result<u64, SnapshotError> + Sync,
        stopped: impl FnOnce() -> Result<(), SnapshotError> + Send,
        frozen: impl FnOnce() -> Result<(), SnapshotError> + Send,
    ) -> Dumped {
        let (Some(capture), Some(tool)) = (self.capture.take(), self.tool.take()) else {
            unreachable!("only this and the drop take them");
        };
        let (call_off, called_off) = match UnixStream::pair() {
            Ok(pair) => pair,
            Err(error) => {
                drop(capture);
                put_an_end_to(&tool);
                return self.failed(SnapshotError::Prepare(error));
            }
        };
        // True while CRIU, which has handed over everything, is held by ckpt-run.
        let held = AtomicBool::new(false);
        let (ended, captured) = thread::scope(|scope| {
            let capturing = thread::Builder::new().spawn_scoped(scope, || {
                capture.run(
                    &called_off,
                    |name, pipe| receive(name, &pipe),
                    stopped,
                    |_| {
                        held.store(true, Ordering::Relaxed);
                        let done = frozen();
                        held.store(false, Ordering::Relaxed);
                        done
                    },
                )
            });
            // Without it, CRIU finds no peer and ends.
            let ended = self.watch_over(&tool, &held);
            // Cancels the capture, which makes CRIU release the tasks; no data comes through the stream afterwards.
            drop(call_off);
            if ended.is_err() {
                put_an_end_to(&tool);
            }
            let captured = match capturing {
                Ok(thread) => thread.join(),
                Err(error) => Ok(Err(CaptureError::Threads(error.into()))),
            };
            (ended, captured)
        });
        let Ok(captured) = captured else {
            return self.failed(SnapshotError::Panicked);
        };
        Dumped {
            killed: !matches!(ended, Ok(Ended::Exited(_))),
            result: outcome((&self.log, &self.printed), ended, captured),
            log: Arc::clone(&self.log),
        }
    }

    fn failed(&self, error: SnapshotError) -> Dumped {
        Dumped {
            result: Err(error),
            killed: true,
            log: Arc::clone(&self.log),
        }
    }

    /// Waits for CRIU within `snapshot.timeout`, not counting the time in which ckpt-run holds it. If a process dies
    /// while CRIU works on it, CRIU may wait for it forever (4.2.1: `wait4` of a thread group whose other dead threads
    /// it traces too), and is killed. It is also killed if its code in a process, whose answer it awaits, has caused a
    /// fault.
    fn watch_over(&self, tool: &ToolRun<'_>, held: &AtomicBool) -> Result<Ended, SandboxError> {
        let mut deadline = clock::now() + self.limit;
        let mut seen = None;
        loop {
            let left = deadline.saturating_duration_since(clock::now());
            match tool.wait(left.min(LOOK_INTERVAL)) {
                Err(SandboxError::Slow(_)) if held.load(Ordering::Relaxed) => {
                    deadline = clock::now() + self.limit;
                }
                Err(SandboxError::Slow(_)) if left > LOOK_INTERVAL => {}
                Err(SandboxError::Slow(_)) => return Err(SandboxError::Slow(self.limit)),
                ended => return ended,
            }
            let processes = job::tree(self.root).unwrap_or_default();
            let fault = job::stopped_by_fault(&processes);
            // At one look alone it may be a fault of the job about which CRIU is about to ask.
            let is_stuck = fault.is_some() && fault == seen;
            seen = fault;
            if is_stuck || job::died_under_trace(&processes) {
                if let Some((thread, signal)) = fault.filter(|_| is_stuck) {
                    tracing::warn!(
                        thread,
                        %signal,
                        "CRIU's code in the job has caused a fault, from which the job may not recover; please report it"
                    );
                }
                tool.kill()?;
                return tool.wait(KILL_LIMIT);
            }
        }
    }
}

impl Drop for CriuDump<'_> {
    fn drop(&mut self) {
        // CRIU exits when there is no peer to request the tasks from.
        drop(self.capture.take());
        if let Some(tool) = self.tool.take() {
            put_an_end_to(&tool);
        }
    }
}

/// Waits for a cancelled CRIU. If it does not exit, it is killed: the kernel then releases the tasks.
fn put_an_end_to(tool: &ToolRun<'_>) {
    if tool.wait(CALL_OFF_LIMIT).is_err() && tool.kill().is_ok() {
        // The snapshot has failed, regardless of how CRIU exits.
        let _ = tool.wait(KILL_LIMIT);
    }
}

/// Returns the outcome of the dump, from both ends of the stream.
fn outcome(
    (log, printed): (&CriuLog, &File),
    ended: Result<Ended, SandboxError>,
    captured: Result<Captured, CaptureError<SnapshotError>>,
) -> Result<Captured, SnapshotError> {
    match (ended, captured) {
        (Ok(Ended::Exited(0)), Ok(captured)) => Ok(captured),
        // The failure of the receiving end is the cause of CRIU's.
        (_, Err(CaptureError::Receiver(error))) => Err(error),
        (_, Err(CaptureError::Threads(error))) => Err(error.into()),
        (Ok(Ended::Exited(0)), Err(error)) => {
            Err(SnapshotError::Stream(io::Error::other(error.to_string())))
        }
        (Ok(ended), _) => Err(SnapshotError::Criu {
            reason: why(&log.path(), log.kept(), ended, Some(printed)),
            passes: reports_passing(&log.path()),
        }),
        (Err(SandboxError::Slow(limit)), _) => Err(SnapshotError::Slow(limit)),
        (Err(error), _) => Err(error.into()),
    }
}
