//! Threads that wait in the kernel: a snapshot and a restore must not end the wait, nor change the clocks by which it ends.

use std::fs;
use std::process::Command;

use super::survival::survives;
use crate::harness::{
    ON_REQUEST, Ordinary, Place, apply, as_root, as_root_and_user, program, skip, stderr,
    wait_until,
};

/// Calls the C library directly: Python's own functions restart after an interruption.
const WAITS: &str = r#"
libc.syscall.argtypes = [ctypes.c_long] * 5
results = {}
def begin(name, call):
    def run():
        ctypes.set_errno(0)
        result = call()
        results[name] = result, ctypes.get_errno() if result == -1 else 0
    thread = threading.Thread(target=run); thread.start()
    return thread
working = True
def repeats(call):
    """The results of a short wait, over and over, that is not as it should be."""
    def run():
        while working:
            result = call()
            if result != 0: return result
        return 0
    return run
pipes = [os.pipe() for _ in range(4)]
polled = (ctypes.c_int * 2)(pipes[0][0], select.POLLIN)
watched = select.epoll(); watched.register(pipes[1][0], select.EPOLLIN)
empty = select.epoll()
event, other_event = [ctypes.create_string_buffer(64) for _ in range(2)]
sets = ctypes.create_string_buffer(128); sets[pipes[2][0] // 8] = 1 << pipes[2][0] % 8
os.mkdir("folder")
inotify = check(libc.inotify_init()); check(libc.inotify_add_watch(inotify, b"folder", 0x100))
taken = [ctypes.create_string_buffer(64) for _ in range(3)]
semaphores = check(libc.semget(0, 1, 0o600 | 0o1000)); queue = check(libc.msgget(0, 0o600 | 0o1000))
down = (ctypes.c_short * 3)(0, -1, 0)
posix = ctypes.create_string_buffer(32); libc.sem_init(posix, 0, 0)
late = (ctypes.c_long * 2)(int(time.time()) + 10000, 0)
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
sleep = (ctypes.c_long * 2)(0, 400_000_000)
threads = [
    begin("poll", lambda: libc.poll(polled, 1, -1)),
    begin("epoll_wait", lambda: libc.epoll_wait(watched.fileno(), event, 1, -1)),
    begin("select", lambda: libc.select(pipes[2][0] + 1, sets, None, None, None)),
    begin("read of a pipe", lambda: libc.read(pipes[3][0], taken[0], 1)),
    begin("read of inotify", lambda: libc.read(inotify, taken[1], 64) > 0),
    begin("recv", lambda: libc.recv(pair[0].fileno(), taken[2], 1, 0)),
    begin("semop", lambda: libc.semop(semaphores, down, 1)),
    begin("msgrcv", lambda: libc.msgrcv(queue, ctypes.create_string_buffer(64), 8, 0, 0)),
    begin("sem_timedwait", lambda: libc.sem_timedwait(posix, late)),
    begin("usleep", repeats(lambda: libc.usleep(400_000))),
    begin("sleep", repeats(lambda: libc.sleep(1))),
    begin("nanosleep", repeats(lambda: libc.nanosleep(sleep, None))),
    begin("short poll", repeats(lambda: libc.poll(None, 0, 400))),
    begin("short epoll_wait", repeats(lambda: libc.epoll_wait(empty.fileno(), other_event, 1, 400))),
]
for i in steps(): note(sorted(results.items()))
working = False
for _, end in pipes: os.write(end, b"x")
pair[1].send(b"x")
open("folder/created", "w").close()
check(libc.semop(semaphores, (ctypes.c_short * 3)(0, 1, 0), 1))
check(libc.msgsnd(queue, ctypes.create_string_buffer(b"\x01" + b"\0" * 15), 8, 0))
libc.sem_post(posix)
for thread in threads: thread.join()
for pair in sorted(results.items()): note(pair)
"#;

#[apply(as_root)]
fn waits_without_signals_are_not_interrupted() {
    survives(WAITS);
}

#[apply(as_root)]
fn tail_follows_a_file_across_a_snapshot_and_a_restore() {
    let place = Place::new();
    fs::write(place.file("grows"), "one\n").unwrap();
    let job =
        "tail -f grows & while ! test -e go; do sleep 0.02; done; kill $!; wait $!; test $? = 143";
    let mut run = place.start(&ON_REQUEST, &["sh", "-c", job]);
    let append = |line| {
        let mut text = place.text("grows");
        text.push_str(line);
        // In place: `tail` has the file open.
        fs::write(place.file("grows"), text).unwrap();
    };
    place.wait_for("out", "one\n");
    place.snapshot();
    run.crash();
    place.wait_for("err", "restored image");
    append("two\n");
    place.wait_for("out", "two\n");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(!place.text("err").contains("Interrupted"));
}

/// Computes until there is a file `go`, and says how far its clocks have jumped.
const CLOCKS: &str = r#"
import os, time
def clocks():
    since_boot = float(open("/proc/uptime").read().split()[0])
    return [time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_BOOTTIME), since_boot]
jump, last = 0, clocks()
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
    now = clocks()
    jump, last = max(jump, *(abs(a - b) for a, b in zip(now, last))), now
print("continued" if jump < 1000 else f"jumped by {jump} s", flush=True)
"#;

#[apply(as_root_and_user)]
fn clocks_continue_on_a_machine_with_another_uptime() {
    if !nix::unistd::geteuid().is_root() {
        skip("a machine with another uptime needs root");
        return;
    }
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, CLOCKS);
    place.wait_for("out", "ready");
    // An image of a restored job has the clocks of the job, not those of the machine.
    for (restores, offset) in (1..).zip(["1000000", "2000000"]) {
        let stopped = place.verb(&["stop"]);
        assert!(stopped.status.success(), "{}", stderr(&stopped));
        assert_eq!(run.wait(), 75, "{}", place.text("err"));
        let mut machine = Command::new("unshare");
        machine.args([
            "--time",
            "--monotonic",
            offset,
            "--boottime",
            offset,
            "--fork",
            "--kill-child",
        ]);
        machine.args(Ordinary::of_test().map_or_else(Vec::new, |user| user.prefix().to_vec()));
        machine
            .arg(program())
            .args(ON_REQUEST)
            .args(["--", "python3", "-u", "job.py"]);
        place.in_folder(&mut machine);
        run = place.spawn(machine, |_| {});
        let restored = || place.text("err").matches("restored image").count();
        wait_until("the restore", || restored() == restores);
    }
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(
        place.text("out"),
        "ready\ncontinued\n",
        "{}",
        place.text("err")
    );
    assert!(!place.text("err").contains("clock has jumped"));
}
