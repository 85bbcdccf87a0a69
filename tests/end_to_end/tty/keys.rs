//! Keys: those for the job, those that end or stop it, and line editing.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::screen::{COUNT, ECHO, Screen, at_terminal};
use crate::harness::{
    Place, apply, as_root, descendants, name_of, state, wait_until, wait_until_or,
};

#[apply(as_root)]
fn ctrl_c_ends_the_job_with_130_and_ctrl_backslash_with_131() {
    for (key, code) in [("\x03", 130), ("\x1c", 131)] {
        let place = Place::new();
        let screen = Screen::new(24, 80);
        let mut run = screen.start(&place, &["--", "sh", "-c", "echo ready; exec sleep 1000"]);
        screen.wait_for("ready");
        screen.wait_until_raw();
        // With the image, a crash would lead to a restore.
        place.snapshot();
        screen.types(key);
        assert_eq!(run.wait(), code, "{}", screen.text());
        assert!(!screen.text().contains("restoring"), "{}", screen.text());
        screen.assert_modes_are_back();
    }
}

#[apply(as_root)]
fn ctrl_c_reaches_the_foreground_and_may_be_survived() {
    let place = Place::new();
    let screen = Screen::new(24, 80);
    let script =
        "trap 'echo caught' INT; echo ready; sleep 1000; echo went on; read line; echo got $line";
    let mut run = screen.start(&place, &["--", "sh", "-c", script]);
    screen.wait_for("ready");
    screen.wait_until_raw();
    // A shell's child that has not executed its program yet would take the signal for the shell's trap.
    wait_until("the child", || {
        let mut children = descendants(run.job()).into_iter();
        children.any(|pid| name_of(pid) == "sleep")
    });
    screen.types("\x03");
    screen.wait_for("went on");
    screen.types("it\r");
    assert_eq!(run.wait(), 0, "{}", screen.text());
    screen.wait_for("got it");
    assert!(screen.text().contains("caught"));
}

#[apply(as_root)]
fn lines_are_edited_and_echoed_by_the_jobs_terminal() {
    let (_place, screen, mut run) = at_terminal(ECHO, "ready");
    screen.types("wrong\x7f\x7f\x7f\x7f\x7fright\r");
    screen.wait_for("heard right");
    screen.types("end\r");
    assert_eq!(run.wait(), 0, "{}", screen.text());
}

#[apply(as_root)]
fn the_end_of_input_is_typed() {
    let (_place, screen, mut run) = at_terminal(ECHO, "ready");
    screen.types("\x04");
    assert_eq!(run.wait(), 0, "{}", screen.text());
}

#[apply(as_root)]
fn ctrl_z_stops_both_and_fg_lets_both_go_on() {
    let place = Place::new();
    let screen = Screen::new(24, 80);
    fs::write(place.file("job.py"), COUNT).unwrap();
    // A shell without line editing does not change the terminal's modes, so all changes are ckpt-run's.
    let mut shell = place.command(&[]);
    let program = shell.get_program().to_owned();
    shell = {
        let mut real = std::process::Command::new("sh");
        real.arg("-i").env("PS1", "shell> ");
        for (name, value) in shell.get_envs() {
            if let Some(value) = value {
                real.env(name, value);
            }
        }
        real
    };
    let run = screen.start_command(&place, &shell);
    screen.wait_for("shell> ");
    screen.types(&format!("{} -- python3 job.py\r", program.display()));
    screen.wait_for("count 3");
    screen.wait_until_raw();
    let ours = descendants(run.pid())[0];
    for round in 1..4 {
        screen.types("\x1a");
        screen.wait_until("a stop", |text| {
            text.matches("Stopped").count() == 2 * round - 1
        });
        screen.assert_modes_are_back();
        let job = run.job();
        wait_until("both to stand", || is_stopped(ours) && is_stopped(job));
        // In the background it runs, and the terminal is the shell's.
        screen.types("bg\r");
        wait_until("both to go on", || !is_stopped(ours) && !is_stopped(job));
        let shown = screen.text().lines().count();
        screen.wait_until("more", |text| text.lines().count() > shown + 5);
        assert!(!screen.is_raw(), "{}", screen.text());
        screen.types("fg\r");
        screen.wait_until_raw();
        screen.types("\x1a");
        screen.wait_until("a stop", |text| {
            text.matches("Stopped").count() == 2 * round
        });
        screen.types("fg\r");
        screen.wait_until_raw();
    }
    screen.types("\x03");
    // What is shown may be older than the modes: without the job's last words, this could be an earlier prompt.
    screen.wait_until("the shell", |text| {
        text.contains("KeyboardInterrupt") && text.ends_with("shell> ")
    });
    screen.types("echo code=$?\r");
    screen.wait_for("code=130");
    screen.assert_modes_are_back();
}

fn is_stopped(pid: i32) -> bool {
    state(pid) == Some('T')
}

#[apply(as_root)]
fn ctrl_z_without_a_shell_stops_nothing() {
    let (_place, screen, mut run) = at_terminal(ECHO, "ready");
    screen.types("\x1astill here\r");
    screen.wait_for("heard still here");
    screen.types("end\r");
    assert_eq!(run.wait(), 0, "{}", screen.text());
}

#[apply(as_root)]
fn a_shell_in_the_terminal_has_job_control() {
    let place = Place::new();
    let screen = Screen::new(24, 80);
    let mut run = screen.start(
        &place,
        &["--", "env", "PS1=inner> ", "bash", "--norc", "-i"],
    );
    screen.wait_for("inner> ");
    // Before that, the caller's terminal would take Ctrl-Z for ckpt-run.
    screen.wait_until_raw();
    screen.types("sleep 1000\r");
    let job = run.job();
    // By then it has the terminal.
    wait_until("the sleep", || {
        descendants(job).iter().any(|pid| name_of(*pid) == "sleep")
    });
    screen.types("\x1a");
    screen.wait_for("Stopped");
    place.snapshot();
    kill(Pid::from_raw(job), Signal::SIGKILL).unwrap();
    screen.wait_for("ckpt-run: restored");
    screen.wait_until_raw();
    // Its stopped job comes to the foreground, and Ctrl-C hits the job and not the shell.
    screen.types("jobs; fg\r");
    screen.wait_until("the job", |text| text.matches("sleep 1000").count() >= 3);
    let shell = run.job();
    wait_until_or(
        || format!("the sleep to go on: {}", screen.text()),
        || descendants(shell).iter().any(|pid| !is_stopped(*pid)),
    );
    screen.types("\x03");
    screen.types("echo $((6*7))\r");
    screen.wait_for("42");
    screen.types("exit 9\r");
    assert_eq!(run.wait(), 9, "{}", screen.text());
}
