//! Descriptors and signals that report events.

use super::survival::survives;
use crate::harness::{apply, as_root, as_root_and_user};

#[apply(as_root_and_user)]
fn epoll_and_eventfd_survive() {
    survives(
        r#"
counter = os.eventfd(0)
pipe = os.pipe()
poll = select.epoll()
poll.register(counter, select.EPOLLIN); poll.register(pipe[0], select.EPOLLIN)
names = {counter: "counter", pipe[0]: "pipe"}
for i in steps():
    os.eventfd_write(counter, i + 1)
    if i % 2: os.write(pipe[1], b"x")
    note(sorted((names[fd], event) for fd, event in poll.poll(5)))
    if i % 3 == 0: note(os.eventfd_read(counter))
note(os.eventfd_read(counter))
"#,
    );
}

#[apply(as_root_and_user)]
fn timers_go_on_ticking() {
    survives(
        r#"
class Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]
def timer(every_ns, first_ns):
    fd = check(libc.timerfd_create(time.CLOCK_MONOTONIC, 0))
    check(libc.timerfd_settime(fd, 0, ctypes.byref(Spec(0, every_ns, 0, first_ns)), None))
    return fd
periodic, once = timer(3_000_000, 1_000_000), timer(0, 700_000_000)
rung = {"timer": 0, "alarm": 0}
signal.signal(signal.SIGVTALRM, lambda *_: None)
signal.signal(signal.SIGALRM, lambda *_: rung.update(timer=rung["timer"] + 1))
signal.setitimer(signal.ITIMER_REAL, 0.004, 0.004)
signal.setitimer(signal.ITIMER_PROF, 100, 100)
for i in steps():
    before = rung["timer"]
    assert struct.unpack("Q", os.read(periodic, 8))[0] >= 1
    until(lambda: rung["timer"] > before)
    note(signal.getitimer(signal.ITIMER_REAL)[1], signal.getitimer(signal.ITIMER_PROF)[1])
note(os.read(once, 8))
signal.setitimer(signal.ITIMER_REAL, 0)
signal.setitimer(signal.ITIMER_PROF, 0)
"#,
    );
}

#[apply(as_root_and_user)]
fn idle_timers_stay_idle() {
    survives(
        r#"
class Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]
ABSOLUTE, NONBLOCK = 1, 0o4000
def timer(clock, first_ns):
    fd = check(libc.timerfd_create(clock, NONBLOCK))
    check(libc.timerfd_settime(fd, ABSOLUTE, ctypes.byref(Spec(0, 0, 0, first_ns)), None))
    return fd
clocks = (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)
idle, unread, read = ([timer(clock, first) for clock in clocks] for first in (0, 1, 1))
until(lambda: len(select.select(unread + read, [], [], 0)[0]) == 6)
for fd in read: os.read(fd, 8)
def ticks(fd):
    try: return os.read(fd, 8)
    except BlockingIOError: return None
for i in steps(): note(select.select(idle + read, [], [], 0)[0], len(select.select(unread, [], [], 0)[0]))
note([ticks(fd) for fd in idle + unread + read])
"#,
    );
}

#[apply(as_root_and_user)]
fn a_terminal_without_programs_reports_their_end() {
    survives(
        r#"
end, other = os.openpty()
used, left = os.openpty()
os.close(other)
poll = select.poll(); poll.register(end, select.POLLIN); poll.register(used, select.POLLIN)
for i in steps(): note([(fd == end, event) for fd, event in poll.poll(0)])
try: os.read(end, 1)
except OSError as error: note(error.errno)
os.write(left, b"text"); note(os.read(used, 10))
"#,
    );
}

#[apply(as_root_and_user)]
fn alarm_set_before_the_snapshot_fires_after_the_restore() {
    survives(
        r"
rung = []
signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
signal.alarm(30)
for i in steps(): note(rung, signal.getitimer(signal.ITIMER_REAL)[0] > 0)
left = signal.alarm(1)
assert 0 < left <= 30
until(lambda: rung)
note(rung)
",
    );
}

#[apply(as_root_and_user)]
fn signalfd_and_pending_signals_survive() {
    survives(
        r#"
rt = [signal.SIGRTMIN + n for n in range(3)]
signal.pthread_sigmask(signal.SIG_BLOCK, {*rt, signal.SIGTERM, signal.SIGUSR2})
mask = ctypes.create_string_buffer(128)
libc.sigemptyset(mask)
for n in rt: libc.sigaddset(mask, n)
fd = check(libc.signalfd(-1, mask, 0))
def queue(number, value): check(libc.sigqueue(os.getpid(), int(number), ctypes.c_void_p(value)))
for n in range(5): queue(rt[2], 100 + n)
os.kill(os.getpid(), signal.SIGTERM)
for i in steps():
    queue(rt[i % 2], i)
    info = os.read(fd, 128)
    note(struct.unpack_from("I", info, 0), struct.unpack_from("i", info, 44))
    note(sorted(map(int, signal.sigpending())))
for n in range(5):
    info = os.read(fd, 128)
    note(struct.unpack_from("I", info, 0), struct.unpack_from("i", info, 44))
note(int(signal.sigwait({signal.SIGTERM})))
"#,
    );
}

#[apply(as_root)]
fn inotify_watches_survive() {
    survives(
        r#"
os.mkdir("watched")
fd = check(libc.inotify_init1(os.O_NONBLOCK))
check(libc.inotify_add_watch(fd, b"watched", 0x100))  # IN_CREATE
for i in steps():
    open(f"watched/{i}-{time.monotonic_ns()}", "w").close()
    select.select([fd], [], [], 5)
    mask, size = struct.unpack_from("4xI4xI", events := os.read(fd, 4096))
    note(mask, size > 0, events[16:].startswith(b"%d-" % i))
"#,
    );
}

#[apply(as_root)]
fn a_snapshot_copies_watched_files_without_an_event() {
    survives(
        r#"
os.mkdir("watched")
open("watched/closed", "w").write("text")
fd = check(libc.inotify_init1(os.O_NONBLOCK))
# IN_ALL_EVENTS of the file, not of the folder, which ckpt-run lists at the first change in it.
check(libc.inotify_add_watch(fd, b"watched/closed", 0xfff))
for i in steps(): pass
note(select.select([fd], [], [], 0)[0])
"#,
    );
}

#[apply(as_root_and_user)]
fn a_pseudo_terminal_with_its_shell_survives() {
    survives(
        r#"
import pty, termios
child, master = pty.fork()
if child == 0:
    os.execvp("sh", ["sh", "-c", "stty -echo; echo ready; while read line; do echo \"<$line>\"; done"])
terminal = open(master, "r+b", 0)
def line():
    text = b""
    while not text.endswith(b"\n"): text += terminal.read(1)
    return text
note(line())
for i in steps():
    terminal.write(b"word %d\n" % i)
    note(line(), termios.tcgetattr(master)[3] & termios.ECHO)
    note(os.tcgetpgrp(master) == child)
terminal.write(b"\x04")
note(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"#,
    );
}

/// Sampling profilers make such a timer for each thread.
#[apply(as_root_and_user)]
fn a_timer_of_the_time_of_a_thread_survives() {
    survives(
        r#"
CLOCK_THREAD_CPUTIME_ID, SIGEV_THREAD_ID = 3, 4
timer_create, timer_settime = {"x86_64": (222, 223), "aarch64": (107, 110)}[os.uname().machine]
ticks = 0
def tick(*_): global ticks; ticks += 1
signal.signal(signal.SIGUSR1, tick)
def work():
    event = struct.pack("qiii44x", 0, signal.SIGUSR1, SIGEV_THREAD_ID, threading.get_native_id())
    timer = ctypes.c_int()
    check(libc.syscall(timer_create, CLOCK_THREAD_CPUTIME_ID, event, ctypes.byref(timer)))
    check(libc.syscall(timer_settime, timer, 0, struct.pack("4q", 0, 10_000_000, 0, 10_000_000), None))
    while working: pass
working = True
thread = threading.Thread(target=work)
thread.start()
for i in steps():
    before = ticks; until(lambda: ticks > before); note(i)
# While Python ends it has no handlers: a tick would be its death.
working = False
thread.join()
"#,
    );
}
