//! Properties of the machine, under random events.

use std::cell::Cell;
use std::time::Duration;

use nix::sys::signal::Signal;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config as Cases, TestRunner};

use super::stage::Beginning;
use super::world::{Ending, Life, Work, World};
use crate::config::{Config, HangAction, Interval, RestartLimit, RestartPolicy, WithoutImage};
use crate::run::run_state::Progress;
use crate::snapshot::take_snapshot::Afterwards;

/// Number of cases, and limit on the steps of each: more than [`EVENTS_MIN`] events together.
const CASES: u32 = 2000;
const STEPS: usize = 1000;
const EVENTS_MIN: u64 = 100_000;

/// A step of the world.
#[derive(Clone, Debug)]
enum Step {
    Pass(Duration),
    Signal(Signal),
    Interrupt,
    LoseLease,
    Preempt(Duration),
    Request(Afterwards),
    Unpause,
    ExitJob(i32),
    KillSandbox,
    Report,
    Suspect(Duration),
    LateDiagnosis,
    Release,
    End(usize, Ending),
    Forget,
    Store(bool),
}

/// Makes a step of a random number: cheaper than a strategy for each step. The first steps are the simplest.
fn step(random: u32) -> Step {
    let choice = random >> 8;
    let pick = |count: u32| choice as usize % count as usize;
    let times = [1, 100, 1000, 5000, 31_000, 400_000];
    let signals = [
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGINT,
        Signal::SIGTSTP,
        Signal::SIGCONT,
        Signal::SIGWINCH,
        Signal::SIGTERM,
    ];
    let afterwards = [Afterwards::Continue, Afterwards::Pause, Afterwards::Stop];
    let endings = [
        Ending::Success,
        Ending::Success,
        Ending::Passing,
        Ending::Lasting,
        Ending::Lost,
    ];
    match random % 64 {
        0..8 => Step::Pass(Duration::from_millis(times[pick(6)])),
        8..20 => Step::Report,
        20..44 => Step::End(choice as usize / 5, endings[pick(5)]),
        44..48 => Step::Request(afterwards[pick(2)]),
        48..51 => Step::Unpause,
        51..54 => Step::Release,
        54..56 => Step::ExitJob(1),
        56 => Step::KillSandbox,
        57..59 => Step::Suspect(Duration::from_secs(u64::from(choice) % 3)),
        59 => Step::LateDiagnosis,
        60 if choice.is_multiple_of(5) => Step::LoseLease,
        60 if choice % 5 == 1 => Step::Preempt(Duration::from_millis(times[pick(6)])),
        60 => Step::Forget,
        61 => Step::Store(!choice.is_multiple_of(5)),
        62 => match choice % 4 {
            0 => Step::ExitJob(0),
            1 => Step::Request(afterwards[2]),
            _ => Step::Interrupt,
        },
        _ => Step::Signal(signals[pick(7)]),
    }
}

fn settings() -> impl Strategy<Value = Config> {
    (
        select(vec![
            RestartLimit::Auto,
            RestartLimit::Times(2),
            RestartLimit::Unlimited,
            RestartLimit::Unlimited,
        ]),
        select(vec![RestartPolicy::OnFailure, RestartPolicy::Always]),
        select(vec![WithoutImage::Start, WithoutImage::GiveUp]),
        select(vec![
            Interval::Auto,
            Interval::Every(Duration::from_secs(60)),
            Interval::Never,
        ]),
    )
        .prop_map(|(max, policy, without_image, interval)| {
            let mut settings = Config::default();
            settings.restart.max = max;
            settings.restart.policy = policy;
            settings.restart.without_image = without_image;
            settings.snapshot.interval = interval;
            settings.hang.action = HangAction::Restore;
            settings
        })
}

fn take(world: &mut World, step: &Step) {
    match step {
        Step::Pass(time) => world.pass(*time),
        Step::Signal(signal) => world.signal(*signal),
        Step::Interrupt => world.interrupt(),
        Step::LoseLease => world.lose_lease(),
        Step::Preempt(left) => world.preempt(*left),
        Step::Request(afterwards) => world.request_snapshot(*afterwards),
        Step::Unpause => world.request_unpause(),
        Step::ExitJob(code) => world.exit_job(*code),
        Step::KillSandbox => world.kill_sandbox(),
        Step::Report => world.report(),
        Step::Suspect(quiet) => world.suspect(*quiet),
        Step::LateDiagnosis => world.end_late_diagnosis(),
        Step::Release => world.release(),
        Step::End(work, ending) => {
            let works = world.works();
            if !works.is_empty() {
                world.end(works[work % works.len()], *ending);
            }
        }
        Step::Forget => world.forget_image(),
        Step::Store(answers) => world.store_answers = *answers,
    }
}

/// Lets everything end that is under way: every client gets its answer.
fn settle(world: &mut World) {
    world.store_answers = true;
    for _ in 0..200 {
        if world.over || !world.owes_answers() && world.works().is_empty() {
            return;
        }
        world.report();
        for work in world.works() {
            world.end(work, Ending::Success);
        }
        world.pass(Duration::from_secs(1));
    }
    assert!(!world.owes_answers(), "an answer is owed");
}

#[test]
fn a_computing_job_needs_no_list_of_images() {
    let mut settings = Config::default();
    settings.snapshot.interval = Interval::Every(Duration::from_secs(60));
    let mut world = World::new(settings, Beginning::Start, 3);
    world.end(Work::Start, Ending::Success);
    let lists_read = world.lists_read.get();
    for signal in [Signal::SIGWINCH, Signal::SIGCONT, Signal::SIGTSTP] {
        world.signal(signal);
    }
    world.pass(Duration::from_secs(61));
    assert_eq!(world.works(), [Work::Snapshot], "the scheduled snapshot");
    world.release();
    world.interrupt();
    world.signal(Signal::SIGINT);
    world.request_snapshot(Afterwards::Continue);
    world.machine.status(world.now);
    assert_eq!(world.lists_read.get(), lists_read);
    world.end(Work::Snapshot, Ending::Success);
    assert!(world.lists_read.get() > lists_read, "old images are gone");
}

#[test]
fn sigterm_during_the_start_saves_what_was_computed() {
    let mut world = World::new(Config::default(), Beginning::Start, 0);
    world.signal(Signal::SIGTERM);
    assert_eq!(world.works(), [Work::Start]);
    world.end(Work::Start, Ending::Success);
    assert_eq!(world.works(), [Work::Snapshot]);
    world.end(Work::Snapshot, Ending::Success);
    world.report();
    world.end(Work::Drain, Ending::Success);
    assert!(world.over);
    assert_eq!(world.machine.state().progress, Progress::Saved);
}

#[test]
fn a_notice_leaves_time_for_the_snapshot_and_its_sigterm() {
    let mut world = World::new(Config::default(), Beginning::Start, 0);
    world.end(Work::Start, Ending::Success);
    world.preempt(Duration::from_secs(25));
    assert_eq!(world.works(), [Work::Snapshot]);
    // The machine shuts down: this is the first SIGTERM.
    world.pass(Duration::from_secs(5));
    world.signal(Signal::SIGTERM);
    world.pass(Duration::from_secs(15));
    assert_eq!(world.life, Life::Alive, "the snapshot has its time");
    world.end(Work::Snapshot, Ending::Success);
    world.report();
    world.end(Work::Drain, Ending::Success);
    assert!(world.over);
    assert_eq!(world.machine.state().progress, Progress::Saved);
}

#[test]
fn a_second_sigterm_after_a_notice_stops_at_once() {
    let mut world = World::new(Config::default(), Beginning::Start, 0);
    world.end(Work::Start, Ending::Success);
    world.preempt(Duration::from_secs(25));
    for _ in 0..2 {
        world.pass(Duration::from_secs(1));
        world.signal(Signal::SIGTERM);
    }
    assert_eq!(world.life, Life::Killed);
}

#[test]
fn a_notice_after_its_time_still_permits_a_snapshot() {
    let mut world = World::new(Config::default(), Beginning::Start, 0);
    world.end(Work::Start, Ending::Success);
    world.preempt(Duration::ZERO);
    world.pass(Duration::from_secs(9));
    assert_eq!(world.works(), [Work::Snapshot]);
    assert_eq!(world.life, Life::Alive);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.life, Life::Killed);
}

#[test]
fn random_events_break_no_rule() {
    let events = Cell::new(0);
    let mut runner = TestRunner::new(Cases {
        // PROPTEST_CASES asks for more.
        cases: CASES.max(Cases::default().cases),
        source_file: Some(file!()),
        max_shrink_iters: 20_000,
        ..Cases::default()
    });
    let run = (
        settings(),
        0_u64..4,
        any::<bool>(),
        prop::collection::vec(any::<u32>().prop_map(step), 1..=STEPS),
    );
    let result = runner.run(&run, |(settings, images, begun, steps)| {
        let beginning = if begun {
            Beginning::Restore
        } else {
            Beginning::Start
        };
        let begin = || World::new(settings.clone(), beginning, images);
        let mut world = begin();
        for step in &steps {
            if world.over {
                // The steps that are left are those of another run.
                events.set(events.get() + world.events);
                world = begin();
            }
            take(&mut world, step);
        }
        settle(&mut world);
        events.set(events.get() + world.events);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
    let events = events.get();
    println!("{events} events");
    assert!(events >= EVENTS_MIN, "only {events} events");
}
