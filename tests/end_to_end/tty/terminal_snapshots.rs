//! Snapshots and restores of jobs in a terminal.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::screen::{COUNT, ECHO, Screen, at_terminal, lines_of};
use crate::harness::{Place, Run, apply, as_root, wait_for_descendant, wait_until};

/// Checks the output of a counting job: each number once and in order.
fn assert_counted(text: &str, at_least: usize) {
    let said = lines_of(text, "count ");
    assert!(said.len() >= at_least, "{text}");
    let expected: Vec<String> = (0..said.len()).map(|i| format!("count {i}")).collect();
    assert_eq!(said, expected, "{text}");
}

#[apply(as_root)]
fn restored_job_loses_and_repeats_no_terminal_output() {
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

/// Returns the job's process, in a separate namespace or not.
fn first_python(run: &Run) -> i32 {
    wait_for_descendant(run.pid(), "the job", |pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.starts_with("python")
    })
}

#[apply(as_root)]
fn a_restored_job_has_its_terminal_as_before() {
    let place = Place::new();
    let screen = Screen::new(24, 80);
    // The job sets modes, opens its terminal by name, and queries the window size on request.
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
    // The window changes meanwhile.
    screen.resize(40, 100);
    screen.wait_for("ckpt-run: restored");
    screen.wait_until_raw();
    screen.types("tell\r");
    screen.wait_for("echo False size 40 100 foreground True session True blocking False");
    screen.wait_for("by name");
    screen.types("\x03");
    assert_eq!(run.wait(), 130, "{}", screen.text());
}

#[apply(as_root)]
fn killed_run_continues_at_another_terminal_or_none() {
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

    // As under nohup or cron: from the snapshot on, the job's output goes to ckpt-run's stdout.
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

#[apply(as_root)]
fn a_job_without_a_terminal_is_restored_without_one() {
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

#[apply(as_root)]
fn input_after_a_restore_arrives() {
    let (place, screen, mut run) = at_terminal(ECHO, "ready");
    screen.types("one\r");
    screen.wait_for("heard one");
    place.snapshot();
    screen.types("two\r");
    screen.wait_for("heard two");
    run.crash();
    // The end of input in between is not passed to the job.
    screen.wait_until("the caller's modes", |_| !screen.is_raw());
    screen.types("\x04");
    screen.wait_for("ckpt-run: restored");
    screen.wait_until_raw();
    screen.types("three\r");
    screen.wait_for("heard three");
    screen.types("end\r");
    assert_eq!(run.wait(), 0, "{}", screen.text());
    // Input from before the crash is not repeated.
    assert_eq!(screen.text().matches("heard two").count(), 1);
}

#[apply(as_root)]
fn an_interpreter_with_line_editing_is_restored() {
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
    // Cursor left and insert: the keys go to the interpreter's own line editor.
    screen.types("print('sum', x + )\x1b[D2\r");
    screen.wait_for("sum 42");
    screen.types("exit(0)\r");
    assert_eq!(run.wait(), 0, "{}", screen.text());
}

/// Talks to a child at a separate terminal, and prints the names of both terminals.
const OWN_TERMINAL: &str = r#"
import fcntl, os, pty, sys, termios, time
master, slave = pty.openpty()
if os.fork() == 0:
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for line in os.fdopen(slave, closefd=False):
        os.write(slave, b"got " + line.encode())
modes = termios.tcgetattr(slave)
modes[1] &= ~termios.OPOST
modes[3] &= ~termios.ECHO
termios.tcsetattr(slave, termios.TCSANOW, modes)
names = [os.ttyname(one) for one in (slave, 1) if os.isatty(one)]
print("ready at", *names, flush=True)
for i in range(10**6):
    os.write(master, b"%d\n" % i)
    answer = os.read(master, 100)
    if answer != b"got %d\n" % i or names != [os.ttyname(one) for one in (slave, 1) if os.isatty(one)]:
        sys.exit(f"not {i}: {answer}")
    print("count", i, flush=True)
    if os.path.exists("go"): break
    time.sleep(0.01)
if os.fork() == 0:
    own = os.open(os.ttyname(slave), os.O_RDWR | os.O_NOCTTY)
    os._exit(os.isatty(own))
print("end", os.WEXITSTATUS(os.wait()[1]), *names, flush=True)
"#;

#[apply(as_root)]
fn own_terminals_are_restored_despite_used_numbers() {
    // In a terminal that is the job's first one, and without one.
    for (option, names) in [
        ("--tty", "/dev/pts/1 /dev/pts/0"),
        ("--no-tty", "/dev/pts/0"),
    ] {
        let place = Place::new();
        fs::write(place.file("job.py"), OWN_TERMINAL).unwrap();
        let job = ["python3", "-u", "job.py"];
        let mut run = place.start(&[option], &job);
        place.wait_for("out", &format!("ready at {names}"));
        place.snapshot();
        run.signal(Signal::SIGKILL);
        run.wait();
        let said = lines_of(&place.text("out"), "count ").len();

        let taken: Vec<Screen> = (0..24).map(|_| Screen::new(24, 80)).collect();
        let mut run = place.start(&[option], &job);
        place.wait_for("out", &format!("count {}", said + 10));
        place.snapshot();
        run.crash();
        wait_until("the second restore", || {
            place.text("err").matches("ckpt-run: restored").count() == 2
        });
        place.go();
        assert_eq!(run.wait(), 0, "{}{}", place.text("out"), place.text("err"));
        drop(taken);
        let end = format!("end 1 {names}");
        assert!(place.text("out").contains(&end), "{}", place.text("out"));
    }
}

#[apply(as_root)]
fn program_in_the_jobs_own_terminal_is_restored() {
    let place = Place::new();
    fs::write(place.file("job.py"), COUNT).unwrap();
    let spawn = "import pty; pty.spawn(['sh', '-c', 'tty; python3 job.py'])";
    let job = ["python3", "-c", spawn];
    let mut run = place.start(&["--no-tty"], &job);
    place.wait_for("out", "count 5\r\n");
    place.snapshot();
    run.signal(Signal::SIGKILL);
    run.wait();
    let said = lines_of(&place.text("out"), "count ").len();
    let taken: Vec<Screen> = (0..24).map(|_| Screen::new(24, 80)).collect();
    let mut run = place.start(&["--no-tty"], &job);
    place.wait_for("out", &format!("count {}\r\n", said + 10));
    drop(taken);
    run.signal(Signal::SIGTERM);
    run.wait();
    let text = place.text("out").replace('\r', "");
    assert!(text.starts_with("/dev/pts/0\n"), "{text}");
    let restored = place.text("err").matches("ckpt-run: restored").count();
    assert_eq!(restored, 1, "{}", place.text("err"));
    assert_counted(&text, said + 10);
}
