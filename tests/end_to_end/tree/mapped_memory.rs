//! Memory: private, shared, backed by files or anonymous.

use super::survival::{Survival, survives, take_turns};
use crate::harness::{
    ON_REQUEST, Ordinary, Place, apply, as_root_and_user, skip, stderr, wait_until,
};

#[apply(as_root_and_user)]
fn a_large_private_memory_survives_to_the_last_byte() {
    survives(
        r#"
memory = bytearray(hashlib.shake_128(b"seed").digest(300 << 20))
for i in steps():
    for at in range(i << 20, len(memory), 50 << 20): memory[at] ^= 255
note(hashlib.blake2b(memory).hexdigest())
"#,
    );
}

/// `MariaDB` and .NET reserve more addresses than the machine has memory, and use parts of them later.
#[apply(as_root_and_user)]
fn reserved_addresses_survive() {
    survives(
        r#"
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
length, unit = 8 << 40, 1 << 20
start = libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

def use(at):
    check(libc.mprotect(start + at, unit, mmap.PROT_READ | mmap.PROT_WRITE))
    ctypes.memset(start + at, 7, unit)

def found():
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first:
            low, high = (int(end, 16) for end in first.split("-"))
            inside = start <= low and high <= start + length
            if inside: yield low - start, high - start, line.split()[1]
        elif inside and first == "VmFlags:":
            # A restored reservation has MAP_NORESERVE, and the kernel does not count what is used of it.
            yield [flag for flag in line.split()[1:] if flag not in ("nr", "ac")]

use(1 << 40)
answer, told = os.pipe()
ended, end = os.pipe()
child = os.fork()
if child == 0:
    os.close(end)
    os.read(ended, 1)
    use(3 << 40)
    os.write(told, repr(list(found())).encode())
    os._exit(0)
for i in steps():
    if i == 16: use(2 << 40)
os.close(end)
os.waitpid(child, 0)
note(os.read(answer, 1 << 16), list(found()))
note([ctypes.string_at(start + (at << 40), unit).count(7) for at in (1, 2)])
"#,
    );
}

/// Prints digests of its private and of its shared memory.
const LARGE: &str = r#"
import hashlib, mmap, os, time
content = hashlib.shake_128(b"seed").digest(24 << 20)
private, shared = bytearray(content), mmap.mmap(-1, len(content))
shared[:] = content
while True:
    print(hashlib.blake2b(private).hexdigest()[:8], hashlib.blake2b(shared).hexdigest()[:8], flush=True)
    if os.path.exists("go"): break
    time.sleep(0.1)
"#;

#[apply(as_root_and_user)]
fn large_memory_is_written_into_criu_directly() {
    let place = Place::new();
    let mut run = place.start_python_with(&ON_REQUEST, LARGE, |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
        command.env("CKPT_RUN_LOG_LEVEL", "debug");
    });
    wait_until("the memory", || !place.text("out").is_empty());
    place.snapshot();
    run.crash();
    wait_until("the restore", || {
        place.text("err").contains("restored image")
    });
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let out = place.text("out");
    let digests: Vec<&str> = out.split_whitespace().collect();
    assert!(digests.iter().all(|one| *one == digests[0]), "{out}");
    let said = place.text("err");
    let direct = said.lines().filter_map(|line| {
        let (_, bytes) = line.split_once("wrote memory directly into CRIU bytes=")?;
        bytes.parse::<u64>().ok()
    });
    let large = direct.filter(|bytes| *bytes > 20 << 20).count();
    assert_eq!(large, 2, "private and shared memory: {said}");
}

#[apply(as_root_and_user)]
fn memory_of_an_unlinked_file_survives_beside_a_zombie() {
    survives(
        r#"
name = f"/dev/shm/ckpt-run-test-{os.getpid()}-{time.time_ns()}"
with open(name, "w+b") as file:
    file.truncate(4096)
    shared = mmap.mmap(file.fileno(), 4096)
os.remove(name)
child = os.fork()
if child == 0: shared[:5] = b"child"; os._exit(7)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
for i in steps(): shared[100 + i] = i
note(bytes(shared[:5]), sum(bytes(shared)), os.waitpid(child, 0)[1])
"#,
    );
}

#[apply(as_root_and_user)]
fn anonymous_shared_memory_stays_shared() {
    survives(
        r#"
shared = mmap.mmap(-1, 1 << 20)
turn = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    while (data := os.read(turn[0][0], 1)) != b"q":
        shared[data[0] * 5000] = data[0] + 1
        shared.seek(0); shared.write(hashlib.sha256(shared[:]).digest())
        os.write(turn[1][1], b"x")
    os._exit(0)
for i in steps():
    os.write(turn[0][1], bytes([i])); os.read(turn[1][0], 1)
    note(shared[:])
    shared[i * 777] = i
os.write(turn[0][1], b"q"); os.waitpid(child, 0)
"#,
    );
}

#[apply(as_root_and_user)]
fn private_and_shared_file_mappings_survive() {
    survives(
        r#"
with open("private", "wb") as file: file.write(bytes(range(256)) * 256)
with open("shared", "wb") as file: file.write(bytes(65536))
private_file, shared_file = open("private", "rb"), open("shared", "r+b")
private = mmap.mmap(private_file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
shared = mmap.mmap(shared_file.fileno(), 0)
shared_file.close()
for i in steps():
    private[i * 1000] = i; shared[i * 1000] = 255 - i
    note(private[:], shared[:])
shared.flush()
note(open("private", "rb").read(), open("shared", "rb").read())
"#,
    );
}

#[apply(as_root_and_user)]
fn memory_of_a_memfd_survives() {
    survives(
        r#"
memfd = os.memfd_create("buffer", os.MFD_ALLOW_SEALING)
os.ftruncate(memfd, 1 << 20)
fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
view = mmap.mmap(memfd, 0)
for i in steps():
    view[i * 4096] = i + 1
    os.pwrite(memfd, b"direct", i * 4096 + 100)
    note(view[:], os.pread(memfd, 1 << 20, 0) == view[:], fcntl.fcntl(memfd, fcntl.F_GET_SEALS))
"#,
    );
}

/// Creates named shared memory and a named semaphore between the job and its child; `{name}` is unique.
const NAMED: &str = r#"
from multiprocessing import shared_memory
name = "ckpt-run-test-" + hashlib.sha256(os.getcwd().encode()).hexdigest()[:12]
open("name", "w").write(name)
libc.sem_open.restype = ctypes.c_void_p
semaphore = ctypes.c_void_p(libc.sem_open(("/" + name).encode(), os.O_CREAT, 0o600, 3))
shared = shared_memory.SharedMemory(name=name, create=True, size=100000)
turn = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    same = shared_memory.SharedMemory(name=name)
    while (data := os.read(turn[0][0], 1)) != b"q":
        same.buf[data[0] * 4000] = data[0] + 1
        check(libc.sem_post(semaphore))
        os.write(turn[1][1], b"x")
    os._exit(0)
value = ctypes.c_int()
for i in steps():
    os.write(turn[0][1], bytes([i])); os.read(turn[1][0], 1)
    check(libc.sem_getvalue(semaphore, ctypes.byref(value)))
    note(bytes(shared.buf), value.value)
    if i % 3 == 0: check(libc.sem_wait(semaphore))
os.write(turn[0][1], b"q"); os.waitpid(child, 0)
again = open("/dev/shm/" + name, "rb").read()
note(again == bytes(shared.buf))
shared.close(); shared.unlink(); libc.sem_unlink(("/" + name).encode())
"#;

#[apply(as_root_and_user)]
fn named_shared_memory_and_semaphores_survive() {
    let _turn = take_turns();
    survives(NAMED);
}

#[apply(as_root_and_user)]
fn named_shared_memory_lost_in_a_reboot_is_recreated() {
    let _turn = take_turns();
    let survival = Survival::begin(NAMED);
    survival
        .supervisor_dies(|place| {
            let name = place.text("name");
            std::fs::remove_file(format!("/dev/shm/{name}")).expect("the memory");
            std::fs::remove_file(format!("/dev/shm/sem.{name}")).expect("the semaphore");
        })
        .ends_like_an_undisturbed_run();
}

/// Number of huge pages that the tests need: those of one job, while it is restored.
const HUGE_PAGES: u64 = 4;

/// Returns true if the machine has enough free huge pages. If not, the test counts as skipped.
fn has_huge_pages() -> bool {
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free = free.map_or(0, |text| text.trim().parse().unwrap_or(0));
    if free < 2 * HUGE_PAGES {
        skip("too few huge pages here: vm.nr_hugepages");
    }
    free >= 2 * HUGE_PAGES
}

#[apply(as_root_and_user)]
fn private_and_shared_huge_pages_survive() {
    if !has_huge_pages() {
        return;
    }
    survives(
        r#"
HUGE, LENGTH = 0x40000, 2 << 20
libc.mmap.restype = ctypes.c_void_p
def huge(flags, fd=-1):
    at = libc.mmap(None, ctypes.c_size_t(LENGTH), 3, flags, fd, 0)
    return check(-1) if at == ctypes.c_void_p(-1).value else (ctypes.c_ubyte * LENGTH).from_address(at)
memfd = os.memfd_create("huge", 4); os.ftruncate(memfd, LENGTH)
private, shared = huge(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | HUGE), huge(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | HUGE)
file = huge(mmap.MAP_SHARED, memfd)
ctypes.memset(private, 7, LENGTH)
small = bytearray(hashlib.shake_128(b"seed").digest(10 << 20))
turn = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    while data := os.read(turn[0][0], 1):
        shared[data[0] * 5000] = 99; private[data[0]] = 98
        os.write(turn[1][1], hashlib.sha256(private).digest())
def page_size(memory):
    text = open("/proc/self/smaps").read().split("\n%x-" % ctypes.addressof(memory))[1]
    return text.split("KernelPageSize:")[1].split()[:2]
for i in steps():
    private[i * 777] = i; file[i * 555] = i; small[i << 18] ^= 255
    os.write(turn[0][1], bytes([i])); note(os.read(turn[1][0], 32))
    note(*(hashlib.sha256(memory).hexdigest() for memory in (private, shared, file, small)))
    note(*map(page_size, (private, shared, file)))
os.kill(child, signal.SIGKILL)
"#,
    );
}

#[apply(as_root_and_user)]
fn unrestorable_huge_pages_of_forks_are_named() {
    if !has_huge_pages() {
        return;
    }
    let place = Place::new();
    let mut run = place.start_python(
        &ON_REQUEST,
        r#"
import ctypes, mmap, os, time
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
length = 2 << 20
at = libc.mmap(None, ctypes.c_size_t(length), 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000, -1, 0)
ctypes.memset(at, 1, length)
pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/"
pages = sum(int(open(pool + name).read()) for name in ("nr_hugepages", "nr_overcommit_hugepages"))
ends = os.pipe()
children = []
for i in range(pages):
    children.append(os.fork())
    if children[-1] == 0: os.close(ends[1]); os.read(ends[0], 1); os._exit(0)
print("ready", flush=True)
while not os.path.exists("end"): time.sleep(0.02)
os.close(ends[1])
for child in children: os.waitpid(child, 0)
print("alone", flush=True)
while not os.path.exists("go"): time.sleep(0.02)
"#,
    );
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success(), "{said}");
    assert!(
        said.contains("(python3) and others share huge pages of 2048 KiB"),
        "{said}"
    );
    assert!(said.contains("raise vm.nr_hugepages"), "{said}");
    std::fs::write(place.file("end"), "").unwrap();
    place.wait_for("out", "alone");
    place.snapshot();
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn a_mapped_file_replaced_by_another_program_is_refused() {
    let place = Place::new();
    let mut run = place.start_python(
        &ON_REQUEST,
        r#"
import mmap, os, time
with open("table", "wb") as file: file.write(b"a" * 65536)
with open("table", "rb") as file: table = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.02)
print(set(table), flush=True)
"#,
    );
    place.wait_for("out", "ready");
    place.snapshot();
    std::fs::write(place.file("other"), vec![b'b'; 65536]).unwrap();
    std::fs::rename(place.file("other"), place.file("table")).unwrap();
    run.crash();
    place.go();
    assert_ne!(run.wait(), 0, "{}", place.text("out"));
    let said = place.text("err");
    assert!(said.contains("/table ("), "{said}");
    assert!(!place.text("out").contains("98"), "it computed on");
}

#[apply(as_root_and_user)]
fn another_build_of_a_mapped_file_is_refused() {
    let place = Place::new();
    let build = |byte| {
        let other = place.file("other");
        let content = [b"\x7fELF".to_vec(), vec![byte; 65536]].concat();
        std::fs::write(&other, content).unwrap();
        let file = std::fs::File::options().write(true).open(&other).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        std::fs::rename(other, place.file("library")).unwrap();
    };
    build(b'a');
    let mut run = place.start_python(
        &ON_REQUEST,
        r#"
import mmap, os, time
with open("library", "rb") as file: library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.02)
print(set(library), flush=True)
"#,
    );
    place.wait_for("out", "ready");
    place.snapshot();
    build(b'b');
    run.crash();
    place.go();
    assert_ne!(run.wait(), 0, "{}", place.text("out"));
    let said = place.text("err");
    // Without root, the scan of the folder finds it first.
    assert!(said.contains("/library"), "{said}");
    assert!(!place.text("out").contains("98"), "it computed on");
}

/// `SQLite` locks parts of the index of its log in this way.
#[apply(as_root_and_user)]
fn record_locks_on_mapped_files_survive() {
    survives(
        r#"
import fcntl, mmap
index = open("index", "w+b"); index.write(bytes(4096)); index.flush()
memory = mmap.mmap(index.fileno(), 4096)
reader = open("index", "rb")
fcntl.lockf(index, fcntl.LOCK_EX, 8, 120)
fcntl.lockf(reader, fcntl.LOCK_SH, 0, 1000)
def refused(kind, at):
    pid = os.fork()
    if pid == 0:
        try: fcntl.lockf(index, kind | fcntl.LOCK_NB, 1, at)
        except OSError: os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
for i in steps():
    note([refused(kind, at) for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH) for at in (119, 120, 127, 128, 1000)])
"#,
    );
}

/// The kernel marks such a mutex when the process that holds it ends.
const ROBUST: &str = r#"
import ctypes, mmap, os, time
c = ctypes.CDLL(None)
file = open("mutex", "w+b"); file.write(bytes(4096)); file.flush()
memory = mmap.mmap(file.fileno(), 4096)
mutex = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
attributes = ctypes.create_string_buffer(64)
PTHREAD_PROCESS_SHARED = PTHREAD_MUTEX_ROBUST = 1
c.pthread_mutexattr_init(attributes)
c.pthread_mutexattr_setpshared(attributes, PTHREAD_PROCESS_SHARED)
c.pthread_mutexattr_setrobust(attributes, PTHREAD_MUTEX_ROBUST)
c.pthread_mutex_init(mutex, attributes); c.pthread_mutex_lock(mutex)
def tell():
    pid = os.fork()
    if pid == 0: os._exit(c.pthread_mutex_trylock(mutex))
    print(os.strerror(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])), flush=True)
tell()
while not os.path.exists("go"): time.sleep(0.01)
tell()
"#;

#[apply(as_root_and_user)]
fn a_robust_mutex_in_a_file_stays_locked_over_a_stop() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, ROBUST);
    place.wait_for("out", "busy\n");
    let stopped = place.verb(&["stop"]);
    assert!(stopped.status.success(), "{}", stderr(&stopped));
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let mut run = place.start(&ON_REQUEST, &["python3", "-u", "job.py"]);
    wait_until("the restore", || {
        place.text("err").contains("restored image")
    });
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let busy = "Device or resource busy\n";
    assert_eq!(place.text("out"), busy.repeat(2));
}

#[apply(as_root_and_user)]
fn a_closed_file_in_memory_that_a_mapping_changed_goes_back() {
    let place = Place::new();
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    if let Some(user) = Ordinary::of_test() {
        user.owns(folder.path());
    }
    let script = format!(
        r#"
import mmap, os, time
path = "{}/counter"
open(path, "wb").write(bytes(4096))
print("ready", flush=True)
while not os.path.exists("accept"): time.sleep(0.01)
with open(path, "r+b") as file, mmap.mmap(file.fileno(), 4096) as memory: memory[0] += 1
print("changed to", open(path, "rb").read(1)[0], flush=True)
while not os.path.exists("go"): time.sleep(0.01)
"#,
        folder.path().display()
    );
    let mut run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready\n");
    place.snapshot();
    std::fs::write(place.file("accept"), "").unwrap();
    place.wait_for("out", "changed to 1\n");
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "ready\nchanged to 1\n");
}

/// Stores through a mapping do not change the times of a file in memory. The second image must not have the content of the
/// first.
#[apply(as_root_and_user)]
fn a_file_in_memory_changed_by_a_short_mapping_is_saved_again() {
    let survival = Survival::begin(
        r#"
path = "/dev/shm/" + os.path.basename(os.getcwd())
open(path, "wb").write(bytes(8))
for i in steps():
    with open(path, "r+b") as file: counter = mmap.mmap(file.fileno(), 8)
    counter[0] += 1; note(i, counter[0]); counter.close()
os.remove(path)
"#,
    );
    survival.place.snapshot();
    survival.run.crash();
    survival.ends_like_an_undisturbed_run();
}
