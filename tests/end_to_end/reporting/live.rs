//! Live view in a real pseudo-terminal: `status -w` draws the run, quits, and restores the terminal.

use std::process::Child;

use crate::harness::{Place, PseudoTerminal, apply, as_root, code, wait_until};

/// Viewer in its own terminal.
struct Viewer {
    child: Child,
    terminal: PseudoTerminal,
}

impl Viewer {
    fn start(place: &Place, rows: u16, columns: u16) -> Self {
        let terminal = PseudoTerminal::new(rows, columns);
        let child = place
            .command(&["status", "-w"])
            .env_remove("NO_COLOR")
            .env("TERM", "xterm-256color")
            .stdin(terminal.stream())
            .stdout(terminal.stream())
            .stderr(terminal.stream())
            .spawn()
            .unwrap();
        Self { child, terminal }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.terminal.bytes()).into_owned()
    }

    fn wait_for(&self, text: &str) {
        wait_until(&format!("{text:?} in {:?}", self.text()), || {
            self.text().contains(text)
        });
    }

    fn press(&self, key: &[u8]) {
        self.terminal.types(key);
    }

    /// Waits for the viewer's end, and checks that the terminal is restored.
    fn end(mut self) -> i32 {
        let mut status = None;
        wait_until("the viewer's end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        self.terminal.assert_modes_are_back();
        self.wait_for("\u{1b}[?1049l"); // the other screen is left
        self.wait_for("\u{1b}[?25h"); // the cursor is back
        code(status.unwrap())
    }
}

#[apply(as_root)]
fn live_view_shows_the_job_and_q_restores_the_terminal() {
    let place = Place::new();
    let mut run = place.start_ready(&["--interval", "1h"]);
    for (key, name) in [(&b"q"[..], "q"), (b"\x1b", "Esc"), (b"\x03", "Ctrl-C")] {
        let viewer = Viewer::start(&place, 24, 80);
        viewer.wait_for("running");
        viewer.wait_for("q quits");
        viewer.wait_for("\u{1b}[?1049h");
        viewer.press(key);
        assert_eq!(viewer.end(), 0, "{name}");
    }
    assert!(!run.has_ended());
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root)]
fn it_follows_the_run_and_outlives_the_supervisor() {
    let place = Place::new();
    let mut run = place.start_ready(&["--interval", "1h"]);
    let viewer = Viewer::start(&place, 24, 80);
    viewer.wait_for("running");
    place.snapshot();
    viewer.wait_for("000001");
    viewer.wait_for("frozen");
    place.go();
    assert_eq!(run.wait(), 0);
    viewer.wait_for("finished");
    viewer.press(b"q");
    assert_eq!(viewer.end(), 3, "no supervisor runs any more");
}

#[apply(as_root)]
fn a_tiny_terminal_and_a_signal_do_no_harm() {
    let place = Place::new();
    let _run = place.start_ready(&["--interval", "1h"]);
    let viewer = Viewer::start(&place, 3, 12);
    viewer.wait_for("running");
    let pid = i32::try_from(viewer.child.id()).unwrap();
    let pid = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(viewer.end(), 0);
}

#[test]
fn live_view_without_a_run_prints_a_message() {
    let place = Place::new();
    let viewer = Viewer::start(&place, 24, 80);
    viewer.wait_for("no run");
    viewer.press(b"q");
    assert_eq!(viewer.end(), 3);
}
