//! Status line of a snapshot or restore in progress, on the screen as a terminal interprets it.

use std::fs;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use super::screen::Screen;
use crate::harness::{Place, apply, as_root, copy_environment, criu_script, wait_until};

/// Width of the screen, enough for ckpt-run's longest line.
const COLUMNS: u16 = 250;
/// Height of the screen, more than the lines of a test, so that nothing scrolls away.
const ROWS: u16 = 5000;

/// Holds memory that takes seconds to store with [`SLOW`] and prints a line now and then. LINE and PAUSE are replaced
/// by the test.
const JOB: &str = r#"
import os, sys, time
ballast = os.urandom(16 << 20).hex()
i = 0
while not os.path.exists("go"):
    LINE
    i += 1
    time.sleep(PAUSE)
sys.stdout.write("\nend of the job\n")
"#;

/// Settings that make a dump of [`JOB`] wait for the compression, so that it is visible on the fastest machine.
const SLOW: &str = "[snapshot]\nbuffer = '16MiB'\nlevel = 19\n";

/// Starts the job at a terminal, snapshots it twice, crashes it once, and lets it end; returns the written bytes and
/// all text that a terminal of the same size shows.
///
/// The restore continues after it was shown with the words `restore`.
fn shown(
    line: &str,
    pause: &str,
    options: &[&str],
    config: &str,
    restore: &str,
) -> (String, String) {
    let place = Place::new();
    let waits =
        "[ \"$1\" != restore ] || until [ -e HERE/shown ]; do sleep 0.05; done; exec CRIU \"$@\"";
    let criu = criu_script(place.path(), waits);
    let config = format!("{config}[criu]\npath = '{}'\n", criu.display());
    fs::write(place.file("ckpt-run.toml"), config).unwrap();
    let screen = Screen::new(24, COLUMNS);
    let job = JOB.replace("LINE", line).replace("PAUSE", pause);
    fs::write(place.file("job.py"), job).unwrap();
    let arguments = [options, &["--", "python3", "job.py"]].concat();
    let mut run = screen.start(&place, &arguments);
    screen.wait_for("step 0003");
    place.snapshot();
    place.snapshot();
    run.crash();
    screen.wait_until("the restore", |_| {
        String::from_utf8_lossy(&screen.bytes()).contains(restore)
    });
    fs::write(place.file("shown"), "").unwrap();
    screen.wait_for("ckpt-run: restored");
    place.go();
    assert_eq!(run.wait(), 0, "{}", screen.text());
    screen.wait_for("end of the job");
    let bytes = screen.bytes();
    let mut parser = vt100::Parser::new(ROWS.try_into().unwrap(), COLUMNS.try_into().unwrap(), 0);
    parser.process(&bytes);
    let written = String::from_utf8_lossy(&bytes).into_owned();
    (written, parser.screen().contents())
}

/// Checks that the screen has each of the job's lines, complete and in order, and no status line.
fn assert_whole(screen: &str) {
    let said: Vec<&str> = screen
        .lines()
        .filter(|line| line.contains("step"))
        .filter(|line| !line.starts_with("ckpt-run: job started"))
        .collect();
    assert!(said.len() > 3, "{screen}");
    for (number, line) in said.iter().enumerate() {
        assert_eq!(*line, format!("step {number:04} of many"), "{screen}");
    }
    for line in screen.lines().filter(|line| line.contains("ckpt-run")) {
        assert!(line.starts_with("ckpt-run: "), "{line:?}");
        assert!(!line.contains("ckpt-run: snapshot:"), "{line:?}");
        assert!(!line.contains("ckpt-run: restore:"), "{line:?}");
    }
}

#[apply(as_root)]
fn status_line_does_not_split_the_jobs_lines() {
    let line = r#"print(f"step {i:04d} of many", flush=True)"#;
    // With a terminal for the job, so that the caller's is in raw mode, and without one.
    for options in [&[][..], &["--no-tty"]] {
        let (written, screen) = shown(line, "0.05", options, SLOW, "ckpt-run: restore: ");
        assert_whole(&screen);
        assert!(written.contains("ckpt-run: snapshot: dump "), "{written}");
        let again = "ckpt-run: snapshot: the job computes again, ";
        assert!(written.contains(again), "{written}");
        assert!(written.contains("MiB of "), "{written}");
    }
}

#[apply(as_root)]
fn progress_bar_of_the_job_keeps_its_line() {
    let line = r#"sys.stdout.write(f"\r[step {i:04d} of the bar]"); sys.stdout.flush()"#;
    let (_, screen) = shown(line, "0.02", &[], SLOW, "");
    let again = screen
        .lines()
        .filter(|line| line.starts_with("ckpt-run: the job computes again freeze="));
    assert!(again.count() >= 1, "{screen}");
    for line in screen.lines().filter(|line| line.contains("of the bar")) {
        assert!(
            line.starts_with("[step ") && line.ends_with(" of the bar]"),
            "{line:?}"
        );
    }
}

#[apply(as_root)]
fn log_progress_never_shows_no_status_line() {
    let line = r#"print(f"step {i:04d} of many", flush=True)"#;
    let (written, screen) = shown(line, "0.05", &[], "[log]\nprogress = \"never\"\n", "");
    assert_whole(&screen);
    assert!(!written.contains('\x1b'), "{written:?}");
}

#[apply(as_root)]
fn events_in_a_file_are_lines_without_escapes() {
    let place = Place::new();
    let screen = Screen::new(24, COLUMNS);
    let line = r#"print(f"step {i:04d} of many", flush=True)"#;
    let job = JOB.replace("LINE", line).replace("PAUSE", "0.05");
    fs::write(place.file("job.py"), job).unwrap();
    let errors = fs::File::create(place.file("errors")).unwrap();
    let command = place.command(&["--", "python3", "job.py"]);
    let mut run = place.spawn(command, |command| {
        command
            .stdin(Stdio::null())
            .stdout(screen.stream())
            .stderr(errors);
    });
    screen.wait_for("step 0003");
    run.signal(Signal::SIGUSR1);
    wait_until("the snapshot", || {
        place.text("errors").contains("ckpt-run: snapshot image=")
    });
    place.go();
    assert_eq!(run.wait(), 0);
    let errors = place.text("errors");
    assert!(
        !errors.contains('\x1b') && !errors.contains('\r'),
        "{errors:?}"
    );
    assert_eq!(errors.matches("ckpt-run: snapshot").count(), 1, "{errors}");
    screen.wait_for("end of the job");
    assert!(!screen.text().contains("ckpt-run"), "{}", screen.text());
}

#[apply(as_root)]
fn a_terminal_that_others_write_to_as_well_gets_lines_only() {
    let place = Place::new();
    let screen = Screen::new(24, COLUMNS);
    let line = r#"print(f"step {i:04d} of many", flush=True)"#;
    let job = JOB.replace("LINE", line).replace("PAUSE", "0.05");
    fs::write(place.file("job.py"), job).unwrap();
    // As with `| tee`: ckpt-run's stdout is a pipe, and its reader writes to the terminal.
    let program = place.command(&["--", "python3", "job.py"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "\"$@\" | cat", "sh"]);
    shell.arg(program.get_program()).args(program.get_args());
    copy_environment(&program, &mut shell);
    let mut run = screen.start_command(&place, &shell);
    screen.wait_for("step 0003");
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0);
    screen.wait_for("end of the job");
    let written = screen.bytes();
    assert!(!written.contains(&0x1b), "{}", screen.text());
}

/// Returns the output of a verb in a terminal.
fn verb(place: &Place, arguments: &[&str]) -> String {
    let screen = Screen::new(24, COLUMNS);
    let mut run = screen.start(place, arguments);
    assert_eq!(run.wait(), 0, "{arguments:?}: {}", screen.text());
    let mut shell = Command::new("echo");
    shell.arg("that is all");
    screen.start_command(place, &shell).wait();
    screen.wait_for("that is all");
    String::from_utf8_lossy(&screen.bytes()).into_owned()
}

#[apply(as_root)]
fn verbs_that_take_their_time_show_a_bar_where_that_is_wanted() {
    let place = Place::new();
    let job = "import os, time\nballast = os.urandom(32 << 20)\nprint('ready', flush=True)\ntime.sleep(1000)\n";
    let mut run = place.start_python(&[], job);
    place.wait_for("out", "ready");
    place.snapshot();
    run.signal(Signal::SIGTERM);
    run.wait();

    let cases: [(&[&str], bool); 4] = [
        (&[], true),
        (&["--json"], false),
        (&["-q"], false),
        (&["--config", "never.toml"], false),
    ];
    fs::write(place.file("never.toml"), "[log]\nprogress = \"never\"\n").unwrap();
    for (number, (options, wanted)) in cases.into_iter().enumerate() {
        let file = format!("image-{number}");
        let (from, to) = (format!("from-{number}"), format!("to-{number}"));
        let lines: [(&str, &[&str]); 5] = [
            ("verify", &["verify", "1"]),
            ("verify", &["repair", "--dry-run"]),
            ("copy", &["copy", "1", "--to", &to]),
            ("export", &["export", "1", &file]),
            ("import", &["import", &file, "--store", &from]),
        ];
        for (word, line) in lines {
            let line = [line, options].concat();
            let written = verb(&place, &line);
            // Its progress depends on the speed of the machine.
            let bar = ["█", "░"].map(|cell| written.contains(&format!("{word} {cell}")));
            let bar = bar.contains(&true);
            assert_eq!(bar, wanted, "{line:?}: {written:?}");
            assert_eq!(written.contains('\x1b'), wanted, "{line:?}: {written:?}");
        }
    }
}
