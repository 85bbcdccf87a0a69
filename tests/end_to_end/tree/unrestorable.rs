//! State that an image would lack or that cannot be restored, and state that a snapshot would harm: refused by name,
//! and the job continues.

use std::process::Command;

use crate::harness::{ON_REQUEST, Place, apply, as_root_and_user, skip, stderr, stdout};

/// Starts the job, which prints "ready", and returns the message with which a snapshot is refused. The job must
/// continue.
fn refusal(script: &str) -> String {
    let place = Place::new();
    let script = format!(
        "import ctypes, fcntl, os, signal, sys, time\n{script}\nprint('ready', flush=True)\n\
         while not os.path.exists('go'): time.sleep(0.02)\n"
    );
    let mut run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success(), "{said}");
    assert!(!place.text("err").contains("freeze="), "it was frozen");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    said
}

/// Double-forked daemon under a subreaper of the job; the leader of its session has exited.
const ADOPTED: &str = r#"
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
ready = os.pipe()
first = os.fork()
if first == 0:
    os.setsid()
    if os.fork() == 0:
        while os.getppid() == os.getsid(0): time.sleep(0.001)
        os.write(ready[1], b"x")
        while True: signal.pause()
    os._exit(0)
os.waitpid(first, 0)
os.read(ready[0], 1)
"#;

#[apply(as_root_and_user)]
fn a_daemon_that_the_job_has_adopted_is_refused_by_name() {
    let said = refusal(ADOPTED);
    assert!(
        said.contains("(python3) adopted it as a subreaper") && said.contains("setsid"),
        "{said}"
    );
}

#[apply(as_root_and_user)]
fn a_write_lease_is_refused_by_name_before_it_breaks() {
    let said = refusal(
        r"
file = open('leased', 'w+'); file.write('x' * 100); file.flush()
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)",
    );
    assert!(
        said.contains("(python3) has a write lease on /") && said.contains("/leased (F_SETLEASE)"),
        "{said}"
    );
}

#[apply(as_root_and_user)]
fn a_process_without_its_first_thread_is_refused_by_name() {
    let said = refusal(
        r#"
import threading
ended = os.fork()
if ended == 0:
    threading.Thread(target=time.sleep, args=[1000]).start()
    ctypes.CDLL(None).pthread_exit(None)
while open(f"/proc/{ended}/stat").read().rpartition(") ")[2][0] != "Z": time.sleep(0.01)"#,
    );
    assert!(
        said.contains("(python3) runs without its first thread") && said.contains("pthread_join"),
        "{said}"
    );
}

/// Memory with a guard page.
const GUARDED: &str = r"
import ctypes, mmap
MADV_GUARD_INSTALL = 102
libc, memory = ctypes.CDLL(None), mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
libc.madvise(place, 4096, MADV_GUARD_INSTALL)
";

/// glibc 2.42 has such pages below the stacks of threads.
#[apply(as_root_and_user)]
fn locked_memory_with_guard_pages_is_refused_by_name() {
    let shown = format!("{GUARDED}print(' gu' in open('/proc/self/smaps').read())");
    let shown = Command::new("python3").args(["-c", &shown]).output();
    if stdout(&shown.expect("python3 starts")) != "True\n" {
        skip("this kernel does not show guard pages (Linux 6.18)");
        return;
    }
    // The call fails at the guard page, and the memory is locked.
    let said = refusal(&format!("{GUARDED}libc.mlock(place, 1 << 16)"));
    assert!(
        said.contains("locked memory with guard pages") && said.contains("MCL_FUTURE"),
        "{said}"
    );
}
