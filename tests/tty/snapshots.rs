//! Snapshots and restores of jobs in a terminal.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{Place, can_run, wait_until};
use crate::support::{Screen, at_terminal, lines_of};
use crate::{COUNT, ECHO};

/// What a counting job has said, each number once and in order.
fn assert_counted(text: &str, at_least: usize) {
    let said = lines_of(text, "count ");
    assert!(said.len() >= at_least, "{text}");
    let expected: Vec<String> = (0..said.len()).map(|i| format!("count {i}")).collect();
    assert_eq!(said, expected, "{text}");
}

#[test]
fn a_restored_job_goes_on_in_its_terminal_with_nothing_lost_or_repeated() {
    if !can_run() {
        return;
    }
    for isolation in ["namespaces", "none"] {
        let place = Place::new();
        let screen = Screen::new(24, 80);
        fs::write(place.file("job.py"), COUNT).unwrap();
        let options = ["--isolation", isolation, "--", "python3", "job.py"];
        let mut run = screen.start(&place, &options);
        screen.wait_for("count 5");
        place.snapshot();
        let shown = lines_of(&screen.text(), "count ").len();
        screen.wait_for(&format!("count {}", shown + 10));
        kill(Pid::from_raw(first_python(&run)), Signal::SIGKILL).unwrap();
        screen.wait_for("ckpt-run: restored");
        screen.wait_for(&format!("count {}", shown + 30));
        screen.wait_until_raw();
        screen.types("\x03");
        assert_eq!(run.wait(), 130, "{}", screen.text());
        assert_counted(&screen.text(), shown + 30);
    }
}

/// The job's process, in a namespace of its own or not.
fn first_python(run: &crate::common::Run) -> i32 {
    let mut found = None;
    wait_until("the job", || {
        let mut all = crate::common::descendants(run.pid()).into_iter();
        found = all.find(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.starts_with("python")
        });
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn a_restored_job_has_its_terminal_as_before() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let screen = Screen::new(24, 80);
    // Modes of its own, its terminal open by name, and the window asked for when told.
    let script = r#"
import os, select, signal, sys, termios, time
modes = termios.tcgetattr(0); modes[3] &= ~termios.ECHO; termios.tcsetattr(0, termios.TCSANOW, modes)
own = open("/dev/tty", "w")
os.set_blocking(2, False)
child = os.fork()
if child == 0:
    while True: time.sleep(1)
print("ready", flush=True)
while True:
    select.select([0], [], [])
    os.read(0, 100)
    size = os.get_terminal_size()
    print("echo", bool(termios.tcgetattr(0)[3] & termios.ECHO), "size", size.lines, size.columns,
          "foreground", os.tcgetpgrp(0) == os.getpgrp(), "session", os.getsid(0) == os.getpid(), "blocking", os.get_blocking(0), flush=True)
    own.write("by name\n"); own.flush()
"#;
    fs::write(place.file("job.py"), script).unwrap();
    let mut run = screen.start(&place, &["--", "python3", "job.py"]);
    screen.wait_for("ready");
    screen.wait_until_raw();
    place.snapshot();
    run.crash();
    // Meanwhile the window changes.
    screen.resize(40, 100);
    screen.wait_for("ckpt-run: restored");
    screen.wait_until_raw();
    screen.types("tell\r");
    screen.wait_for("echo False size 40 100 foreground True session True blocking False");
    screen.wait_for("by name");
    screen.types("\x03");
    assert_eq!(run.wait(), 130, "{}", screen.text());
}

#[test]
fn a_killed_run_goes_on_at_another_terminal_and_with_none() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let first = Screen::new(24, 80);
    fs::write(place.file("job.py"), COUNT).unwrap();
    let line = ["--", "python3", "job.py"];
    let run = first.start(&place, &line);
    first.wait_for("count 5");
    place.snapshot();
    kill(Pid::from_raw(run.pid()), Signal::SIGKILL).unwrap();
    drop(run);

    let second = Screen::new(30, 90);
    let mut run = second.start(&place, &line);
    second.wait_for("ckpt-run: restored");
    second.wait_until("more", |text| lines_of(text, "count ").len() > 5);
    run.signal(Signal::SIGUSR2);
    assert_eq!(run.wait(), 75, "{}", second.text());

    // As under nohup or cron: what the job says goes to our stdout, from the snapshot on.
    let mut run = place.start(&[], &["python3", "job.py"]);
    let last = lines_of(&second.text(), "count ").len();
    place.wait_for("err", "restored");
    wait_until("more", || lines_of(&place.text("out"), "count ").len() > 10);
    run.signal(Signal::SIGUSR2);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let number = |line: &String| line["count ".len()..].trim().parse::<usize>().unwrap();
    let (before, after) = (
        lines_of(&second.text(), "count "),
        lines_of(&place.text("out"), "count "),
    );
    assert_eq!(number(&after[0]), number(&before[last - 1]) + 1);
}

#[test]
fn a_job_without_a_terminal_is_restored_without_one() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let script = format!("import os; print('ttys', os.isatty(1), flush=True)\n{COUNT}\n");
    fs::write(
        place.file("job.py"),
        script.replace("\"count\", i,", "\"count\", i, os.isatty(1),"),
    )
    .unwrap();
    let mut run = place.start(&[], &["python3", "job.py"]);
    place.wait_for("out", "count 3 False");
    run.signal(Signal::SIGUSR2);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let screen = Screen::new(24, 80);
    let mut run = screen.start(&place, &["--", "python3", "job.py"]);
    screen.wait_for("ckpt-run: restored");
    screen.wait_until("more", |text| lines_of(text, "count ").len() > 5);
    assert!(!screen.is_raw());
    screen.types("\x03");
    assert_eq!(run.wait(), 130, "{}", screen.text());
    assert!(!screen.text().contains("True"), "{}", screen.text());
}

#[test]
fn what_is_typed_after_a_restore_is_heard() {
    if !can_run() {
        return;
    }
    let (place, screen, mut run) = at_terminal(ECHO, "ready");
    screen.types("one\r");
    screen.wait_for("heard one");
    place.snapshot();
    screen.types("two\r");
    screen.wait_for("heard two");
    run.crash();
    // An end of input in between is not the job's.
    screen.wait_until("the caller's modes", |_| !screen.is_raw());
    screen.types("\x04");
    screen.wait_for("ckpt-run: restored");
    screen.wait_until_raw();
    screen.types("three\r");
    screen.wait_for("heard three");
    screen.types("end\r");
    assert_eq!(run.wait(), 0, "{}", screen.text());
    // What was typed before the crash is not typed again.
    assert_eq!(screen.text().matches("heard two").count(), 1);
}

#[test]
fn an_interpreter_with_line_editing_is_restored() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let screen = Screen::new(24, 80);
    let mut run = screen.start(&place, &["--", "python3", "-q", "-i"]);
    screen.wait_for(">>> ");
    screen.wait_until_raw();
    screen.types("x = 40\r");
    screen.wait_until("a prompt", |text| text.matches(">>> ").count() >= 2);
    place.snapshot();
    run.crash();
    screen.wait_for("ckpt-run: restored");
    screen.wait_until_raw();
    // Cursor left and insert: the keys go to the interpreter's own editor.
    screen.types("print('sum', x + )\x1b[D2\r");
    screen.wait_for("sum 42");
    screen.types("exit(0)\r");
    assert_eq!(run.wait(), 0, "{}", screen.text());
}
