//! Device files of an NVIDIA GPU in a child forked by a CUDA process, without a GPU: the test shows the supervisor a
//! machine on which another driver's devices have the numbers of an NVIDIA driver.
//!
//! In a separate mount namespace, `/proc/devices` states that `misc` belongs to `nvidia-uvm`, `/dev/nvidiactl` is a
//! node of `misc`, and `libcuda.so.1` knows no CUDA process. Everything else, from the node's kernel driver to CRIU, is
//! real. Mappings require a GPU (tests/gpu): a machine without one has no device that can be mapped and that CRIU
//! refuses.

use std::fs;
use std::process::{Command, Stdio};

use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, stderr};

/// Creates that machine in `$1`, and executes the rest of the arguments.
const MACHINE: &str = r#"
set -e
here=$1; shift
mkdir "$here/dev"
mount -t tmpfs none "$here/dev"
cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty "$here/dev"
mknod "$here/dev/nvidiactl" c 10 229    # the numbers of /dev/fuse
mkdir "$here/dev/shm" "$here/dev/pts"
mount --bind /dev/pts "$here/dev/pts"
mount --move "$here/dev" /dev
sed 's/^ 10 misc$/ 10 nvidia-uvm/' /proc/devices > "$here/devices"
mount --bind "$here/devices" /proc/devices
exec "$@"
"#;

/// Source of a `libcuda.so.1` that knows no process: "not initialized" (3).
const NOBODY_USES_CUDA: &str = r"
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int code, const char **text) { *text = 0; return 1; }
int cuGetErrorString(int code, const char **text) { *text = 0; return 1; }
int cuCheckpointProcessGetState(int pid, int *state) { return 3; }
int cuCheckpointProcessGetRestoreThreadId(int pid, int *thread) { return 3; }
int cuCheckpointProcessLock(int pid, void *args) { return 3; }
int cuCheckpointProcessCheckpoint(int pid, void *args) { return 3; }
int cuCheckpointProcessRestore(int pid, void *args) { return 3; }
int cuCheckpointProcessUnlock(int pid, void *args) { return 3; }
";

/// Has a worker with the device open twice, and does not open it itself; prints the worker's files after each gate.
const WITH_A_WORKER: &str = r#"
import fcntl, os, stat, sys, time
device = os.open("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC)
again = os.open("/dev/nvidiactl", os.O_RDONLY); os.set_inheritable(again, True)
ask, answer = os.pipe(), os.pipe()
if os.fork() == 0:
    def tell():
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in (device, again)]
        kinds = [os.major(os.fstat(fd).st_rdev) for fd in (device, again)]
        flags = [fcntl.fcntl(fd, fcntl.F_GETFD) for fd in (device, again)]
        os.write(answer[1], f"{names} {kinds} {flags} {sorted(map(int, os.listdir('/proc/self/fd')))}".encode())
    while os.read(ask[0], 1): tell()
    os._exit(0)
if "keep" not in sys.argv: os.close(device); os.close(again)
def show():
    os.write(ask[1], b"x"); print(os.read(answer[0], 1000).decode(), flush=True)
show()
for gate in "one", "two":
    print("ready", gate, flush=True)
    while not os.path.exists(gate): time.sleep(0.01)
    show()
"#;

fn start(place: &Place, job: &[&str]) -> Run {
    fs::write(place.file("job.py"), WITH_A_WORKER).unwrap();
    fs::write(place.file("machine.sh"), MACHINE).unwrap();
    fs::write(place.file("cuda.c"), NOBODY_USES_CUDA).unwrap();
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(place.file("libcuda.so.1"))
        .arg(place.file("cuda.c"))
        .status()
        .unwrap();
    assert!(built.success());
    let ours = place.command(&["--interval", "never", "--"]);
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "machine.sh"])
        .arg(place.path())
        .arg(ours.get_program())
        .args(ours.get_args())
        .args(job)
        .current_dir(place.path())
        .env("LD_LIBRARY_PATH", place.path())
        .env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    place.spawn(command, |_| {})
}

#[apply(as_root)]
fn unusable_device_files_of_a_fork_are_restored_as_null() {
    let place = Place::new();
    let mut run = start(&place, &["python3", "-u", "job.py"]);
    place.wait_for("out", "ready one");
    place.snapshot();
    run.crash();
    place.wait_for("err", "restored");
    fs::write(place.file("one"), "").unwrap();
    place.wait_for("out", "ready two");
    // The restored file is an ordinary file for CRIU.
    place.snapshot();
    run.crash();
    fs::write(place.file("two"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));

    let out = place.text("out");
    let lines: Vec<&str> = out.lines().filter(|line| line.starts_with('[')).collect();
    let rest = "[1, 0]";
    let numbers = lines[0].rsplit_once(" [").unwrap().1;
    let device = format!("['/dev/nvidiactl', '/dev/nvidiactl'] [10, 10] {rest} [{numbers}");
    let null = format!("['/dev/null', '/dev/null'] [1, 1] {rest} [{numbers}");
    assert_eq!(
        lines,
        [device.as_str(), &null, &null],
        "{}",
        place.text("err")
    );
}

#[apply(as_root)]
fn program_unknown_to_the_driver_is_not_snapshotted() {
    let place = Place::new();
    let mut run = start(&place, &["python3", "-u", "job.py", "keep"]);
    place.wait_for("out", "ready one");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success());
    assert!(said.contains(&run.job_named()), "{said}");
    assert!(
        said.contains("(python3) has the GPU's device files open"),
        "{said}"
    );
    assert!(said.contains("HWLOC_COMPONENTS=-opencl"), "{said}");
    assert!(!said.contains("tried again"), "{said}");
    goes_on(&place, &mut run);
}

#[apply(as_root)]
fn a_device_of_another_driver_is_refused_by_criu() {
    let place = Place::new();
    // The same node on the unchanged machine: its name proves nothing.
    let node = place.file("nvidiactl");
    let made = Command::new("mknod")
        .arg(&node)
        .args(["c", "10", "229"])
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(made.success());
    let script = WITH_A_WORKER.replace("/dev/nvidiactl", "nvidiactl");
    let mut run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready one");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success());
    assert!(
        said.contains("the job serves a FUSE file system") && said.contains("chr 10:229"),
        "{said}"
    );
    goes_on(&place, &mut run);
}

/// Checks that the job computes to its end after a failed snapshot.
fn goes_on(place: &Place, run: &mut Run) {
    for gate in ["one", "two"] {
        fs::write(place.file(gate), "").unwrap();
    }
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(place.images().is_empty());
}
