//! Tests of one hook, with real commands.

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::*;

fn heard(line: &str, timeout: Duration) -> (Outcome, Vec<String>) {
    let call = Call {
        occasion: Occasion::AfterSnapshot,
        command: HookCommand::Shell(line.to_owned()),
        leash: Arc::new(Leash::new(timeout)),
        lines_max: LINES_MAX,
        directory: "/".into(),
        facts: vec![("CKPT_RUN_IMAGE", "000007".into())],
    };
    let mut said = Vec::new();
    let ended = run(&call, |line| said.push(line.to_owned()));
    (ended.outcome, said)
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn what_a_hook_prints_is_heard_line_by_line() {
    let (outcome, said) = heard(
        "echo $CKPT_RUN_IMAGE; echo >&2 two; printf 'th\\033ree'",
        LONG,
    );
    assert_eq!(outcome, Outcome::Done);
    assert_eq!(said, ["000007", "two", "th ree"]);
}

#[test]
fn exit_codes_are_told_apart() {
    assert_eq!(heard("exit 75", LONG).0, Outcome::Veto);
    assert_eq!(
        heard("exit 3", LONG).0,
        Outcome::Failed("exit status: 3".to_owned())
    );
    assert!(matches!(heard("kill -9 $$", LONG).0, Outcome::Failed(_)));
}

#[test]
fn a_program_that_is_not_there_is_a_failure() {
    let call = Call {
        occasion: Occasion::OnHang,
        command: HookCommand::Words(vec!["/no/such".to_owned()]),
        leash: Arc::new(Leash::new(LONG)),
        lines_max: LINES_MAX,
        directory: "/".into(),
        facts: Vec::new(),
    };
    let ended = run(&call, |_| {});
    assert!(matches!(ended.outcome, Outcome::Failed(why) if why.contains("No such file")));
}

#[test]
fn a_hook_that_takes_too_long_is_killed_with_its_group() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let line = format!("sleep 1000 & echo $! > {}; wait", file.display());
    // Long enough for the shell to come so far.
    let mut timeouts = (0..8).map(|turn| Duration::from_millis(500 << turn));
    let child: i32 = timeouts
        .find_map(|timeout| {
            assert_eq!(heard(&line, timeout).0, Outcome::TimedOut);
            std::fs::read_to_string(&file).ok()?.trim().parse().ok()
        })
        .unwrap();
    let begun = clock::now();
    while crate::job::is_alive(child) {
        assert!(begun.elapsed() < LONG, "the hook's child lives on");
        std::thread::yield_now();
    }
}

/// A hook that would take long, whose time `change` shortens or ends once it runs.
fn with_its_leash(change: impl Fn(&Leash)) -> Outcome {
    let leash = Arc::new(Leash::new(LONG * 60));
    let call = Call {
        occasion: Occasion::BeforeSnapshot,
        command: HookCommand::Shell("echo runs; sleep 1000".to_owned()),
        leash: Arc::clone(&leash),
        lines_max: LINES_MAX,
        directory: "/".into(),
        facts: Vec::new(),
    };
    run(&call, |_| change(&leash)).outcome
}

#[test]
fn a_hook_s_time_may_be_shortened_while_it_runs_but_not_extended() {
    let outcome = with_its_leash(|leash| {
        leash.shorten(Duration::from_millis(10));
        leash.shorten(LONG * 60);
    });
    assert_eq!(outcome, Outcome::TimedOut);
}

#[test]
fn a_hook_that_nobody_waits_for_is_killed_once_and_does_not_start() {
    let outcome = with_its_leash(|leash| assert!(leash.kill() && !leash.kill()));
    assert!(matches!(outcome, Outcome::Failed(why) if why.contains("SIGKILL")));
    let leash = Leash::new(LONG);
    assert!(leash.kill());
    assert!(leash.start(&mut Command::new("true")).is_err());
}

#[test]
fn a_hook_has_ended_though_somebody_else_holds_its_output() {
    let (outcome, said) = heard("sleep 1000 & echo $!", LONG);
    assert_eq!((outcome, said.len()), (Outcome::Done, 1));
    let other = Pid::from_raw(said[0].parse().unwrap());
    nix::sys::signal::kill(other, Signal::SIGKILL).expect("it still has it");
}

#[test]
fn a_hook_that_never_stops_printing_is_bounded_in_time_and_lines() {
    // Long enough for it to print more than that.
    let mut timeouts = (0..8).map(|turn| Duration::from_millis(300 << turn));
    let said = timeouts.find_map(|timeout| {
        let (outcome, said) = heard("yes; true", timeout);
        assert_eq!(outcome, Outcome::TimedOut);
        (said.len() >= LINES_MAX).then_some(said)
    });
    assert_eq!(said.map(|said| said.len()), Some(LINES_MAX));
    let (_, said) = heard("head -c 5000 /dev/zero | tr '\\0' x", LONG);
    assert_eq!(
        said.iter().map(String::len).collect::<Vec<_>>(),
        [LINE_BYTES_MAX; 5]
    );
}
