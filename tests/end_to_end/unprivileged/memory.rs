//! Mapped files and shared memory, whose links in `/proc` the kernel lets only root follow.

use crate::harness::{ON_REQUEST, Place, apply, as_user, stderr};

/// Functions of the jobs. Memory that is mapped by `mapped` has no descriptor, unlike that of Python's own `mmap`.
const PRELUDE: &str = r#"
import ctypes, os, tempfile, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.shmat.restype = libc.sem_open.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SHARED, PRIVATE, ANONYMOUS = 1, 2, 0x20
def mapped(fd, length, flags, offset=0):
    at = libc.mmap(None, length, 3, flags, fd, offset)
    assert at != ctypes.c_void_p(-1).value
    return at
def get(at, n=1): return ctypes.string_at(at, n)
def put(at, text): ctypes.memmove(at, text, len(text))
def wait(condition):
    while not condition(): time.sleep(0.005)
def ready():
    print("ready", flush=True)
    wait(lambda: os.path.exists("go"))
"#;

/// The job survives a crash, and prints this afterwards.
fn survives(script: &str, expected: &str) {
    let place = Place::new();
    let script = format!("{PRELUDE}{script}");
    let mut run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready");
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored image=000001");
    // And once more: what came back has to be such that it can be saved.
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored image=000002");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), format!("ready\n{expected}\n"));
}

#[apply(as_user)]
fn a_deleted_file_without_a_descriptor_stays_shared() {
    survives(
        r#"
f = tempfile.TemporaryFile(); f.write(b"x" * 10000); f.flush()
first = mapped(f.fileno(), 4096, SHARED)
rest = mapped(f.fileno(), 5904, SHARED, 4096)
f.close()
if os.fork() == 0:
    wait(lambda: get(first) == b"1")
    put(rest + 5903, b"2")
    os._exit(0)
ready()
put(first, b"1")
wait(lambda: get(rest + 5903) == b"2")
print(get(first, 2), get(rest + 5902, 2))
"#,
        "b'1x' b'x2'",
    );
}

#[apply(as_user)]
fn a_deleted_file_that_another_process_has_open_is_that_file() {
    survives(
        r#"
f = tempfile.TemporaryFile(); f.write(b"x" * 4096); f.flush()
r, w = os.pipe()
if os.fork() == 0:
    os.read(r, 1)
    os.pwrite(f.fileno(), b"3", 7)
    os._exit(0)
m = mapped(f.fileno(), 4096, SHARED)
f.close()
ready()
os.write(w, b"x")
wait(lambda: get(m + 7) == b"3")
print("seen")
"#,
        "seen",
    );
}

#[apply(as_user)]
fn memory_files_without_a_descriptor_keep_name_and_content() {
    survives(
        r#"
f = os.memfd_create("note"); os.write(f, b"y" * 8192)
m = mapped(f, 8192, SHARED); os.close(f)
ready()
print(get(m + 8190, 2), any("/memfd:note" in line for line in open("/proc/self/maps")))
"#,
        "b'yy' True",
    );
}

#[apply(as_user)]
fn parts_of_shared_memory_are_saved_at_their_places() {
    survives(
        r#"
page = 4096
base = mapped(-1, 4 * page, SHARED | ANONYMOUS)
for n in range(4): put(base + n * page, bytes([65 + n]) * page)
child = os.fork()
if child == 0:
    libc.munmap(base, page)
    wait(lambda: get(base + 3 * page) == b"!")
    put(base + page, b"?")
    os._exit(0)
libc.munmap(base, page)
libc.munmap(base + 2 * page, page)
ready()
put(base + 3 * page, b"!")
wait(lambda: get(base + page) == b"?")
print(get(base + page, 2), get(base + 3 * page, 2))
"#,
        "b'?B' b'!D'",
    );
}

#[apply(as_user)]
fn a_named_semaphore_is_the_file_of_its_name() {
    survives(
        r#"
libc.sem_post.argtypes = libc.sem_trywait.argtypes = libc.sem_close.argtypes = [ctypes.c_void_p]
name = b"/ckpt-run-%d" % os.getpid()
one = libc.sem_open(name, 0o100 | 0o200, 0o600, 3)
ready()
libc.sem_post(one)
libc.sem_close(one)
other = libc.sem_open(name, 0)
count = 0
while libc.sem_trywait(other) == 0: count += 1
libc.sem_unlink(name)
print(count)
"#,
        "4",
    );
}

#[apply(as_user)]
fn asynchronous_io_is_there_again() {
    survives(
        r"
context = ctypes.c_ulong(0)
assert libc.syscall(206, 8, ctypes.byref(context)) == 0
ready()
print(libc.syscall(207, context))
",
        "0",
    );
}

#[apply(as_user)]
fn system_v_memory_and_semaphores_survive() {
    survives(
        r#"
shm = libc.shmget(0x4711, 12288, 0o1600)
at = libc.shmat(shm, None, 0)
put(at + 8192, b"ZZZ")
sem = libc.semget(0, 1, 0o1600)
libc.semctl(sem, 0, 16, 5)
ready()
print(libc.shmget(0x4711, 0, 0) == shm, get(at + 8191, 4), libc.semctl(sem, 0, 12))
libc.shmctl(shm, 0, None)
"#,
        "True b'\\x00ZZZ' 5",
    );
}

#[apply(as_user)]
fn a_deleted_file_of_which_only_copies_are_mapped_is_refused() {
    let place = Place::new();
    let script = r#"
f = tempfile.TemporaryFile(); f.write(b"x" * 8192); f.flush()
m = mapped(f.fileno(), 8192, PRIVATE)
f.close()
put(m, b"1")
ready()
print(get(m, 2))
"#;
    let script = format!("{PRELUDE}{script}");
    let mut run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success());
    assert!(
        said.contains("has mapped a deleted or replaced file"),
        "{said}"
    );
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "ready\nb'1x'\n");
}
