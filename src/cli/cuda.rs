//! `ckpt-run cuda`: suspends and resumes single CUDA processes by their pids.
//!
//! The operations are in [`crate::cuda`]; this module has only texts, maps and exit codes.

use std::process::ExitCode;

use clap::Subcommand;
use nix::sys::signal::{SigSet, Signal};
use serde::Serialize;

use super::global::{Failure, Global};
use super::print;
use crate::cuda::{self, CallError, Driver, GpuMap, State, Step};
use crate::job;
use crate::run::chain;

mod agents;
mod cuda_arguments;
mod gpu_list;

use cuda_arguments::{Pids, Return, Stop, Toggle};

/// Exit code if the machine, the driver or a process refuses.
const REFUSED: u8 = 1;

/// The text below `--help` of the verb, in lines that fit a terminal of 100 columns.
pub(super) const HELP: &str = "\
Pids are those of this process's PID namespace. The output is the final state of each process.
`lock` and `suspend` act on all processes or none, so that ranks that wait for each other do not
deadlock. `checkpoint`, `restore` and `unlock` are the driver's single steps; they undo nothing.
Ctrl-C does not interrupt: a process whose checkpoint is interrupted is lost.

A --gpu-map names every GPU that was visible to the suspended process, also those that do not
change:
  ckpt-run cuda resume --pid 4711 --gpu-map GPU-A=GPU-B,GPU-B=GPU-A
The GPUs of a suspended process are unknown, so `auto` needs them (`ckpt-run show` prints those of
an image). GPUs that exist here do not change; missing ones are replaced by the other GPUs of this
machine, in its order:
  ckpt-run cuda resume --pid 4711 --gpu-map auto --from GPU-A,GPU-B

Exit codes:
  0 all processes are in the requested state; 1 one is not, or there is no GPU or no driver;
  125 the command line is wrong";

#[derive(Debug, Subcommand)]
pub(super) enum CudaVerb {
    /// List the driver, its features, and the GPUs with their UUIDs
    Gpus,
    /// Print the state of each process: running, locked, checkpointed or failed
    State(Pids),
    /// Print the id of the driver's restore thread in each process
    Tid(Pids),
    /// Wait for the GPU work of all processes, then block their CUDA calls
    Lock(Stop),
    /// Move the GPU memory of locked processes into their host memory
    Checkpoint(Pids),
    /// Move the GPU memory of checkpointed processes back; they stay locked
    Restore(Return),
    /// Allow CUDA calls of locked processes again
    Unlock(Pids),
    /// Suspend running processes, or resume suspended ones
    Toggle(Toggle),
    /// Lock and checkpoint; the processes stay suspended after this command
    Suspend(Stop),
    /// Restore and unlock
    Resume(Return),
}

/// A process after the verb; an element of the JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct Line {
    pid: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<i32>,
    /// The reason why the process is not in the expected state.
    error: Option<String>,
}

/// The result of a verb: the processes, and a failure that concerns all of them.
struct Outcome {
    lines: Vec<Line>,
    failure: Option<String>,
}

pub(super) fn run(global: &Global, verb: &CudaVerb) -> Result<ExitCode, Failure> {
    // Checked before the driver is used, so that a wrong command line is wrong on every machine.
    let onto = match verb {
        CudaVerb::Restore(arguments) | CudaVerb::Resume(arguments) => Some(&arguments.onto),
        CudaVerb::Toggle(arguments) => Some(&arguments.onto),
        CudaVerb::Gpus
        | CudaVerb::State(_)
        | CudaVerb::Tid(_)
        | CudaVerb::Lock(_)
        | CudaVerb::Checkpoint(_)
        | CudaVerb::Unlock(_)
        | CudaVerb::Suspend(_) => None,
    };
    let map = onto.map_or(Ok(GpuMap::default()), |onto| onto.map(gpu_list::here))?;
    let driver = Driver::load().map_err(|error| refused(&error))?;
    let outcome = match verb {
        CudaVerb::Gpus => return gpu_list::run(global, &driver),
        verb => act(&driver, verb, map)?,
    };
    if let Some(failure) = &outcome.failure {
        print::fail(failure);
    }
    for line in &outcome.lines {
        if let Some(error) = &line.error {
            print::fail(error);
        }
    }
    if global.json {
        print::print_json(&outcome.lines)?;
    } else {
        print::print(&outcome.text())?;
    }
    Ok(outcome.code())
}

/// Carries out the verb completely. `Gpus` concerns no process and does nothing.
fn act(driver: &Driver, verb: &CudaVerb, map: GpuMap) -> Result<Outcome, Failure> {
    // The driver answers about a stopped process only after it continues.
    if let Some(pid) = pids_of(verb).into_iter().find(|pid| job::is_stopped(*pid)) {
        return Err(Failure {
            text: format!(
                "process {pid} is stopped (SIGSTOP or a debugger): continue it, for example by kill -CONT {pid}"
            ),
            code: REFUSED,
        });
    }
    if let Some(pids) = suspended_by(verb)
        && let Err(error) = agents::ask(driver, &pids)
    {
        return Ok(Outcome {
            lines: states(driver, &pids),
            failure: Some(chain(&error)),
        });
    }
    match verb {
        CudaVerb::Gpus => Ok(Outcome::of(Vec::new())),
        CudaVerb::State(pids) => Ok(Outcome::of(states(driver, &pids.once()))),
        CudaVerb::Tid(pids) => Ok(Outcome::of(threads(driver, &pids.once()))),
        CudaVerb::Lock(Stop { pids, patience }) => {
            let pids = pids.once();
            hold_signals()?;
            let locked = cuda::lock_all(driver, &pids, &patience.options(&pids));
            let locked = locked.map(cuda::Locked::leave).map(|()| State::Locked);
            Ok(Outcome::after(driver, &pids, locked))
        }
        CudaVerb::Suspend(Stop { pids, patience }) => {
            let pids = pids.once();
            hold_signals()?;
            let suspended = cuda::suspend_all(driver, &pids, &patience.options(&pids));
            let suspended = suspended.map(|()| State::Checkpointed);
            Ok(Outcome::after(driver, &pids, suspended))
        }
        CudaVerb::Resume(Return { pids, .. }) => {
            let pids = pids.once();
            hold_signals()?;
            let resumed = cuda::resume_all(driver, &pids, &map).map(|()| State::Running);
            Ok(Outcome::after(driver, &pids, resumed))
        }
        CudaVerb::Toggle(Toggle { pids, patience, .. }) => {
            let pids = pids.once();
            hold_signals()?;
            let toggled = cuda::toggle_all(driver, &pids, &patience.options(&pids), &map);
            Ok(Outcome::after(driver, &pids, toggled))
        }
        CudaVerb::Checkpoint(pids) => step(driver, pids, &Step::Checkpoint, State::Checkpointed),
        CudaVerb::Restore(Return { pids, .. }) => {
            step(driver, pids, &Step::Restore(map), State::Locked)
        }
        CudaVerb::Unlock(pids) => step(driver, pids, &Step::Unlock, State::Running),
    }
}

/// Returns the processes whose GPU memory the verb may move to the host.
fn suspended_by(verb: &CudaVerb) -> Option<Vec<i32>> {
    match verb {
        CudaVerb::Checkpoint(pids)
        | CudaVerb::Suspend(Stop { pids, .. })
        | CudaVerb::Toggle(Toggle { pids, .. }) => Some(pids.once()),
        CudaVerb::Gpus
        | CudaVerb::State(_)
        | CudaVerb::Tid(_)
        | CudaVerb::Lock(_)
        | CudaVerb::Restore(_)
        | CudaVerb::Unlock(_)
        | CudaVerb::Resume(_) => None,
    }
}

fn pids_of(verb: &CudaVerb) -> Vec<i32> {
    match verb {
        CudaVerb::Gpus => Vec::new(),
        CudaVerb::State(pids)
        | CudaVerb::Tid(pids)
        | CudaVerb::Checkpoint(pids)
        | CudaVerb::Unlock(pids)
        | CudaVerb::Lock(Stop { pids, .. })
        | CudaVerb::Suspend(Stop { pids, .. })
        | CudaVerb::Toggle(Toggle { pids, .. })
        | CudaVerb::Restore(Return { pids, .. })
        | CudaVerb::Resume(Return { pids, .. }) => pids.once(),
    }
}

fn step(driver: &Driver, pids: &Pids, step: &Step, to: State) -> Result<Outcome, Failure> {
    let pids = pids.once();
    hold_signals()?;
    let failed = cuda::step_all(driver, &pids, step).map_err(|error| refused(&error))?;
    let mut lines = states(driver, &pids);
    for line in &mut lines {
        match failed.iter().find(|error| error.pid == line.pid) {
            Some(error) => line.error = Some(chain(error)),
            None => line.expect(to),
        }
    }
    Ok(Outcome::of(lines))
}

/// Blocks the signals that would end this process until it exits by itself: a process whose checkpoint or restore stops
/// half-way is lost.
fn hold_signals() -> Result<(), Failure> {
    let mut held = SigSet::empty();
    for signal in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        held.add(signal);
    }
    Ok(held.thread_block()?)
}

impl Line {
    fn expect(&mut self, wanted: State) {
        let wanted = wanted.to_string();
        if self.error.is_none() && self.state.as_ref() != Some(&wanted) {
            let state = self.state.as_deref().unwrap_or_default();
            self.error = Some(format!("process {} is {state}, not {wanted}", self.pid));
        }
    }
}

impl Outcome {
    fn of(lines: Vec<Line>) -> Self {
        Self {
            lines,
            failure: None,
        }
    }

    /// Returns the state of the processes after an operation on all of them.
    fn after(driver: &Driver, pids: &[i32], done: Result<State, cuda::TreeError>) -> Self {
        let mut lines = states(driver, pids);
        let failure = match done {
            Ok(wanted) => {
                for line in &mut lines {
                    line.expect(wanted);
                }
                None
            }
            Err(error) => Some(chain(&error)),
        };
        Self { lines, failure }
    }

    /// Returns a line for each process with a known state or thread.
    fn text(&self) -> String {
        let told = self.lines.iter().filter_map(|line| {
            let tid = line.tid.map(|tid| tid.to_string());
            Some((line.pid, line.state.clone().or(tid)?))
        });
        told.map(|(pid, told)| format!("{pid} {told}\n")).collect()
    }

    fn code(&self) -> ExitCode {
        let failed = self.failure.is_some() || self.lines.iter().any(|line| line.error.is_some());
        if failed {
            ExitCode::from(REFUSED)
        } else {
            ExitCode::SUCCESS
        }
    }
}

fn states(driver: &Driver, pids: &[i32]) -> Vec<Line> {
    let state = |&pid: &i32| {
        let (state, error) = told(driver.process(pid).state());
        Line {
            pid,
            state: state.map(|state| state.to_string()),
            tid: None,
            error,
        }
    };
    pids.iter().map(state).collect()
}

fn threads(driver: &Driver, pids: &[i32]) -> Vec<Line> {
    let thread = |&pid: &i32| {
        let (tid, error) = told(driver.process(pid).restore_thread());
        Line {
            pid,
            state: None,
            tid,
            error,
        }
    };
    pids.iter().map(thread).collect()
}

fn told<T>(result: Result<T, CallError>) -> (Option<T>, Option<String>) {
    match result {
        Ok(value) => (Some(value), None),
        Err(error) => (None, Some(chain(&error))),
    }
}

fn refused(error: &dyn std::error::Error) -> Failure {
    Failure {
        text: chain(error),
        code: REFUSED,
    }
}

#[cfg(test)]
mod tests;
