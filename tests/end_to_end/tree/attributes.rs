//! What a thread has beside its memory and its files.

use super::survival::survives;
use crate::harness::{apply, as_root};

#[apply(as_root)]
fn affinity_io_priority_timer_slack_and_core_filter_survive_in_each_thread() {
    survives(
        r#"
import platform, queue
set_io, get_io = {"x86_64": (251, 252), "aarch64": (30, 31)}[platform.machine()]
def have(cpu, io, slack):
    os.sched_setaffinity(0, {cpu})
    check(libc.syscall(set_io, 1, 0, 2 << 13 | io))
    check(libc.prctl(29, ctypes.c_ulong(slack), 0, 0, 0))
def look():
    return os.sched_getaffinity(0), libc.syscall(get_io, 1, 0), libc.prctl(30, 0, 0, 0, 0)
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
