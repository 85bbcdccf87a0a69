//! Attributes of threads besides memory and files.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::survival::survives;
use crate::harness::{
    ON_REQUEST, Place, apply, as_root, as_root_and_user, as_user, state, wait_until,
};

#[apply(as_root_and_user)]
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

#[apply(as_root)]
fn a_process_comes_back_in_its_control_group() {
    survives(
        r#"
def own_group(mount):
    hierarchy = lambda line: line.split(":")[1]
    lines = [line for line in open("/proc/self/cgroup").read().split() if hierarchy(line) == mount[0]]
    return mount[1] + lines[0].split(":", 2)[2] if lines else None
mounts = [("pids", "/sys/fs/cgroup/pids"), ("", "/sys/fs/cgroup"), ("", "/sys/fs/cgroup/unified")]
group = None
for folder in filter(None, map(own_group, mounts)):
    try:
        os.makedirs(folder + "/ckpt-run-test", exist_ok=True)
        open(folder + "/ckpt-run-test/cgroup.procs").close()
        group = folder + "/ckpt-run-test"
        break
    except OSError: pass
there, back = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.close(there[1])
    if group: open(group + "/cgroup.procs", "w").write(str(os.getpid()))
    while os.read(there[0], 1):
        names = [line for line in open("/proc/self/cgroup") if "ckpt-run-test" in line]
        os.write(back[1], ("".join(names) or "nowhere").encode())
    os._exit(0)
os.close(there[0])
for i in steps():
    os.write(there[1], b"x")
    note(os.read(back[0], 500))
os.close(there[1])
os.waitpid(child, 0)
if group: os.rmdir(group)
"#,
    );
}

/// Stops itself, as a job with GPU memory is stopped at each snapshot, and then shows attributes that only a thread itself
/// can set.
const STOPS: &str = r#"
import ctypes, os, signal
libc = ctypes.CDLL(None)
libc.personality(PERSONALITY)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print("personality", libc.personality(0xffffffff), flush=True)
"#;

#[apply(as_root_and_user)]
fn a_stopped_job_with_attributes_comes_back_stopped() {
    comes_back_stopped(ADDR_NO_RANDOMIZE);
}

#[apply(as_user)]
fn a_stopped_job_of_an_ordinary_user_comes_back_stopped() {
    comes_back_stopped(0);
}

#[apply(as_user)]
fn a_users_stopped_job_with_attributes_comes_back_stopped() {
    comes_back_stopped(ADDR_NO_RANDOMIZE);
}

const ADDR_NO_RANDOMIZE: u32 = 0x40000;

fn comes_back_stopped(personality: u32) {
    let place = Place::new();
    let script = STOPS.replace("PERSONALITY", &personality.to_string());
    let mut run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready");
    let is_stopped = |pid| state(pid) == Some('T');
    wait_until("the job to stop", || is_stopped(run.job()));
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored image=000001");
    wait_until("the restored job to be stopped", || is_stopped(run.job()));
    kill(Pid::from_raw(run.job()), Signal::SIGCONT).unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let expected = format!("ready\npersonality {personality}\n");
    assert_eq!(place.text("out"), expected, "{}", place.text("err"));
    assert!(
        !place.text("err").contains("differs from the snapshot"),
        "{}",
        place.text("err")
    );
}
