//! Mounts that come and go while a job runs: its own, and the machine's.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, stderr, wait_until};

/// Mounts something, and unmounts it when it is to.
const MOUNTS: &str = r#"
    trap 'umount "$2"' EXIT
    mount --bind "$1" "$2" && echo ready
    while ! [ -e undo ]; do sleep 0.01; done
    umount "$2"; trap - EXIT; echo undone
    while ! [ -e go ]; do sleep 0.01; done"#;

#[apply(as_root)]
fn a_mount_of_the_job_in_the_kernels_folders_is_named() {
    for (what, point) in [("/proc/sys", "/proc/sys"), ("file", "/dev/full")] {
        let place = Place::new();
        std::fs::write(place.file("file"), "").unwrap();
        let mut run = place.start(&ON_REQUEST, &["sh", "-c", MOUNTS, "sh", what, point]);
        place.wait_for("out", "ready");
        let refused = place.verb(&["snapshot"]);
        let said = stderr(&refused);
        assert!(!refused.status.success(), "{said}");
        assert!(
            said.contains(&format!("a file system at {point},")),
            "{said}"
        );
        std::fs::write(place.file("undo"), "").unwrap();
        place.wait_for("out", "undone");
        place.snapshot();
        run.crash();
        place.go();
        assert_eq!(run.wait(), 0, "{}", place.text("err"));
        assert!(place.text("err").contains("restored"));
    }
}

/// Starts a job in a mount namespace in which a file system is mounted at `point`. A line on standard input unmounts it:
/// then there is a file `unmounted`, or `busy`.
fn start_beside(place: &Place, point: &str, script: &str) -> Run {
    std::fs::create_dir(place.file(point)).unwrap();
    let machine = r#"mount --make-rshared / && mount -t tmpfs none "$point" || exit
        "$@" </dev/null & run=$!
        read word && if umount "$point"; then : >unmounted; else : >busy; fi
        wait $run"#;
    start_on_machine(place, &[("point", point)], machine, script)
}

/// Starts a job by a shell script in namespaces of its own, which gets ckpt-run's command as its arguments.
fn start_on_machine(place: &Place, environment: &[(&str, &str)], machine: &str, job: &str) -> Run {
    std::fs::write(place.file("job.py"), job).unwrap();
    let ours = place.command(&["--interval", "never", "--", "python3", "-u", "job.py"]);
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
        .args(["--propagation", "private", "sh", "-c", machine, "sh"])
        .arg(ours.get_program())
        .args(ours.get_args())
        .current_dir(place.path())
        .envs(environment.iter().copied())
        .env("XDG_CONFIG_HOME", place.path())
        .env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    place.spawn(command, |command| {
        command.stdin(Stdio::piped());
    })
}

/// `/home` is often such a mount. The record names a folder as the job and ckpt-run do.
#[apply(as_root)]
fn a_bind_mount_as_working_folder_is_the_jobs() {
    let place = Place::new();
    for folder in ["from", "seen"] {
        std::fs::create_dir(place.file(folder)).unwrap();
    }
    let machine = r#"mount --bind from seen && cp job.py seen && cd seen && exec "$@" </dev/null"#;
    let script = r#"
import os, time
def wait(name):
    while not os.path.exists(name): time.sleep(0.01)
open("closed", "w").write("first")
print("ready", flush=True); wait("../accept")
with open("closed", "r+") as file: text = file.read() + " second"; file.write(" second")
print(text, flush=True); wait("../go")
"#;
    let mut run = start_on_machine(&place, &[], machine, script);
    place.wait_for("out", "ready");
    let taken = place.verb(&["snapshot", "--store", "from/.ckpt-run"]);
    assert!(taken.status.success(), "{}", stderr(&taken));
    std::fs::write(place.file("accept"), "").unwrap();
    place.wait_for("out", "first second");
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "ready\nfirst second\n");
}

/// Has process accounting, in the shell's PID namespace, and programs that end beside ckpt-run.
const ACCOUNTED: &str = r#"mount -t tmpfs none /var/log && mkdir /var/log/account && : >/var/log/account/pacct || exit
    python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).acct(b"/var/log/account/pacct"))' || exit
    while sleep 0.02; do :; done &
    "$@" </dev/null"#;

#[apply(as_root)]
fn process_accounting_is_none_of_the_jobs_files() {
    let place = Place::new();
    let script = "import os, subprocess\nprint('ready', flush=True)\n\
                  while not os.path.exists('go'): subprocess.run(['sleep', '0.02'])\n\
                  print(os.path.getsize('/var/log/account/pacct') > 0)";
    let own = [("CKPT_RUN_FILES_EXCLUDE", "~/.cache")];
    let mut run = start_on_machine(&place, &own, ACCOUNTED, script);
    place.wait_for("out", "ready");
    for _ in 0..2 {
        place.snapshot();
        run.crash();
    }
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "ready\nTrue\n");
}

#[apply(as_root)]
fn machine_can_unmount_filesystems_unused_by_the_job() {
    let place = Place::new();
    let script = "import os, time\nopen('below/file', 'w').close()\nprint('ready', flush=True)\n\
                  while not os.path.exists('go'): time.sleep(0.02)\n";
    let mut run = start_beside(&place, "below", script);
    place.wait_for("out", "ready");
    // The watcher has looked at the mount once it has written the mark.
    place.snapshot();
    writeln!(run.stdin(), "unmount").unwrap();
    let is_done = |name| place.file(name).exists();
    wait_until("the unmount", || is_done("unmounted") || is_done("busy"));
    assert!(is_done("unmounted"), "{}", place.text("err"));
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root)]
fn a_mount_with_a_blank_in_its_name_is_watched() {
    let place = Place::new();
    let script = "import os, time\nopen('be low/file', 'w').close()\nprint('ready', flush=True)\n\
                  while not os.path.exists('go'): time.sleep(0.02)\n";
    let mut run = start_beside(&place, "be low", script);
    place.wait_for("out", "ready");
    place.snapshot();
    let record = place.text(".ckpt-run/files.log");
    let change = format!(r#""path":"{}/be low/file""#, place.path().display());
    assert!(record.contains(&change), "{record}");
    writeln!(run.stdin(), "unmount").unwrap();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
