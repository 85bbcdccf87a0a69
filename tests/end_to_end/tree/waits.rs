//! Threads that wait in the kernel: a snapshot and a restore must not end the wait, nor change the clocks by which it ends.

use std::fs;
use std::process::Command;
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::survival::{survives, survives_two_crashes};
use crate::harness::{
    ON_REQUEST, Ordinary, Place, apply, as_root, as_root_and_user, descendants, program, skip,
    state, stderr, wait_until,
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
pipes = [os.pipe() for _ in range(6)]
polled = (ctypes.c_int * 2)(pipes[0][0], select.POLLIN)
watched = select.epoll(); watched.register(pipes[1][0], select.EPOLLIN)
empty = select.epoll()
event, other_event, third_event = [ctypes.create_string_buffer(64) for _ in range(3)]
other_polled = (ctypes.c_int * 2)(pipes[4][0], select.POLLIN)
other_watched = select.epoll(); other_watched.register(pipes[5][0], select.EPOLLIN)
long = (ctypes.c_long * 2)(1000, 0)
# Calls of sockets with a time limit end with EINTR at a stop.
limited, accepting = socket.socketpair(), socket.create_server(("127.0.0.1", 0))
for one in limited[0], accepting: one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1000, 0))
sets = ctypes.create_string_buffer(128); sets[pipes[2][0] // 8] = 1 << pipes[2][0] % 8
os.mkdir("folder")
inotify = check(libc.inotify_init()); check(libc.inotify_add_watch(inotify, b"folder", 0x100))
taken = [ctypes.create_string_buffer(64) for _ in range(3)]
semaphores = check(libc.semget(0, 2, 0o600 | 0o1000)); queue = check(libc.msgget(0, 0o600 | 0o1000))
down, other_down = (ctypes.c_short * 3)(0, -1, 0), (ctypes.c_short * 3)(1, -1, 0)
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
    begin("usleep of 2 s", repeats(lambda: libc.usleep(2_000_000))),
    begin("long poll", lambda: libc.poll(other_polled, 1, 1000_000)),
    begin("long epoll_wait", lambda: libc.epoll_wait(other_watched.fileno(), third_event, 1, 1000_000)),
    begin("long semtimedop", lambda: libc.semtimedop(semaphores, other_down, 1, long)),
    begin("recv with a limit", lambda: libc.recv(limited[0].fileno(), ctypes.create_string_buffer(8), 1, 0)),
    begin("accept with a limit", lambda: libc.accept(accepting.fileno(), None, None) > 0),
    begin("short poll", repeats(lambda: libc.poll(None, 0, 400))),
    begin("short epoll_wait", repeats(lambda: libc.epoll_wait(empty.fileno(), other_event, 1, 400))),
]
for i in steps(): note(sorted(results.items()))
working = False
for _, end in pipes: os.write(end, b"x")
pair[1].send(b"x"); limited[1].send(b"x"); socket.create_connection(accepting.getsockname())
open("folder/created", "w").close()
check(libc.semop(semaphores, (ctypes.c_short * 3)(0, 1, 0), 1))
check(libc.semop(semaphores, (ctypes.c_short * 3)(1, 1, 0), 1))
check(libc.msgsnd(queue, ctypes.create_string_buffer(b"\x01" + b"\0" * 15), 8, 0))
libc.sem_post(posix)
for thread in threads: thread.join()
for pair in sorted(results.items()): note(pair)
"#;

#[apply(as_root)]
fn waits_without_signals_are_not_interrupted() {
    survives(WAITS);
}

/// Calls that have moved a part of their bytes when a snapshot stops them, twice. Between the snapshots they move more.
const PARTS: &str = r#"
libc.syscall.argtypes = [ctypes.c_long] * 7
def call(number, *arguments):
    return libc.syscall(number, *[ctypes.addressof(x) if isinstance(x, ctypes.Array) else x for x in arguments], *[0] * (6 - len(arguments)))
results = {}
def begin(name, act):
    def run():
        ctypes.set_errno(0)
        result = act()
        results[name] = result if result != -1 else os.strerror(ctypes.get_errno())
    thread = threading.Thread(target=run); thread.start()
    return thread
working = True
def always(expected, act):
    """The first result that is not as expected, of calls over and over."""
    def run():
        while working:
            result = act()
            if result != expected: return result
        return expected
    return run
def bytes_of(count, seed):
    return hashlib.shake_128(seed.encode()).digest(count)
def same(name, taken, expected):
    assert hashlib.sha256(taken).digest() == hashlib.sha256(expected).digest(), f"{name}: {len(taken)} of {len(expected)}"
def array(count): return ctypes.create_string_buffer(count)

# What is written, and the descriptor at which the program takes it.
MANY = 16 << 20
sources = {name: bytes_of(MANY, name) for name in ["write", "send", "TCP", "sendfile"]}
buffers = {name: ctypes.create_string_buffer(data, MANY) for name, data in sources.items()}
open("source", "wb").write(sources["sendfile"])
source, offset = os.open("source", os.O_RDONLY), (ctypes.c_long * 1)(0)
pipe, pair, other_pair = os.pipe(), socket.socketpair(), socket.socketpair()
# A restore closes connections of an ordinary user on the machine's network.
if os.geteuid() == 0:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname()); server, _ = listener.accept()
else: client, server = socket.socketpair()
ends = {"write": pipe[0], "sendfile": other_pair[1].fileno(), "send": pair[1].fileno(), "TCP": server.fileno()}
taken = {name: bytearray() for name in ends}
def take(name, count):
    while count:
        part = os.read(ends[name], count)
        taken[name] += part; count -= len(part)

# What is read, and where the program writes it.
whole, fed, feed = bytes_of(30000, "whole"), array(30000), socket.socketpair()
listed, listing = [array(100) for _ in range(4)], socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
def messages(buffers):
    headers, vectors = array(64 * len(buffers)), array(16 * len(buffers))
    for i, buffer in enumerate(buffers):
        struct.pack_into("QQ", vectors, 16 * i, ctypes.addressof(buffer), len(buffer))
        struct.pack_into("QQQQQQQQ", headers, 64 * i, 0, 0, ctypes.addressof(vectors) + 16 * i, 1, 0, 0, 0, 0)
    return headers, vectors
receive = messages(listed)
sent, sending = [ctypes.create_string_buffer(bytes([i]) * 100, 100) for i in range(60)], socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
send = messages(sent); sending[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5000)
arrived = []
def datagrams(count):
    for _ in range(count): arrived.append(sending[1].recv(1000))
aio, events, blocks = (ctypes.c_long * 1)(0), array(3 * 32), array(3 * 16)
check(call(206, 8, aio))
def submit(number):
    block, pointer = array(64), (ctypes.c_long * 1)()
    struct.pack_into("QIIHhIQQq", block, 0, number, 0, 0, 0, 0, source, ctypes.addressof(blocks) + 16 * number, 16, 16 * number)
    pointer[0] = ctypes.addressof(block)
    assert call(209, aio[0], 1, pointer) == 1

random, zeros = array(4 << 20), array(64 << 20)
zero = os.open("/dev/zero", os.O_RDONLY)
threads = [
    begin("write", lambda: call(1, pipe[1], buffers["write"], MANY)),
    begin("send", lambda: call(44, pair[0].fileno(), buffers["send"], MANY)),
    begin("TCP", lambda: call(1, client.fileno(), buffers["TCP"], MANY)),
    begin("sendfile", lambda: call(40, other_pair[0].fileno(), source, offset, MANY)),
    begin("recv", lambda: call(45, feed[0].fileno(), fed, len(whole), socket.MSG_WAITALL)),
    begin("recvmmsg", lambda: call(299, listing[0].fileno(), receive[0], len(listed))),
    begin("sendmmsg", lambda: call(307, sending[0].fileno(), send[0], len(sent))),
    begin("io_getevents", lambda: call(208, aio[0], 3, 3, events)),
    begin("getrandom", always(4 << 20, lambda: call(318, random, 4 << 20))),
    begin("read of zeros", always(64 << 20, lambda: call(0, zero, zeros, 64 << 20))),
]
for round in range(2):
    feed[1].send(whole[round * 10000:][:10000]); listing[1].send(bytes([round]) * 100); submit(round)
    # All threads wait in their calls, with a part moved.
    if round == 0:
        full = lambda name: struct.unpack("i", fcntl.ioctl(ends[name], termios.FIONREAD, bytes(4)))[0] > 30000
        until(lambda: all(map(full, ends)))
    until(lambda: len(os.listdir("/proc/self/task")) == len(threads) + 1)
    time.sleep(0.1)
    assert not results, results
    print(f"armed-{round}", flush=True)
    gate(f"snapshotted-{round}")
    for name in ends: take(name, 300_000)
    datagrams(5)
    print(f"moved-{round}", flush=True)
    gate(f"crashed-{round}")
feed[1].send(whole[20000:]); listing[1].send(bytes([2]) * 100); listing[1].send(bytes([3]) * 100); submit(2)
for name in ends: take(name, MANY - len(taken[name]))
datagrams(50)
working = False
for thread in threads: thread.join()
expected = {name: MANY for name in ends} | {
    "recv": 30000, "recvmmsg": 4, "sendmmsg": 60, "io_getevents": 3,
    "getrandom": 4 << 20, "read of zeros": 64 << 20}
assert results == expected, results
for name in ends: same(name, taken[name], sources[name])
same("recv", fed.raw, whole)
same("recvmmsg", b"".join(part.raw for part in listed), b"".join(bytes([i]) * 100 for i in range(4)))
same("sendmmsg", b"".join(arrived), b"".join(bytes([i]) * 100 for i in range(60)))
same("io_getevents", blocks.raw, sources["sendfile"][:48])
assert [struct.unpack_from("Q", events, 32 * i)[0] for i in range(3)] == [0, 1, 2]
"#;

#[apply(as_root_and_user)]
fn calls_that_have_moved_a_part_are_completed() {
    survives_two_crashes(&format!("import termios\n{PARTS}"));
}

/// Waits for a byte. A signal ends the wait, Python's handler prints, and Python waits again.
const SIGNALED: &str = r#"
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
memory = os.urandom(100 << 20)
os.mkfifo("pipe"); pipe = os.open("pipe", os.O_RDWR)
print("waits", flush=True)
os.read(pipe, 1)
"#;

#[apply(as_root_and_user)]
fn a_signal_during_the_freeze_ends_a_wait() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, SIGNALED);
    place.wait_for("out", "waits\n");
    let job = run.job();
    for times in 1..=3 {
        wait_until("the wait", || state(job) == Some('S'));
        thread::scope(|scope| {
            scope.spawn(|| place.snapshot());
            // Stopped by a tracer.
            wait_until("the freeze", || state(job) == Some('t'));
            kill(Pid::from_raw(job), Signal::SIGUSR1).unwrap();
        });
        let handled = || place.text("out").matches("handled").count();
        wait_until("the handler", || handled() == times);
    }
    fs::write(place.file("pipe"), "x").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

/// A child waits in two calls. Until there is a file `slow`, the job cannot be dumped, which is found when it is frozen.
const STOPPED: &str = r#"
import ctypes, os, socket, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def wait(name, call):
    ctypes.set_errno(0)
    result = call()
    print(name, result, os.strerror(ctypes.get_errno()) if result == -1 else "", flush=True)
os.mkfifo("pipe"); pipe = os.open("pipe", os.O_RDWR)
polled = (ctypes.c_int * 2)(pipe, 1)
pair = socket.socketpair()
data = ctypes.create_string_buffer(8)
child = os.fork()
if child == 0:
    thread = threading.Thread(target=wait, args=("recv", lambda: libc.recv(pair[0].fileno(), data, 8, 0))); thread.start()
    wait("poll", lambda: libc.poll(polled, 1, -1))
    pair[1].send(b"x"); thread.join(); os._exit(0)
def has_own_folder():
    assert libc.unshare(0x200) == 0
    while not os.path.exists("slow"): time.sleep(0.005)
thread = threading.Thread(target=has_own_folder); thread.start()
print(child, "waits", flush=True)
thread.join(); print("whole", flush=True)
os.waitpid(child, 0)
"#;

#[apply(as_root_and_user)]
fn waits_go_on_after_a_stop_and_a_refused_snapshot() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, STOPPED);
    place.wait_for("out", "waits\n");
    let child = *descendants(run.job()).last().unwrap();
    wait_until("the wait", || state(child) == Some('S'));
    let refused = place.verb(&["snapshot"]);
    assert!(
        stderr(&refused).contains("CLONE_FS"),
        "{}",
        stderr(&refused)
    );
    fs::write(place.file("slow"), "").unwrap();
    place.wait_for("out", "whole\n");
    place.snapshot();
    for (signal, then) in [(Signal::SIGSTOP, 'T'), (Signal::SIGCONT, 'S')] {
        kill(Pid::from_raw(child), signal).unwrap();
        wait_until("the stop, and the wait again", || {
            state(child) == Some(then)
        });
    }
    place.snapshot();
    run.crash();
    place.wait_for("err", "restored image");
    place.snapshot();
    fs::write(place.file("pipe"), "x").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let out = place.text("out");
    assert!(out.ends_with("waits\nwhole\npoll 1 \nrecv 1 \n"), "{out}");
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
