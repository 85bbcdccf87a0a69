//! Notifications of systemd about a run, received by a datagram socket in its place.

use std::os::unix::net::UnixDatagram;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{COUNT, LIMIT, ON_REQUEST, Place, Run, UNTIL_GO, apply, as_root, lines};

/// Service manager's end of the socket.
struct Manager {
    socket: UnixDatagram,
    heard: Vec<String>,
    /// Position after the messages that were already waited for.
    passed: usize,
}

impl Manager {
    fn new(place: &Place) -> Self {
        let socket = UnixDatagram::bind(place.file("notify")).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        Self {
            socket,
            heard: Vec::new(),
            passed: 0,
        }
    }

    fn start(place: &Place, options: &[&str], script: &str) -> Run {
        place.start_python_with(options, script, |command| {
            command
                .env("NOTIFY_SOCKET", place.file("notify"))
                .env("WATCHDOG_USEC", "1000000");
        })
    }

    /// Receives one message; returns false if there is none for a while.
    fn hear(&mut self) -> bool {
        let mut buffer = [0; 4096];
        let Ok(got) = self.socket.recv(&mut buffer) else {
            return false;
        };
        let text = String::from_utf8(buffer[..got].to_vec()).unwrap();
        self.heard.extend(text.lines().map(str::to_owned));
        true
    }

    fn wait_for(&mut self, wanted: &str) {
        let begun = Instant::now();
        loop {
            let mut new = self.heard.iter().skip(self.passed);
            if let Some(place) = new.position(|line| line == wanted) {
                self.passed += place + 1;
                return;
            }
            assert!(begun.elapsed() < LIMIT, "no {wanted}: {:?}", self.heard);
            self.hear();
        }
    }

    /// Waits for the run's end and receives its messages: a sender waits on a full socket.
    fn end(&mut self, run: &mut Run) -> i32 {
        while !run.has_ended() {
            self.hear();
        }
        run.wait()
    }

    /// Receives messages during another action, for the same reason.
    fn hear_during<T: Send>(&mut self, done: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let doing = scope.spawn(done);
            while !doing.is_finished() {
                self.hear();
            }
            doing.join().unwrap()
        })
    }

    fn count(&self, wanted: &str) -> usize {
        self.heard.iter().filter(|line| *line == wanted).count()
    }

    fn place_of(&self, wanted: &str) -> usize {
        let place = self.heard.iter().position(|line| line == wanted);
        place.unwrap_or_else(|| panic!("no {wanted}: {:?}", self.heard))
    }
}

#[apply(as_root)]
fn systemd_is_notified_and_the_job_has_no_notify_socket() {
    let place = Place::new();
    let mut manager = Manager::new(&place);
    let script = format!("import os\nprint(sorted(os.environ), flush=True)\n{UNTIL_GO}");
    let mut run = Manager::start(&place, &ON_REQUEST, &script);
    manager.wait_for("READY=1");
    manager.wait_for("STATUS=computing, no image yet");
    manager.hear_during(|| place.wait_for("out", "ready"));
    for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC"] {
        assert!(!place.text("out").contains(name), "{}", place.text("out"));
    }
    manager.hear_during(|| place.snapshot());
    manager.wait_for("STATUS=computing, newest image 000001");
    for _ in 0..3 {
        manager.wait_for("WATCHDOG=1");
    }
    run.signal(Signal::SIGTERM);
    manager.wait_for("STOPPING=1");
    manager.wait_for("STATUS=taking the last snapshot");
    assert_eq!(manager.end(&mut run), 75, "{}", place.text("err"));
    assert!(manager.place_of("EXTEND_TIMEOUT_USEC=60000000") < manager.place_of("READY=1"));
    assert!(manager.count("EXTEND_TIMEOUT_USEC=60000000") >= 2);
    assert_eq!(
        (manager.count("READY=1"), manager.count("STOPPING=1")),
        (1, 1)
    );
}

#[apply(as_root)]
fn a_restored_run_is_ready_once_the_job_computes_again() {
    let place = Place::new();
    let mut manager = Manager::new(&place);
    let mut run = Manager::start(&place, &ON_REQUEST, COUNT);
    place.wait_for("log", "5\n");
    run.signal(Signal::SIGUSR2);
    assert_eq!(manager.end(&mut run), 75, "{}", place.text("err"));
    while manager.hear() {}
    (manager.heard, manager.passed) = (Vec::new(), 0);
    place.go();
    let mut run = Manager::start(&place, &ON_REQUEST, COUNT);
    manager.wait_for("READY=1");
    assert!(manager.place_of("STATUS=restoring image 000001") < manager.place_of("READY=1"));
    assert!(manager.place_of("EXTEND_TIMEOUT_USEC=60000000") < manager.place_of("READY=1"));
    assert_eq!(manager.end(&mut run), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
}

#[apply(as_root)]
fn a_loop_that_hangs_feeds_no_watchdog() {
    let place = Place::new();
    let mut manager = Manager::new(&place);
    let mut run = Manager::start(&place, &ON_REQUEST, UNTIL_GO);
    manager.wait_for("READY=1");
    manager.wait_for("WATCHDOG=1");
    run.signal(Signal::SIGSTOP);
    // Messages from before the stop.
    while manager.hear() {}
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        assert!(!manager.hear(), "{:?}", manager.heard);
    }
    manager.passed = manager.heard.len();
    run.signal(Signal::SIGCONT);
    manager.wait_for("WATCHDOG=1");
    place.go();
    assert_eq!(manager.end(&mut run), 0, "{}", place.text("err"));
}
