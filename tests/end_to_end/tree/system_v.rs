//! System V IPC: the job has a separate IPC namespace.

use super::survival::survives;
use crate::harness::{apply, as_root_and_user};

const JOB: &str = r#"
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
KEY, CREATE = 0x434b5054, 0o1600
memory = check(libc.shmget(KEY, 65536, CREATE))
address = libc.shmat(memory, None, 0)
assert address != 2**64 - 1
view = (ctypes.c_ubyte * 65536).from_address(address)
private = check(libc.shmget(0, 8192, CREATE))
unattached = libc.shmat(private, None, 0)
ctypes.memmove(unattached, b"nobody looks", 12); check(libc.shmdt(ctypes.c_void_p(unattached)))
semaphores = check(libc.semget(KEY, 2, CREATE))
queue = check(libc.msgget(KEY, CREATE))
class Message(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_long), ("text", ctypes.c_char * 32)]
def operate(number, change):
    check(libc.semop(semaphores, struct.pack("HhH", number, change, 0), 1))
turn = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    while (data := os.read(turn[0][0], 1)) != b"q":
        view[data[0] * 3000] = data[0] + 1
        operate(0, 2)
        os.write(turn[1][1], b"x")
    os._exit(0)
for i in steps():
    os.write(turn[0][1], bytes([i])); os.read(turn[1][0], 1)
    operate(0, -1); operate(1, 1)
    note(bytes(view), [libc.semctl(semaphores, n, 12) for n in range(2)])  # GETVAL
    check(libc.msgsnd(queue, ctypes.byref(Message(i % 2 + 1, b"message %d" % i)), 32, 0))
    if i % 2:
        received = Message()
        check(libc.msgrcv(queue, ctypes.byref(received), 32, 1, 0)); note(received.kind, received.text)
    note(memory == libc.shmget(KEY, 0, 0), semaphores == libc.semget(KEY, 0, 0), queue == libc.msgget(KEY, 0))
os.write(turn[0][1], b"q"); os.waitpid(child, 0)
again = libc.shmat(private, None, 0)
note(ctypes.string_at(again, 12))
for _ in range(STEPS // 2):
    received = Message()
    check(libc.msgrcv(queue, ctypes.byref(received), 32, 0, 0)); note(received.kind, received.text)
check(libc.shmctl(memory, 0, None)); check(libc.shmctl(private, 0, None))
check(libc.semctl(semaphores, 0, 0)); check(libc.msgctl(queue, 0, None))
"#;

#[apply(as_root_and_user)]
fn system_v_memory_semaphores_and_messages_survive() {
    survives(JOB);
}
