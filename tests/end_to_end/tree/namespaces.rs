//! Separate namespaces of a process of the job: a container or sandbox inside the job. Mounts that the machine makes and
//! removes while the job runs.

use std::io::Write;
use std::process::ChildStdin;

use crate::harness::{ON_REQUEST, Place, Run, UNTIL_GO, apply, as_root, stderr, wait_until};

/// Starts a child, or a thread, that calls `unshare` with the flags in `sys.argv[1]`; it ends when the job may be
/// snapshotted again.
const WITH_NAMESPACES: &str = r#"
import ctypes, os, sys, threading, time
flags, who = int(sys.argv[1], 16), sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
def until(name):
    while not os.path.exists(name): time.sleep(0.01)
def leave():
    if libc.unshare(flags) != 0: raise OSError(ctypes.get_errno(), "unshare")
    if who == "parent" and os.fork(): os._exit(0)
    print("ready", flush=True); until("end")
lives, alive = os.pipe()
if who == "thread":
    one = threading.Thread(target=leave); one.start(); one.join()
else:
    child = os.fork()
    if child == 0: leave(); os._exit(0)
    os.close(alive); os.read(lives, 1); os.waitpid(child, 0)
print("alone", flush=True)
until("go")
"#;

const MOUNT: &str = "0x20000";
const PID: &str = "0x20000000";

/// Checks that a snapshot is refused with the namespace's name, and succeeds after the process has ended.
fn is_refused(flags: &str, who: &str, namespace: &str) {
    let place = Place::new();
    std::fs::write(place.file("job.py"), WITH_NAMESPACES).unwrap();
    let job = ["python3", "-u", "job.py", flags, who];
    let mut run = place.start(&ON_REQUEST, &job);
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success(), "{said}");
    assert!(
        said.contains(&format!("(python3) has {namespace}")),
        "{said}"
    );
    assert!(
        said.contains("start ckpt-run inside of the namespace"),
        "{said}"
    );
    std::fs::write(place.file("end"), "").unwrap();
    place.wait_for("out", "alone");
    place.snapshot();
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(place.text("err").contains("restored"));
}

#[apply(as_root)]
fn a_child_with_its_own_mounts_is_named() {
    is_refused(MOUNT, "child", "a mount namespace of its own");
}

#[apply(as_root)]
fn a_child_with_its_own_pids_is_named() {
    is_refused(PID, "parent", "a PID namespace of its own");
}

#[apply(as_root)]
fn a_child_whose_children_will_have_their_own_pids_is_named() {
    is_refused(PID, "child", "a PID namespace for its children");
}

#[apply(as_root)]
fn a_thread_with_its_own_mounts_is_named() {
    // A thread that shares its folder with others cannot leave their mount namespace: CLONE_FS first.
    is_refused("0x20200", "thread", "a mount namespace of its own");
}

/// Starts a run on a machine of its own mounts, after the command `before`. The machine's shell reads further commands
/// from the pipe that is returned.
fn start_on_a_machine(place: &Place, before: &str, script: &str) -> (Run, ChildStdin) {
    std::fs::write(place.file("job.py"), script).unwrap();
    let shell = r#"eval "$0"; "$@" </dev/null & run=$!; while read -r line; do eval "$line"; done; wait $run"#;
    let ours = place.command(&["--interval", "never", "--", "python3", "-u", "job.py"]);
    let mut command = std::process::Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private"])
        .args(["sh", "-c", shell, before])
        .arg(ours.get_program())
        .args(ours.get_args())
        .current_dir(place.path())
        .env("XDG_CONFIG_HOME", place.path())
        .env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    let mut run = place.spawn(command, |command| {
        command.stdin(std::process::Stdio::piped());
    });
    let tell = run.stdin();
    place.wait_for("out", "ready");
    (run, tell)
}

/// Lets the machine's shell carry out a command.
fn carry_out(place: &Place, tell: &mut ChildStdin, command: &str) {
    writeln!(tell, "{command}; : >done").unwrap();
    wait_until(command, || place.file("done").exists());
    std::fs::remove_file(place.file("done")).unwrap();
}

/// A snapshot is refused for a file that the job has open.
fn is_refused_for(place: &Place, file: &str, why: &str) {
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success(), "{said}");
    assert!(said.contains("(python3) has /"), "{said}");
    assert!(
        said.contains(&format!("/{file} open")) && said.contains(why),
        "{said}"
    );
}

#[apply(as_root)]
fn a_file_below_a_later_mount_of_the_machines_is_named() {
    let place = Place::new();
    std::fs::create_dir(place.file("below")).unwrap();
    let script = format!("opened = open('below/file', 'w')\n{UNTIL_GO}");
    // Its mounts propagate into the job's sandbox.
    let (mut run, mut tell) = start_on_a_machine(&place, "mount --make-rshared /", &script);
    carry_out(&place, &mut tell, "mount -t tmpfs none below");
    is_refused_for(&place, "below/file", "a file system was mounted since");
    carry_out(&place, &mut tell, "umount --lazy below");
    place.snapshot();
    place.go();
    drop(tell);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root)]
fn a_used_file_system_that_the_machine_unmounts_is_named() {
    let place = Place::new();
    for folder in ["data", "used", "unused"] {
        std::fs::create_dir(place.file(folder)).unwrap();
    }
    let script = format!("opened = open('used/file', 'w')\n{UNTIL_GO}");
    // The sandbox keeps the mounts that it has begun with.
    let mounts = "mount --bind data used; mount -t tmpfs none unused";
    let (mut run, mut tell) = start_on_a_machine(&place, mounts, &script);
    place.snapshot();
    carry_out(&place, &mut tell, "umount unused");
    place.snapshot();
    let warning = format!(
        "the machine has unmounted or remounted {}",
        place.file("unused").display()
    );
    assert!(
        place.text("err").contains(&warning),
        "{}",
        place.text("err")
    );
    carry_out(&place, &mut tell, "umount used");
    is_refused_for(
        &place,
        "used/file",
        "the machine has unmounted or remounted",
    );
    carry_out(&place, &mut tell, "mount --bind data used");
    place.snapshot();
    place.go();
    drop(tell);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
