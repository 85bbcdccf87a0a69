//! Threads that wait in the kernel: a snapshot and a restore must not end the wait.

use std::fs;

use super::survival::survives;
use crate::harness::{ON_REQUEST, Place, apply, as_root};

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
