//! Kills (SIGKILL) of any process of a run at random moments: nothing is lost or duplicated.
//!
//! `tests/kills/run` runs many rounds of the same tests.

use std::collections::BTreeMap;
use std::env;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::chained_jobs::{Files, Job};
use super::counter_job::{Random, begin_snapshot, processes_with, send};
use crate::harness::{Place, Run, apply, as_root, descendants, inner_pid, wait_until};

/// Number of rounds with each job, unless `TEST_KILL_ROUNDS` is set.
const ROUNDS: usize = 6;
/// Durations of the operations: a snapshot takes about 300 ms, a dump and a restore about 100 ms each.
const SNAPSHOT_MS: u64 = 450;
const CRIU_MS: u64 = 100;
/// Time limit for the appearance of a process to be killed, which may have been too fast.
const APPEARS_MS_MAX: u64 = 3000;
/// Number of crashes after which the images would be tried one by one, and the run would end.
const CRASHES_MAX: usize = 2;

/// Process to be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    /// The job's first process.
    Job,
    /// Any process of the job.
    JobProcess,
    Supervisor,
    /// Pid 1 of the job's namespaces.
    Sandbox,
    CriuInDump,
    CriuInRestore,
    /// Process that watches the job's files.
    Watcher,
    /// Process that copies GPU memory.
    Copier,
}

impl Victim {
    const ALL: [Self; 8] = [
        Self::Job,
        Self::JobProcess,
        Self::Supervisor,
        Self::Sandbox,
        Self::CriuInDump,
        Self::CriuInRestore,
        Self::Watcher,
        Self::Copier,
    ];

    /// Chooses the next one; only a job with GPU memory has a copier.
    fn any(random: &mut Random, job: &Job) -> Self {
        let count = match job {
            Job::Chain(_) | Job::Pipe(_) => 7,
            Job::Gpu(..) => 8,
        };
        *random.one_of(&Self::ALL[..count])
    }

    /// Returns the candidates, of which one is killed.
    fn processes(self, run: &Run) -> Vec<i32> {
        match self {
            Self::Supervisor => vec![run.pid()],
            Self::Job => vec![run.job()],
            Self::JobProcess => {
                let job = run.job();
                [vec![job], descendants(job)].concat()
            }
            Self::Sandbox => descendants(run.pid())
                .into_iter()
                .rfind(|pid| inner_pid(*pid) == Some(1))
                .into_iter()
                .collect(),
            Self::CriuInDump => processes_with(run, "dump"),
            Self::CriuInRestore => processes_with(run, "restore"),
            Self::Watcher => processes_with(run, "__watch"),
            Self::Copier => processes_with(run, "gpu-copier"),
        }
    }
}

/// Number of kills per victim; processes that exited before are not counted.
type Tally = BTreeMap<String, usize>;

struct Scene {
    job: Job,
    place: Place,
    run: Run,
    crashes: usize,
}

impl Scene {
    fn start(mut job: Job) -> Self {
        let place = Place::new();
        let run = job.start(&place);
        let mut scene = Self {
            job,
            place,
            run,
            crashes: 0,
        };
        wait_until("the first line", || scene.reached() > 0);
        // Without an image a kill may end the run.
        scene.snapshot();
        scene
    }

    /// Returns the number of lines that the job has written.
    fn reached(&self) -> usize {
        let text = self.place.text(self.job.progress_file());
        text.lines().count()
    }

    fn is_done(&self) -> bool {
        self.job.is_done(&self.place)
    }

    fn snapshot(&mut self) {
        wait_until(&format!("a snapshot; {}", self.place.text("err")), || {
            self.place.verb(&["snapshot"]).status.success()
        });
        self.crashes = 0;
    }

    /// Kills a process at a random moment, and waits for the recovery.
    fn round(&mut self, random: &mut Random, tally: &mut Tally) {
        if self.crashes >= CRASHES_MAX || random.below(3) > 0 {
            self.snapshot();
        }
        let victim = Victim::any(random, &self.job);
        thread::sleep(Duration::from_millis(random.below(SNAPSHOT_MS)));
        let in_snapshot = victim == Victim::CriuInDump || random.below(3) == 0;
        let client = in_snapshot.then(|| begin_snapshot(&self.place));
        if victim == Victim::CriuInRestore {
            self.kill(Victim::Job, random);
        }
        let moment = match victim {
            Victim::CriuInDump | Victim::CriuInRestore => CRIU_MS,
            _ if in_snapshot => SNAPSHOT_MS,
            _ => 0,
        };
        self.await_any(victim);
        thread::sleep(Duration::from_millis(random.below(moment + 1)));
        let hit = self.kill(victim, random);
        let name = format!(
            "{victim:?}{}",
            if in_snapshot { " in a snapshot" } else { "" }
        );
        *tally
            .entry(if hit { name } else { "none".to_owned() })
            .or_default() += 1;
        if victim == Victim::Supervisor && hit {
            // The same command line, before or after the sandbox has exited.
            thread::sleep(Duration::from_millis(random.below(CRIU_MS)));
            assert_eq!(self.run.wait(), 137);
            self.run = self.job.start(&self.place);
        }
        if let Some(mut client) = client {
            client.wait().expect("the client ends");
        }
        if victim == Victim::Watcher && matches!(self.job, Job::Chain(Files::Watched)) {
            // Until then, restores are refused.
            self.snapshot();
        }
        self.computes();
    }

    /// Waits for a process of this kind, within the limit.
    fn await_any(&self, victim: Victim) {
        let end = Instant::now() + Duration::from_millis(APPEARS_MS_MAX);
        let criu = [Victim::CriuInDump, Victim::CriuInRestore].contains(&victim);
        while criu && Instant::now() < end {
            if !victim.processes(&self.run).is_empty() {
                return;
            }
        }
    }

    fn kill(&mut self, victim: Victim, random: &mut Random) -> bool {
        let found = victim.processes(&self.run);
        if found.is_empty() {
            return false;
        }
        send(*random.one_of(&found), Signal::SIGKILL);
        self.crashes += 1;
        true
    }

    /// Waits until the job has made progress.
    fn computes(&mut self) {
        let before = self.reached();
        wait_until(&format!("progress; {}", self.place.text("err")), || {
            let computes = self.reached() > before + 1 || self.is_done();
            let has_given_up = !computes && self.run.has_ended();
            assert!(!has_given_up, "{}", self.place.text("err"));
            computes
        });
    }
}

/// Runs a job for all rounds, to its end.
fn rounds_with(name: &str) {
    let given = env::var("TEST_KILL_ROUNDS").ok();
    let rounds = given.map_or(ROUNDS, |text| text.parse().expect("a number"));
    let (mut random, mut tally) = (Random::new(name), Tally::new());
    let mut scene = Scene::start(Job::named(name, rounds));
    for _ in 0..rounds {
        if scene.is_done() {
            break;
        }
        scene.round(&mut random, &mut tally);
    }
    let Scene {
        job,
        place,
        mut run,
        ..
    } = scene;
    job.finish(&place, &mut run);
    let killed = serde_json::to_string(&tally).expect("JSON");
    eprintln!("KILLED {killed}");
}

#[apply(as_root)]
fn random_kills_break_no_chain_of_output() {
    rounds_with("chain");
}

#[apply(as_root)]
fn random_kills_break_no_chain_of_files_that_the_settings_name() {
    rounds_with("included");
}

#[apply(as_root)]
fn random_kills_repeat_lines_of_a_dead_supervisor_in_a_pipe() {
    rounds_with("pipe");
}

#[apply(as_root)]
fn random_kills_change_no_memory_on_a_gpu() {
    rounds_with("gpu");
}
