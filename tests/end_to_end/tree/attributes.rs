//! Attributes of threads besides memory and files.

use super::survival::survives;
use crate::harness::{apply, as_root};

#[apply(as_root)]
fn attributes_of_each_thread_survive() {
    survives(
        r#"
import platform, queue
native = platform.machine() == "x86_64"
set_io, get_io, set_policy, get_policy = (251, 252, 238, 239) if native else (30, 31, 237, 236)
has_nodes = os.path.exists("/proc/self/numa_maps")
def policy():
    mode, nodes = ctypes.c_int(), ctypes.c_ulong()
    if has_nodes: check(libc.syscall(get_policy, ctypes.byref(mode), ctypes.byref(nodes), 64, 0, 0))
    return mode.value, nodes.value
def have(cpu, io, slack):
    os.sched_setaffinity(0, {cpu})
    check(libc.syscall(set_io, 1, 0, 2 << 13 | io))
    check(libc.prctl(29, ctypes.c_ulong(slack), 0, 0, 0))
    if native and has_nodes:
        check(libc.syscall(set_policy, 3 if io == 6 else 2, ctypes.byref(ctypes.c_ulong(1)), 64))
    # ADDR_NO_RANDOMIZE, UNAME26
    if native: libc.personality(0x40000 if io == 6 else 0x20000)
def look():
    return (os.sched_getaffinity(0), libc.syscall(get_io, 1, 0), libc.prctl(30, 0, 0, 0, 0),
            policy(), libc.personality(0xffffffff))
asked, seen = queue.Queue(), queue.Queue()
def work():
    have(min(cpus), 6, 70001)
    while asked.get(): seen.put(look())
    seen.put(None)
cpus = os.sched_getaffinity(0)
thread = threading.Thread(target=work); thread.start()
asked.put(1); seen.get()
have(max(cpus), 7, 80001)
open("/proc/self/coredump_filter", "w").write("0x7f")
for i in steps():
    asked.put(1)
    note(look(), seen.get(), open("/proc/self/coredump_filter").read())
asked.put(0); thread.join()
"#,
    );
}
