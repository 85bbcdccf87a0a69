//! Terminals among the job's streams, and their properties.

use std::fs;
use std::process::Stdio;

use super::screen::Screen;
use crate::harness::{Place, apply, as_root, stdout};

/// Prints which streams are terminals.
const WHICH: &str = "import os; print('ttys', *[os.isatty(i) for i in range(3)])";

#[apply(as_root)]
fn job_has_a_terminal_with_the_callers_size_and_name() {
    let place = Place::new();
    let screen = Screen::new(33, 111);
    let script = "import os, sys\n\
                  print('ttys', *[os.isatty(i) for i in range(3)], os.environ['TERM'])\n\
                  size = os.get_terminal_size(); print('size', size.lines, size.columns)\n\
                  print('name', os.ttyname(0) == os.ttyname(2))\n\
                  print('own', os.tcgetpgrp(0) == os.getpgrp())\n\
                  open('/dev/tty', 'w').write('by name\\n')\n";
    let mut run = screen.start(&place, &["--", "python3", "-c", script]);
    assert_eq!(run.wait(), 0, "{}", screen.text());
    for line in [
        "ttys True True True xterm-256color",
        "size 33 111",
        "name True",
        "own True",
        "by name",
    ] {
        screen.wait_for(line);
    }
}

#[apply(as_root)]
fn a_change_of_the_window_arrives() {
    let place = Place::new();
    let screen = Screen::new(24, 80);
    let script = "import os, signal, time\n\
                  signal.signal(signal.SIGWINCH, lambda *_: print('now', *os.get_terminal_size(), flush=True))\n\
                  print('ready', flush=True)\n\
                  while True: time.sleep(1)\n";
    let run = screen.start(&place, &["--", "python3", "-c", script]);
    screen.wait_for("ready");
    screen.resize(50, 132);
    screen.wait_for("now 132 50");
    drop(run);
}

#[apply(as_root)]
fn redirected_streams_are_not_changed() {
    // With stdin or stdout elsewhere there is no terminal at all; with stderr elsewhere, only that is separate.
    for (number, expected) in [
        (0, "ttys False False False"),
        (1, "ttys False False False"),
        (2, "ttys True True False"),
    ] {
        let place = Place::new();
        let screen = Screen::new(24, 80);
        let job = format!("{WHICH}; import sys; sys.stdout.flush()");
        let command = place.command(&["--", "python3", "-c", &job]);
        let mut run = place.spawn(command, |command| {
            let elsewhere = || fs::File::create(place.file("elsewhere")).unwrap();
            match number {
                0 => command.stdin(Stdio::null()),
                _ => command.stdin(screen.stream()),
            };
            match number {
                1 => command.stdout(elsewhere()),
                _ => command.stdout(screen.stream()),
            };
            match number {
                2 => command.stderr(elsewhere()),
                _ => command.stderr(screen.stream()),
            };
        });
        assert_eq!(run.wait(), 0);
        match number {
            1 => assert!(place.text("elsewhere").contains(expected)),
            _ => screen.wait_for(expected),
        }
    }
}

#[apply(as_root)]
fn terminal_options_override_the_callers_streams() {
    let place = Place::new();
    let output = place.verb(&["--tty", "--", "python3", "-c", WHICH]);
    assert!(output.status.success());
    // Stdin is redirected here, and so is stderr.
    assert_eq!(stdout(&output), "ttys False True False\r\n");
    let screen = Screen::new(24, 80);
    let arguments = ["--fresh", "--no-tty", "--", "python3", "-c", WHICH];
    assert_eq!(screen.start(&place, &arguments).wait(), 0);
    screen.wait_for("ttys False False False");
    fs::write(place.file("ckpt-run.toml"), "tty = false\n").unwrap();
    let arguments = ["--fresh", "--", "python3", "-c", WHICH];
    assert_eq!(screen.start(&place, &arguments).wait(), 0);
    screen.wait_until("no terminal twice", |text| {
        text.matches("ttys False False False").count() == 2
    });
}

#[apply(as_root)]
fn input_beside_a_terminal_is_the_callers_byte_for_byte() {
    let place = Place::new();
    // Bytes that a terminal would change.
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    fs::write(place.file("in"), &bytes).unwrap();
    let mut run = place.start_with(&["--tty"], &["sh", "-c", "cat > copy"], |command| {
        command.stdin(fs::File::open(place.file("in")).unwrap());
    });
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(fs::read(place.file("copy")).unwrap() == bytes);
}
