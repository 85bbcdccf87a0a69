//! Signals to the supervisor, from the user, the terminal and the scheduler.

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::harness::{
    COUNT, ON_REQUEST, Place, Run, UNTIL_GO, apply, as_root, as_root_and_user, descendants,
    is_dead, lines, program, state, wait_until,
};

/// Starts a job with a connection to the test, which prevents snapshots.
fn start_without_snapshots(place: &Place, options: &[&str], then: &str) -> (Run, UnixStream) {
    let listener = UnixListener::bind(place.file("outside")).unwrap();
    let script = format!(
        "import signal, socket, sys, time\n\
         outside = socket.socket(socket.AF_UNIX); outside.connect('outside')\n{then}\n\
         print('ready', flush=True)\n\
         while True: time.sleep(0.02)\n"
    );
    let run = place.start_python(options, &script);
    place.wait_for("out", "ready");
    let (outside, _) = listener.accept().unwrap();
    (run, outside)
}

#[apply(as_root_and_user)]
fn group_wide_sigusr1_takes_one_snapshot() {
    let place = Place::new();
    let mut run = place.start_python_with(&[], UNTIL_GO, |command| {
        command.process_group(0);
    });
    place.wait_for("out", "ready");
    killpg(Pid::from_raw(run.pid()), Signal::SIGUSR1).unwrap();
    wait_until("an image", || !place.images().is_empty());
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let images = place.images();
    assert_eq!(images.len(), 1);
    assert_eq!(images[0]["trigger"], "signal");
}

#[apply(as_root_and_user)]
fn signal_to_all_processes_lets_the_job_decide() {
    for signal in [Signal::SIGTERM, Signal::SIGHUP] {
        let place = Place::new();
        let handler = format!("signal.signal(signal.{signal}, lambda *_: sys.exit(5))");
        let mut run = place.start_python(
            &["--max-restarts", "0"],
            &UNTIL_GO.replace("print(", &format!("{handler}\nprint(")),
        );
        place.wait_for("out", "ready");
        for pid in descendants(run.pid()) {
            kill(Pid::from_raw(pid), signal).unwrap();
        }
        assert_eq!(run.wait(), 5, "{}", place.text("err"));
    }
}

#[apply(as_root_and_user)]
fn no_image_is_taken_of_a_job_that_a_signal_is_about_to_end() {
    let place = Place::new();
    // Large enough to freeze the job for some time, because it does not fit the buffer and is slow to compress.
    let script = UNTIL_GO.replace("print(", "memory = os.urandom(16 << 20).hex()\nprint(");
    let settings = "[snapshot]\nbuffer = '16MiB'\nlevel = 19\n";
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    let run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready");
    let job = run.job();
    run.signal(Signal::SIGUSR1);
    // During most of its dump, the job executes CRIU's code.
    wait_until("the freeze", || {
        fs::read_to_string(format!("/proc/{job}/maps")).is_ok_and(|maps| maps.contains("CRIUMFD"))
    });
    kill(Pid::from_raw(job), Signal::SIGTERM).unwrap();
    wait_until("the snapshot's end", || {
        place.text("err").contains("snapshot cancelled")
            || place.text("err").contains("snapshot failed")
    });
    assert!(place.images().is_empty());
}

/// Starts the following command with some signals ignored and others blocked, as `nohup`, systemd and others do.
const CALLER: &str = "
import os, signal, sys
for number in range(1, 65):
    if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33): signal.signal(number, signal.SIG_DFL)
for number in signal.SIGPIPE, signal.SIGUSR2, signal.SIGTERM, signal.SIGCHLD, signal.SIGRTMIN + 3:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGUSR1, signal.SIGRTMIN])
os.execvp(sys.argv[1], sys.argv[1:])";

#[apply(as_root)]
fn job_keeps_the_callers_signal_state_after_a_restore() {
    let place = Place::new();
    let show = "grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status";
    let script = format!("{show}; echo ready; while ! test -e go; do sleep 0.02; done; {show}");
    // dash would clear the mask.
    let job = ["bash", "-c", &script];
    let begin = |command: &[&str]| {
        let mut caller = std::process::Command::new("python3");
        caller.args(["-c", CALLER]).args(command);
        caller.current_dir(place.path());
        caller
    };
    let ours = [&[program()], &ON_REQUEST[..], &["--"], &job].concat();
    let mut run = place.spawn(begin(&ours), |_| {});
    place.wait_for("out", "ready");
    place.snapshot();
    run.crash();
    place.wait_for("err", "restored image");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let plain = begin(&job).output().unwrap();
    let expected = String::from_utf8(plain.stdout).unwrap();
    assert!(expected.contains("SigBlk:\t0000000200000200"), "{expected}");
    assert_eq!(place.text("out"), expected);
}

#[apply(as_root_and_user)]
fn a_script_can_trap_sigusr1_and_sigusr2() {
    let place = Place::new();
    let script =
        "trap 'echo got USR1' USR1; trap 'echo got USR2' USR2; kill -USR1 $$; kill -USR2 $$";
    let mut run = place.start(&ON_REQUEST, &["sh", "-c", script]);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "got USR1\ngot USR2\n");
}

#[apply(as_root_and_user)]
fn triggers_during_a_snapshot_become_one_more() {
    let place = Place::new();
    let mut run = place.start_ready(&[]);
    for _ in 0..20 {
        run.signal(Signal::SIGUSR1);
    }
    // Joins the second request or follows it.
    place.snapshot();
    let images = place.images().len();
    assert!((2..=3).contains(&images), "{images} images");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn terminal_signals_reach_the_job_without_a_snapshot() {
    for (number, (signal, name)) in (40..).zip([
        (Signal::SIGINT, "INT"),
        (Signal::SIGHUP, "HUP"),
        (Signal::SIGQUIT, "QUIT"),
    ]) {
        let place = Place::new();
        let script = format!(
            "trap 'echo got {name}; exit {number}' {name}; echo ready; while :; do sleep 0.05; done"
        );
        let mut run = place.start(&[], &["sh", "-c", &script]);
        place.wait_for("out", "ready");
        place.snapshot();
        run.signal(signal);
        assert_eq!(run.wait(), number, "{}", place.text("err"));
        assert_eq!(place.text("out"), format!("ready\ngot {name}\n"));
        assert_eq!(place.images().len(), 1);
        assert!(
            !place.text("err").contains("restor"),
            "{}",
            place.text("err")
        );
    }
}

#[apply(as_root_and_user)]
fn a_job_that_sigint_kills_ends_the_run_with_130() {
    let place = Place::new();
    let mut run = place.start(&[], &["sh", "-c", "echo ready; exec sleep 1000"]);
    place.wait_for("out", "ready");
    run.signal(Signal::SIGINT);
    assert_eq!(run.wait(), 130, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn a_stop_by_the_terminal_stops_the_job_too_and_both_go_on() {
    let place = Place::new();
    let mut run = place.start_python_with(&[], COUNT, |command| {
        command.process_group(0);
    });
    place.wait_for("log", "3\n");
    let job = run.job();
    // Repeated, because a signal may also hit a thread of ckpt-run in the middle of its work.
    for _ in 0..20 {
        stop_and_continue(&run, job);
    }
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

fn stop_and_continue(run: &Run, job: i32) {
    run.signal(Signal::SIGTSTP);
    wait_until("both to stop", || {
        state(run.pid()) == Some('T') && state(job) == Some('T')
    });
    run.signal(Signal::SIGCONT);
    wait_until("both to go on", || {
        state(run.pid()) != Some('T') && state(job) != Some('T')
    });
}

#[apply(as_root_and_user)]
fn a_stop_by_the_terminal_waits_for_the_end_of_a_snapshot() {
    let place = Place::new();
    let mut run = place.start_ready(&[]);
    run.signal(Signal::SIGUSR1);
    stop_and_continue(&run, run.job());
    place.snapshot();
    assert_eq!(place.images().len(), 2);
    assert!(!place.text("err").contains("snapshot failed"));
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn a_stop_by_the_terminal_while_no_job_runs_stops_us() {
    let place = Place::new();
    let mut run = place.start_with(&[], &["sh", "-c", "test -e go"], |command| {
        command
            .env("CKPT_RUN_RESTART_WITHOUT_IMAGE", "start")
            .env("CKPT_RUN_RESTART_BACKOFF", "30s");
    });
    place.wait_for("err", "it starts from the beginning");
    run.signal(Signal::SIGTSTP);
    wait_until("the stop", || state(run.pid()) == Some('T'));
    run.signal(Signal::SIGCONT);
    run.signal(Signal::SIGINT);
    assert_eq!(run.wait(), 130, "{}", place.text("err"));
}

#[apply(as_root)]
fn repeated_sigterms_leave_a_usable_store() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, COUNT);
    place.wait_for("log", "5\n");
    let job = run.job();
    while !run.has_ended() {
        run.signal(Signal::SIGTERM);
    }
    let code = run.wait();
    assert!(code == 75 || code == 143, "{code}: {}", place.text("err"));
    // No process waits for the killed sandbox.
    wait_until("the job's end", || is_dead(job));
    assert!(place.verb(&["verify"]).status.success());
    place.go();
    let mut run = place.start_python(&ON_REQUEST, COUNT);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
}

#[apply(as_root)]
fn saved_and_stopped_run_continues_when_rerun() {
    for signal in [Signal::SIGTERM, Signal::SIGUSR2] {
        let place = Place::new();
        let mut run = place.start_python(&ON_REQUEST, COUNT);
        place.wait_for("log", "5\n");
        let job = run.job();
        run.signal(signal);
        assert_eq!(run.wait(), 75, "{signal}: {}", place.text("err"));
        assert!(is_dead(job));
        let images = place.images();
        assert_eq!(images.len(), 1);
        assert_eq!(images[0]["trigger"], "stop");
        let saved = place.text("log");
        assert!(saved.len() < lines(40).len());

        place.go();
        let mut run = place.start_python(&ON_REQUEST, COUNT);
        assert_eq!(run.wait(), 0, "{signal}: {}", place.text("err"));
        assert_eq!(place.text("log"), lines(40));
        assert_eq!(place.text("out"), lines(40));
    }
}

#[apply(as_root)]
fn a_job_that_cannot_be_saved_gets_sigterm_and_ends_by_itself() {
    let place = Place::new();
    let then = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))";
    let (mut run, _outside) = start_without_snapshots(&place, &[], then);
    run.signal(Signal::SIGTERM);
    assert_eq!(run.wait(), 5, "{}", place.text("err"));
    assert!(place.images().is_empty());
}

#[apply(as_root)]
fn a_job_that_does_not_end_within_the_grace_period_is_killed() {
    let place = Place::new();
    let then = "signal.signal(signal.SIGTERM, signal.SIG_IGN)";
    let (mut run, _outside) = start_without_snapshots(&place, &["--grace", "2s"], then);
    let job = run.job();
    let asked = Instant::now();
    run.signal(Signal::SIGTERM);
    assert_eq!(run.wait(), 143, "{}", place.text("err"));
    assert!(asked.elapsed() >= Duration::from_secs(2));
    assert!(is_dead(job));
}

#[apply(as_root)]
fn a_second_sigterm_stops_at_once() {
    let place = Place::new();
    let then = "signal.signal(signal.SIGTERM, signal.SIG_IGN)";
    let (mut run, _outside) = start_without_snapshots(&place, &["--grace", "10m"], then);
    let job = run.job();
    run.signal(Signal::SIGTERM);
    place.wait_for("err", "sending SIGTERM");
    // A signal at the same time would have the same effect.
    wait_until("the end", || {
        run.signal(Signal::SIGTERM);
        is_dead(job)
    });
    assert_eq!(run.wait(), 143, "{}", place.text("err"));
    let said = place.text("err");
    assert!(said.contains("a second SIGTERM"), "{said}");
}

#[apply(as_root_and_user)]
fn the_same_sigterm_twice_saves_and_stops() {
    let place = Place::new();
    let run = place.start_python_with(&[], UNTIL_GO, |_| {});
    place.wait_for("out", "ready");
    // As `timeout` does: to its child, and to the process group of the child.
    let twice = format!("kill -TERM {0}; kill -TERM {0}", run.pid());
    assert!(
        std::process::Command::new("sh")
            .args(["-c", &twice])
            .status()
            .unwrap()
            .success()
    );
    let mut run = run;
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert_eq!(place.images().len(), 1);
}

#[apply(as_root)]
fn sigusr2_leaves_a_job_that_cannot_be_saved_running() {
    let place = Place::new();
    let (mut run, _outside) = start_without_snapshots(&place, &[], "");
    run.signal(Signal::SIGUSR2);
    place.wait_for("err", "snapshot failed; the job continues");
    assert!(!is_dead(run.job()));
    run.signal(Signal::SIGINT);
    // Python converts the signal to an exception, and that to its own death by the signal.
    assert_eq!(run.wait(), 130, "{}", place.text("err"));
}
