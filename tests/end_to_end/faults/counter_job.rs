//! Shared parts of these tests: a job that can be compared with an uninterrupted run, and faults for it.

use std::fs;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{ON_REQUEST, Place, Run, descendants, lines, wait_until, wait_until_or};

/// Counts in memory, with a helper thread and a child, and writes each number to stdout, to a log opened in mode `w`
/// and to a counter file that it reads back. Ends when the file `stop` exists.
pub const COUNTER: &str = r#"
import os, signal, threading, time
threading.Thread(target=time.sleep, args=(10000,), daemon=True).start()
ask, told = os.pipe(); answer, heard = os.pipe()
if os.fork() == 0:
    os.close(told); os.close(answer)
    while (line := os.read(ask, 64)):
        os.write(heard, line)
    os._exit(0)
os.close(ask); os.close(heard)
# Without its child it dies as that did.
signal.signal(signal.SIGPIPE, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
log = open("log", "w")
open("counter", "w").write("0")
counter = open("counter", "r+")
i = 0
while not os.path.exists("stop"):
    os.write(told, str(i).encode())
    answered = os.read(answer, 64)
    if not answered: os.kill(os.getpid(), signal.SIGKILL)
    assert answered == str(i).encode()
    counter.seek(0)
    assert int(counter.read()) == i, (counter.tell(), i)
    counter.seek(0); counter.write(str(i + 1)); counter.flush()
    print(i, flush=True)
    log.write(f"{i}\n"); log.flush()
    i += 1
    time.sleep(0.01)
os.close(told)
"#;

/// Starts [`COUNTER`] with short waits before restarts.
pub fn start_counter(place: &Place) -> Run {
    start(place, COUNTER)
}

/// Starts [`COUNTER`] and waits until it has counted.
pub fn counting() -> (Place, Run) {
    counting_with(|_| {})
}

/// Does the same as [`counting`], with another command line or environment.
pub fn counting_with(change: impl FnOnce(&mut Command)) -> (Place, Run) {
    let place = Place::new();
    let run = start_with(&place, COUNTER, change);
    wait_for_the_first_line(&place);
    (place, run)
}

pub fn wait_for_the_first_line(place: &Place) {
    wait_until("the first line", || counted(place) > 0);
}

/// Starts a Python job with short waits before restarts.
pub fn start(place: &Place, script: &str) -> Run {
    start_with(place, script, |_| {})
}

pub fn start_with(place: &Place, script: &str, change: impl FnOnce(&mut Command)) -> Run {
    place.start_python_with(&ON_REQUEST, script, |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "10ms");
        change(command);
    })
}

/// Ends [`COUNTER`], and checks that its run equals an uninterrupted one.
pub fn finish_counter(place: &Place, run: &mut Run) {
    fs::write(place.file("stop"), "").expect("the stop file is written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let count = counted(place);
    assert!(count > 0);
    assert_eq!(place.text("log"), lines(count), "{}", place.text("err"));
    assert_eq!(place.text("out"), lines(count), "{}", place.text("err"));
    assert_eq!(place.text("counter"), count.to_string());
}

/// Kills [`COUNTER`] once more and finishes it after its restore.
pub fn crash_and_finish(place: &Place, run: &mut Run) {
    wait_for_progress(place);
    run.crash();
    wait_for_progress(place);
    finish_counter(place, run);
}

/// Returns the progress of [`COUNTER`], from its log.
pub fn counted(place: &Place) -> usize {
    place.text("log").lines().count()
}

/// Waits until [`COUNTER`] has made progress.
pub fn wait_for_progress(place: &Place) {
    let before = counted(place);
    wait_until_or(
        || format!("progress; {}", place.text("err")),
        || counted(place) > before + 1,
    );
}

/// Begins a snapshot without waiting for it.
pub fn begin_snapshot(place: &Place) -> Child {
    place
        .command(&["snapshot"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("ckpt-run starts")
}

/// Takes a snapshot, repeating a request that was refused.
pub fn snapshot_at_last(place: &Place) {
    wait_until_or(
        || format!("a snapshot; {}", place.text("err")),
        || place.verb(&["snapshot"]).status.success(),
    );
}

/// Returns the processes below the supervisor that have this argument.
pub fn processes_with(run: &Run, word: &str) -> Vec<i32> {
    let holds = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0)
            .any(|one| one == word.as_bytes())
    };
    descendants(run.pid()).into_iter().filter(holds).collect()
}

/// Waits for CRIU at work (`dump` or `restore`); returns its first process.
pub fn wait_for_criu(run: &Run, verb: &str) -> i32 {
    let mut found = None;
    wait_until(&format!("criu {verb}"), || {
        found = processes_with(run, verb).into_iter().next();
        found.is_some()
    });
    found.expect("found above")
}

pub fn send(pid: i32, signal: Signal) {
    // The process may have exited already.
    let _ = kill(Pid::from_raw(pid), signal);
}

/// Counts the occurrences of `text` in the supervisor's messages.
pub fn said(place: &Place, text: &str) -> usize {
    place.text("err").matches(text).count()
}

/// Random numbers from a seed that is printed, so that a failure can be repeated.
pub struct Random(u64);

impl Random {
    pub fn new(name: &str) -> Self {
        Self::from_seed(name, Self::seed())
    }

    /// Returns the seed in the environment, or a random one.
    pub fn seed() -> u64 {
        std::env::var("TEST_SEED").ok().map_or_else(
            || {
                use std::hash::{BuildHasher, Hasher};
                std::collections::hash_map::RandomState::new()
                    .build_hasher()
                    .finish()
            },
            |text| text.parse().expect("TEST_SEED is a number"),
        )
    }

    pub fn from_seed(name: &str, seed: u64) -> Self {
        eprintln!("{name}: TEST_SEED={seed}");
        Self(seed)
    }

    /// Returns a random item.
    pub fn one_of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        let count = u64::try_from(items.len()).expect("a count");
        &items[usize::try_from(self.below(count)).expect("an index")]
    }

    /// Returns a random number below `end` (splitmix64).
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}
