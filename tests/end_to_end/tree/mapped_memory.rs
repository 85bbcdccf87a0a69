//! Memory: private, shared, backed by files or by nothing.

use super::survival::{Survival, survives, take_turns};
use crate::harness::{apply, as_root};

#[apply(as_root)]
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

#[apply(as_root)]
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

#[apply(as_root)]
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

#[apply(as_root)]
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

/// Named shared memory and a named semaphore between the job and its child; `{name}` is unique.
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

#[apply(as_root)]
fn named_shared_memory_and_semaphores_survive() {
    let _turn = take_turns();
    survives(NAMED);
}

#[apply(as_root)]
fn named_shared_memory_that_vanished_with_a_reboot_is_made_anew() {
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
