//! Terminal as a user sees it, and jobs in it.

use std::fs;
use std::process::{Command, Stdio};

use rustix::termios::{LocalModes, Termios};

use crate::harness::{Place, PseudoTerminal, Run, copy_environment, wait_until};

/// Counts onto its terminal until it is killed.
pub const COUNT: &str = r#"
import time
i = 0
while True:
    print("count", i, flush=True)
    i += 1
    time.sleep(0.05)
"#;

/// Echoes its input and ends at `end`.
pub const ECHO: &str = r#"
import os, sys
print("ready", flush=True)
for line in sys.stdin:
    print("heard", line.strip(), flush=True)
    if line.strip() == "end":
        sys.exit(0)
"#;

/// Terminal as a user sees it.
pub struct Screen(PseudoTerminal);

impl Screen {
    pub fn new(rows: u16, columns: u16) -> Self {
        Self(PseudoTerminal::new(rows, columns))
    }

    pub fn resize(&self, rows: u16, columns: u16) {
        self.0.resize(rows, columns);
    }

    /// Returns another descriptor of the terminal as a command's stream.
    pub fn stream(&self) -> Stdio {
        self.0.stream()
    }

    /// Starts `ckpt-run` in the foreground of this terminal.
    pub fn start(&self, place: &Place, arguments: &[&str]) -> Run {
        let command = place.command(arguments);
        self.start_command(place, &command)
    }

    /// Starts a command as the first process of a session at this terminal.
    pub fn start_command(&self, place: &Place, command: &Command) -> Run {
        let mut first = Command::new("setsid");
        first.arg("--ctty").arg(command.get_program());
        first.args(command.get_args()).current_dir(place.path());
        copy_environment(command, &mut first);
        first.env("TERM", "xterm-256color");
        place.spawn(first, |command| {
            command.stdin(self.stream());
            command.stdout(self.stream());
            command.stderr(self.stream());
        })
    }

    pub fn types(&self, keys: &str) {
        self.0.types(keys.as_bytes());
    }

    /// Returns all bytes written so far.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.bytes()
    }

    /// Returns all text shown so far, without carriage returns, status lines (which are erased when more is written),
    /// and ckpt-run's line with the job's command.
    pub fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.bytes()).into_owned();
        let text = text.replace("\r\r\n", "\n").replace("\r\n", "\n");
        text.split_inclusive('\n')
            .map(|line| line.rsplit("\r\x1b[K").next().unwrap_or(line))
            .filter(|line| !line.starts_with("ckpt-run: job started"))
            .collect()
    }

    pub fn wait_for(&self, text: &str) {
        self.wait_until(&format!("{text:?}"), |shown| shown.contains(text));
    }

    pub fn wait_until(&self, what: &str, holds: impl Fn(&str) -> bool) {
        let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_until(what, || holds(&self.text()));
        }));
        assert!(waited.is_ok(), "{what} is not shown but: {}", self.text());
    }

    pub fn modes(&self) -> Termios {
        self.0.modes()
    }

    /// Returns true if every key goes to the program at once.
    pub fn is_raw(&self) -> bool {
        !self.modes().local_modes.contains(LocalModes::ICANON)
    }

    pub fn wait_until_raw(&self) {
        self.wait_until("raw mode", |_| self.is_raw());
    }

    /// Checks that the terminal has its initial modes again.
    #[track_caller]
    pub fn assert_modes_are_back(&self) {
        self.0.assert_modes_are_back();
    }
}

/// Starts a Python job at a terminal, and waits until it has printed this and the terminal is in raw mode.
pub fn at_terminal(script: &str, said: &str) -> (Place, Screen, Run) {
    let place = Place::new();
    let screen = Screen::new(24, 80);
    fs::write(place.file("job.py"), script).expect("the script is written");
    let run = screen.start(&place, &["--", "python3", "job.py"]);
    screen.wait_for(said);
    screen.wait_until_raw();
    (place, screen, run)
}

/// Returns the job's lines in the shown text: those that begin with this word.
pub fn lines_of(text: &str, word: &str) -> Vec<String> {
    text.lines()
        .filter(|line| line.starts_with(word))
        .map(str::to_owned)
        .collect()
}
