use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::super::tree::is_to_stop;
use super::*;

/// Limit on the help for one halt; each of its steps waits for a processor on a loaded machine.
const LIMIT: Duration = Duration::from_secs(600);

/// A program with three threads, two of which count. It prints the thread ids, and prints the counts for each line on
/// stdin.
const COUNTERS: &str = r"
import sys, threading
counts = [0, 0, 0]
def count(place):
    while True:
        counts[place] += 1
for place in (1, 2):
    threading.Thread(target=count, args=(place,), daemon=True).start()
print(*[thread.native_id for thread in threading.enumerate()], flush=True)
for line in sys.stdin:
    print(*counts, flush=True)
";

struct Counters {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    threads: Vec<i32>,
}

fn numbers(line: &str) -> Vec<i32> {
    let words = line.split_whitespace();
    words.map(|word| word.parse().unwrap()).collect()
}

impl Counters {
    fn start() -> Self {
        let child = Command::new("python3")
            .args(["-c", COUNTERS])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self::of(child)
    }

    fn of(mut child: Child) -> Self {
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let threads = numbers(&lines.next().unwrap().unwrap());
        Self {
            child,
            lines,
            threads,
        }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn ask(&mut self) -> Vec<i32> {
        writeln!(self.child.stdin.as_mut().unwrap()).unwrap();
        numbers(&self.lines.next().unwrap().unwrap())
    }

    fn state(&self, thread: i32) -> char {
        let task = ProcessEntry::new(self.pid()).unwrap();
        let task = task.task_from_tid(thread).unwrap();
        task.stat().unwrap().state
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn all_threads_stop_except_the_spared_ones() {
    let mut job = Counters::start();
    let pid = job.pid();
    let halted = halt(pid, &[job.threads[1]]).unwrap();
    let states: Vec<char> = job.threads.iter().map(|id| job.state(*id)).collect();
    assert_eq!([states[0], states[2]], ['t', 't']);
    assert_ne!(states[1], 't');
    drop(halted);
    assert_eq!(job.ask().len(), 3);
    assert!(job.threads.iter().all(|id| job.state(*id) != 't'));
}

#[test]
fn a_signal_that_comes_meanwhile_is_not_lost() {
    let job = Counters::start();
    let pid = job.pid();
    let halted = halt(pid, &[]).unwrap();
    nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    drop(halted);
    let mut job = job;
    assert_eq!(job.lines.next().map(|line| line.is_ok()), None);
}

#[test]
fn a_stop_that_comes_meanwhile_is_seen() {
    let job = Counters::start();
    let pid = job.pid();
    let halted = halt(pid, &[]).unwrap();
    assert!(!is_to_stop(pid));
    nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap();
    assert!(is_to_stop(pid));
    drop(halted);
}

#[test]
fn a_traced_process_is_refused_and_continues() {
    let mut job = Counters::start();
    let pid = job.pid();
    let traced = job.threads[2];
    let (told, hold) = std::sync::mpsc::channel::<()>();
    let (ready, begun) = std::sync::mpsc::channel::<()>();
    let tracer = std::thread::spawn(move || {
        ptrace::seize(Pid::from_raw(traced), ptrace::Options::empty()).unwrap();
        ready.send(()).unwrap();
        let _ = hold.recv();
    });
    begun.recv().unwrap();
    let error = halt(pid, &[]).unwrap_err();
    assert!(error.to_string().contains("debugger"), "{error}");
    assert_eq!(job.ask().len(), 3);
    drop(told);
    tracer.join().unwrap();
}

#[test]
fn the_kill_of_a_halted_process_ends_the_halt() {
    let mut job = Counters::start();
    let halted = halt(job.pid(), &[]).unwrap();
    job.child.kill().unwrap();
    drop(halted);
    // The test is parent and tracer of the process; the tracer may have reaped it already.
    let _ = job.child.wait();
    assert!(matches!(
        halt(job.pid(), &[]),
        Err(HaltError::Exited { .. })
    ));
}

#[test]
fn a_killed_process_is_left_to_its_parent() {
    // The parent is a process of its own: a parent may reap what other threads of its own process trace.
    let parent = Command::new("sh")
        .args(["-c", "python3 -c \"$0\"; exit $?", COUNTERS])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut parent = Counters::of(parent);
    let pid = parent.threads[0];
    let halted = halt(pid, &[]).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    drop(halted);
    assert_eq!(parent.child.wait().unwrap().code(), Some(128 + 9));
}

#[test]
fn a_process_left_stopped_and_halted_again_has_not_run() {
    let mut job = Counters::start();
    let pid = job.pid();
    let spared = job.threads[1];
    // System call, stack pointer, program counter.
    let places = |job: &Counters| {
        let others = [job.threads[0], job.threads[2]];
        others.map(|id| fs::read_to_string(format!("/proc/{pid}/task/{id}/syscall")).unwrap())
    };
    let halted = halt(pid, &[spared]).unwrap();
    let before = places(&job);
    halted.stop();
    // The threads are stopped immediately, as the next tracer requires.
    let states: Vec<char> = job.threads.iter().map(|id| job.state(*id)).collect();
    assert_eq!(states, ['T', 'T', 'T']);
    let halted = halt(pid, &[spared]).unwrap();
    halted.wake_spared();
    while job.state(spared) == 'T' {
        std::thread::yield_now();
    }
    let others = [job.state(job.threads[0]), job.state(job.threads[2])];
    assert_eq!(others, ['t', 't']);
    assert_eq!(places(&job), before);
    drop(halted);
    assert_eq!(job.ask().len(), 3);
}

/// A program with two threads that need the same lock; the first holds it nearly all the time, at `WORK`. It prints the
/// id of the second, which counts its acquisitions in the file given as argument.
const RIVALS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile unsigned long *count;
static void *want(void *nothing) {
    printf("%ld\n", syscall(SYS_gettid));
    fflush(stdout);
    for (;;) {
        pthread_mutex_lock(&lock);
        ++*count;
        pthread_mutex_unlock(&lock);
    }
}
int main(int arguments, char **argument) {
    int file = open(argument[1], O_RDWR);
    count = mmap(0, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (count == MAP_FAILED) return 1;
    pthread_t other;
    pthread_create(&other, 0, want, 0);
    for (;;) {
        pthread_mutex_lock(&lock);
        for (volatile int turn = 0; turn < 200; turn++) WORK;
        pthread_mutex_unlock(&lock);
    }
}
"#;

/// Compiles a program in C.
pub(crate) fn compiled(
    folder: &tempfile::TempDir,
    name: &str,
    source: &str,
    options: &[&str],
) -> PathBuf {
    let program = folder.path().join(name);
    let mut compiler = Command::new("cc")
        .args(options)
        .args(["-x", "c", "-", "-o"])
        .arg(&program)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = compiler.stdin.take().unwrap();
    input.write_all(source.as_bytes()).unwrap();
    drop(input);
    assert!(compiler.wait().unwrap().success());
    program
}

/// Halts the first thread of [`RIVALS`] repeatedly. The second gets the lock each time.
fn gets_the_lock(work: &str, freely: bool) {
    /// Count that no thread reaches by chance between two acquisitions of the other.
    const OFTEN: u64 = 100_000;
    let folder = tempfile::tempdir().unwrap();
    let options = ["-pthread", &format!("-DWORK={work}")];
    let program = compiled(&folder, "rivals", RIVALS, &options);
    let file = folder.path().join("count");
    fs::write(&file, [0; 8]).unwrap();
    let count = || u64::from_ne_bytes(fs::read(&file).unwrap().try_into().unwrap());
    let child = Command::new(program)
        .arg(&file)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut job = Counters::of(child);
    let spared = job.threads[0];
    for _ in 0..20 {
        let mut halted = halt(job.pid(), &[spared]).unwrap();
        let (halted_at, begun) = (count(), Instant::now());
        while count() < halted_at + OFTEN {
            halted.relieve(freely);
            assert!(begun.elapsed() < LIMIT, "{} after {halted_at}", count());
        }
        assert_eq!(job.state(job.pid()), 't');
        drop(halted);
    }
    job.child.kill().unwrap();
}

#[test]
fn a_spared_thread_gets_the_lock_of_a_halted_one() {
    gets_the_lock("(void)0", true);
}

#[test]
fn a_spared_thread_gets_the_lock_of_one_halted_in_a_syscall() {
    // Malloc and free release memory with this call. The thread spends nearly all of its time in the kernel.
    gets_the_lock("madvise(0, 1 << 30, MADV_COLD)", false);
}

#[test]
fn a_thread_is_found_by_its_host_number() {
    let job = Counters::start();
    assert_eq!(thread_of(job.pid(), job.threads[2]), Some(job.threads[2]));
    assert_eq!(thread_of(job.pid(), 1), None);
}

#[test]
fn an_exited_main_thread_does_not_prevent_a_halt() {
    let script = format!(
        "import ctypes, threading, time\n\
            threading.Thread(target=time.sleep, args=(100,)).start()\n\
            print(flush=True)\n\
            ctypes.CDLL(None).syscall({}, 0)",
        nix::libc::SYS_exit
    );
    let mut child = Command::new("python3")
        .args(["-c", &script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    while !has_ended(pid, pid) {
        std::thread::yield_now();
    }
    let halted = halt(pid, &[]);
    child.kill().unwrap();
    let halted = halted.unwrap();
    assert_eq!(halted.threads.len(), 2);
    drop(halted);
    child.wait().unwrap();
}

/// A program of threads that run in a library: one computes there, one waits in the kernel.
const IN_A_LIBRARY: &str = r"
import ctypes, sys, threading
library = ctypes.CDLL('libc.so.6')
buffer = ctypes.create_string_buffer(1 << 26)
def work():
    while True:
        library.memset(buffer, 1, len(buffer))
def wait():
    library.pause()
which = threading.Thread(target={'work': work, 'wait': wait}[sys.argv[1]], daemon=True)
which.start()
print(which.native_id, flush=True)
library.pause()
";

fn in_a_library(what: &str) -> Counters {
    let child = Command::new("python3")
        .args(["-c", IN_A_LIBRARY, what])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    Counters::of(child)
}

#[test]
fn only_a_thread_at_work_in_a_library_is_found_there() {
    for (what, works) in [("work", true), ("wait", false)] {
        let job = in_a_library(what);
        let (code, other) = (
            code_of(job.pid(), "libc.so"),
            code_of(job.pid(), "libcuda.so"),
        );
        assert!(!code.is_empty() && other.is_empty());
        // A thread reaches the library some time after its start.
        let begun = Instant::now();
        loop {
            let halted = halt(job.pid(), &[]).unwrap();
            assert!(!halted.works_in(&other));
            if halted.works_in(&code) == works {
                break;
            }
            assert!(begun.elapsed() < LIMIT, "{what}");
        }
    }
}

#[test]
fn a_thread_in_a_called_library_is_found_in_the_caller() {
    let folder = tempfile::tempdir().unwrap();
    let program = compiled(
        &folder,
        "filling",
        "#include <stdlib.h>\n#include <string.h>\n\
         int main() { char *all = malloc(1 << 28); for (;;) memset(all, 1, 1 << 28); }",
        &["-O0"],
    );
    let mut child = Command::new(program).spawn().unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    let begun = Instant::now();
    loop {
        let halted = halt(pid, &[]).unwrap();
        let is_in = |name| halted.works_in(&code_of(pid, name));
        if is_in("libc.so") && is_in("filling") {
            break;
        }
        assert!(begun.elapsed() < LIMIT);
    }
    child.kill().unwrap();
    child.wait().unwrap();
}
