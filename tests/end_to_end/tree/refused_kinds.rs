//! Resources that CRIU cannot restore: each is refused by name, with its process and a remedy; the job continues, and
//! snapshots work again after it has released the resource.

use std::fs;
use std::process::Command;

use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, as_user, copy_environment, program,
    skip, stderr,
};

/// Common beginning of the jobs: `hold(SOMETHING)` keeps it until the test writes `let go`.
const PRELUDE: &str = r#"
import os, socket, struct, subprocess, sys, time
def gate(name):
    while not os.path.exists(name): time.sleep(0.005)
def hold(let_go):
    print("holds", flush=True); gate("let-go")
    let_go()
    print("free", flush=True); gate("restored")
    print("done", flush=True)
"#;

/// Runs a job that is refused with all these words, releases the resource, is snapshotted, killed and restored.
pub fn refused_until_it_lets_go(script: &str, words: &[&str]) {
    let place = Place::new();
    let run = place.start_python(&ON_REQUEST, &format!("{PRELUDE}{script}"));
    refused_at_first(&place, run, words);
}

fn refused_at_first(place: &Place, mut run: Run, words: &[&str]) {
    place.wait_for("out", "holds\n");
    let refused = place.verb(&["snapshot"]);
    let message = stderr(&refused);
    assert!(!refused.status.success(), "{}", place.text("job.py"));
    for word in words {
        assert!(message.contains(word), "{word}: {message}");
    }
    assert!(!message.contains("CRIU: "), "raw words of CRIU: {message}");
    fs::write(place.file("let-go"), "").expect("a gate");
    place.wait_for("out", "free\n");
    place.snapshot();
    run.crash();
    fs::write(place.file("restored"), "").expect("a gate");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(place.text("err").contains("restored image"));
    assert!(place.text("out").ends_with("done\n"));
}

#[apply(as_root)]
fn a_process_with_namespaces_of_its_own_is_refused() {
    for (option, name) in [
        ("--net", "a network"),
        ("--ipc", "an IPC"),
        ("--uts", "a UTS"),
        ("--user", "a user"),
        ("--cgroup", "a cgroup"),
        ("--time", "a time"),
    ] {
        let script = format!(
            r#"
child = subprocess.Popen(["unshare", "{option}", "sh", "-c", "echo; read end"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.read(1)
hold(child.communicate)
"#
        );
        let message = format!("(sh) has {name} namespace of its own");
        refused_until_it_lets_go(
            &script,
            &[&message, "start ckpt-run inside of the namespace"],
        );
    }
}

#[apply(as_root)]
fn sockets_of_kinds_that_criu_does_not_know_are_refused() {
    // Kinds that the kernel does not support are skipped.
    let script = r#"
made = []
for family, kind, protocol in KINDS:
    try: made.append(socket.socket(family, kind, protocol))
    except OSError: pass
assert made, "none of these kinds is here"
number = made[0].fileno()
hold(lambda: [one.close() for one in made])
"#;
    for (kinds, words) in [
        (
            "[(2, 1, 262)]",
            ["(MPTCP, descriptor ", "GODEBUG=multipathtcp=0"],
        ),
        (
            "[(40, 1, 0), (38, 5, 0), (44, 3, 0), (2, 5, 132), (2, 1, 132)]",
            ["(python3) has a socket of a kind", "or use TCP, UDP or"],
        ),
    ] {
        refused_until_it_lets_go(&script.replace("KINDS", kinds), &words);
    }
}

#[apply(as_root)]
fn a_tun_device_that_is_open_is_refused() {
    let script = r#"
if not os.path.exists("/dev/net/tun"):
    os.makedirs("/dev/net", exist_ok=True); os.mknod("/dev/net/tun", 0o20600, os.makedev(10, 200))
device = os.open("/dev/net/tun", os.O_RDWR)
hold(lambda: os.close(device))
"#;
    refused_until_it_lets_go(
        script,
        &["(python3) has a tun or tap device open", "close it"],
    );
}

#[apply(as_root_and_user)]
fn a_posix_message_queue_that_is_closed_is_refused() {
    let script = r#"
import ctypes
c = ctypes.CDLL(None)
queue = c.mq_open(b"/queue", os.O_RDWR | os.O_CREAT, 0o600, None); assert queue > 0
assert c.mq_send(queue, b"kept", 4, 0) == 0
os.close(queue)
hold(lambda: c.mq_unlink(b"/queue"))
"#;
    refused_until_it_lets_go(
        script,
        &[
            "made the POSIX message queue /queue",
            "remove it (mq_unlink)",
        ],
    );
}

#[apply(as_root_and_user)]
fn a_posix_message_queue_that_is_open_and_removed_is_named() {
    let place = Place::new();
    let script = r#"
import ctypes, os, time
c = ctypes.CDLL(None)
queue = c.mq_open(b"/queue", os.O_RDWR | os.O_CREAT, 0o600, None); assert queue > 0
assert c.mq_unlink(b"/queue") == 0
print("holds", flush=True)
while not os.path.exists("end"): time.sleep(0.005)
"#;
    let mut run = place.start_python(&ON_REQUEST, script);
    place.wait_for("out", "holds\n");
    let message = stderr(&place.verb(&["snapshot"]));
    for word in ["a POSIX message queue (mq_open)", "close message queues"] {
        assert!(message.contains(word), "{message}");
    }
    fs::write(place.file("end"), "").expect("a gate");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root)]
fn a_datagram_that_was_begun_is_refused() {
    let script = r#"
receiver = socket.socket(type=socket.SOCK_DGRAM); receiver.bind(("127.0.0.1", 0))
sender = socket.socket(type=socket.SOCK_DGRAM); sender.connect(receiver.getsockname())
sender.send(b"begun, ", socket.MSG_MORE)
def finish():
    sender.send(b"sent"); assert receiver.recv(100) == b"begun, sent"
hold(finish)
"#;
    refused_until_it_lets_go(
        script,
        &["(python3) has an unfinished datagram", "let it send"],
    );
}

/// In a network namespace without one, CRIU does not start.
#[apply(as_root)]
fn a_loopback_interface_that_is_down_is_named() {
    let place = Place::new();
    let job = [
        "sh",
        "-c",
        "echo runs; until [ -e end ]; do sleep 0.01; done",
    ];
    let supervisor = place.command(&[&ON_REQUEST[..], &["--"], &job].concat());
    let mut command = Command::new("unshare");
    command.arg("--net").arg(supervisor.get_program());
    command
        .args(supervisor.get_args())
        .current_dir(place.path());
    copy_environment(&supervisor, &mut command);
    let mut run = place.spawn(command, |_| {});
    place.wait_for("out", "runs\n");
    let message = stderr(&place.verb(&["snapshot"]));
    for word in ["the loopback interface is down", "ip link set lo up"] {
        assert!(message.contains(word), "{message}");
    }
    fs::write(place.file("end"), "").expect("a gate");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

/// CRIU drops such events, and a program that waits for one of them would wait for ever.
#[apply(as_root)]
fn events_of_watched_files_that_were_not_read_are_refused() {
    let script = r#"
import ctypes
libc = ctypes.CDLL(None)
os.mkdir("watched")
watch = libc.inotify_init(); assert libc.inotify_add_watch(watch, b"watched", 0x100) > 0
open("watched/file", "w").close()
hold(lambda: os.read(watch, 4096))
"#;
    refused_until_it_lets_go(
        script,
        &["(python3) has not read all events", "let it read"],
    );
}

#[apply(as_root)]
fn a_link_that_is_watched_itself_is_refused() {
    let script = r#"
import ctypes
libc = ctypes.CDLL(None)
os.symlink("nowhere", "link")
watch = libc.inotify_init(); assert libc.inotify_add_watch(watch, b"link", 0x2000004) > 0
hold(lambda: os.close(watch))
"#;
    refused_until_it_lets_go(
        script,
        &["(python3) watches the symbolic link /", "/link itself"],
    );
}

#[apply(as_root_and_user)]
fn unread_data_of_a_terminal_is_refused_and_kept() {
    // A quoted Ctrl-C, the end of a file, and output; both ends have data.
    let script = r#"
import pty, termios
master, slave = pty.openpty()
modes = termios.tcgetattr(slave); modes[3] &= ~termios.ECHO; termios.tcsetattr(slave, termios.TCSANOW, modes)
os.write(master, b"a\x16\x03b\n\x04"); os.write(slave, b"out\n")
def take():
    assert [os.read(slave, 99) for _ in range(2)] == [b"a\x03b\n", b""]
    assert os.read(master, 99) == b"out\r\n"
hold(take)
os.write(master, b"in\n"); assert os.read(slave, 99) == b"in\n"
os.write(slave, b"more\n"); assert os.read(master, 99) == b"more\r\n"
"#;
    let words = ["unread data (/dev/pts/", "let the program at its other end"];
    refused_until_it_lets_go(script, &words);
}

#[apply(as_root_and_user)]
fn a_process_that_has_unmapped_the_vdso_is_named() {
    // As Valgrind does, in a child that ends.
    let script = r#"
import ctypes
child = os.fork()
if child == 0:
    mapped = next(line for line in open("/proc/self/maps") if line.endswith("[vdso]\n"))
    begin, end = (int(number, 16) for number in mapped.split()[0].split("-"))
    # The interpreter calls the vdso for the time, and waits here.
    munmap, pause = ctypes.CDLL(None).munmap, ctypes.CDLL(None).pause
    munmap(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)); pause()
while "[vdso]" in open(f"/proc/{child}/maps").read(): time.sleep(0.005)
hold(lambda: (os.kill(child, 9), os.waitpid(child, 0)))
"#;
    refused_until_it_lets_go(script, &["vdso", "without Valgrind"]);
}

#[apply(as_user)]
fn a_descriptor_close_to_the_limit_is_named() {
    // As root, CRIU may raise the limit.
    let place = Place::new();
    let script = format!("{PRELUDE}os.dup2(1, 280); hold(lambda: os.close(280))");
    fs::write(place.file("job.py"), script).expect("the script is written");
    let mut command = Command::new("prlimit");
    command
        .args(["--nofile=300:300", "--", program()])
        .args(ON_REQUEST)
        .args(["--", "python3", "-u", "job.py"]);
    place.in_folder(&mut command);
    place.own(&mut command);
    let run = place.spawn(command, |_| {});
    refused_at_first(
        &place,
        run,
        &["the number 280", "limit of 300", "ulimit -Hn"],
    );
}

#[apply(as_root_and_user)]
fn an_end_that_is_restored_differently_is_named() {
    // clone without a stack is a fork.
    let signals = r"
import ctypes, signal
SYS_clone = 56
child = ctypes.CDLL(None).syscall(SYS_clone, signal.SIGUSR1, 0, 0, 0, 0)
if child == 0: signal.pause()
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
__WALL = 0x40000000
hold(lambda: (os.kill(child, 9), os.waitpid(child, __WALL)))
";
    refused_until_it_lets_go(signals, &["by signal 10 instead of SIGCHLD"]);
}

/// After the refusal, the process has the file alone, or the file's descriptor is before that of the folder.
#[apply(as_root_and_user)]
fn a_descriptor_that_signals_another_thread_is_named() {
    let script = r"
import fcntl, threading
F_SETOWN_EX, F_OWNER_TID, O_ASYNC = 15, 0, 0o20000
end, _other = socket.socketpair()
thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True); thread.start()
fcntl.fcntl(end, F_SETOWN_EX, struct.pack('ii', F_OWNER_TID, thread.native_id))
fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | O_ASYNC)
hold(lambda: end.close())
";
    refused_until_it_lets_go(script, &["F_OWNER_TID", "first thread"]);
}

/// An update that replaces a library leaves such a file.
#[apply(as_user)]
fn a_removed_file_of_another_user_is_named() {
    if !nix::unistd::geteuid().is_root() {
        skip("files of two users need root");
        return;
    }
    let place = Place::new();
    fs::write(place.file("of-root"), "text").expect("written");
    let script = r#"
file = os.open("of-root", os.O_RDONLY); os.unlink("of-root")
hold(lambda: os.close(file))
"#;
    let run = place.start_python(&ON_REQUEST, &format!("{PRELUDE}{script}"));
    refused_at_first(&place, run, &["/of-root open", "another user", "as root"]);
}

#[apply(as_root_and_user)]
fn a_part_of_a_system_v_segment_is_named() {
    let script = r"
import ctypes
c = ctypes.CDLL(None, use_errno=True)
c.shmat.restype = ctypes.c_void_p
IPC_CREAT = 0o1000
segment = c.shmget(0, 4 * 4096, IPC_CREAT | 0o600)
at = c.shmat(segment, None, 0)
assert c.munmap(ctypes.c_void_p(at + 4096), 4096) == 0
def let_go():
    assert c.shmdt(ctypes.c_void_p(at)) == 0
    c.shmctl(segment, 0, None)
hold(let_go)
";
    refused_until_it_lets_go(script, &["part of a System V segment", "shmdt"]);
}

#[apply(as_user)]
fn a_process_that_lets_nobody_inspect_it_is_named() {
    let script = r#"
import ctypes
PR_SET_DUMPABLE = 4
child = os.fork()
if child == 0:
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    open("closed", "w").close()
    while True: time.sleep(1)
gate("closed")
hold(lambda: (os.kill(child, 9), os.waitpid(child, 0)))
"#;
    refused_until_it_lets_go(
        script,
        &["(python3) lets no other program", "ssh-agent", "as root"],
    );
}

#[apply(as_root_and_user)]
fn a_program_executed_from_memory_is_named() {
    let script = r#"
program = os.memfd_create("program", 0)
os.write(program, open("/bin/sleep", "rb").read())
child = os.fork()
if child == 0: os.execve(program, ["sleep", "1000"], {})
while not os.readlink(f"/proc/{child}/exe").startswith("/memfd:"): time.sleep(0.01)
hold(lambda: (os.kill(child, 9), os.waitpid(child, 0), os.close(program)))
"#;
    refused_until_it_lets_go(script, &["executed from memory", "from a file"]);
}

/// The job could not answer while it is frozen.
#[apply(as_root)]
fn a_job_that_decides_about_opens_is_named() {
    let script = r#"
import ctypes
c = ctypes.CDLL(None, use_errno=True)
FAN_CLASS_CONTENT, FAN_MARK_ADD, FAN_OPEN_PERM, FAN_EVENT_ON_CHILD, AT_FDCWD = 4, 1, 0x10000, 0x08000000, -100
os.mkdir("asked")
group = c.fanotify_init(FAN_CLASS_CONTENT, os.O_RDONLY)
assert group >= 0, ctypes.get_errno()
assert c.fanotify_mark(group, FAN_MARK_ADD, ctypes.c_uint64(FAN_OPEN_PERM | FAN_EVENT_ON_CHILD), AT_FDCWD, b"asked") == 0
hold(lambda: os.close(group))
"#;
    refused_until_it_lets_go(
        script,
        &["decides whether other programs", "outside of the job"],
    );
}

#[apply(as_root_and_user)]
fn a_sealed_memfd_that_is_mapped_is_named() {
    let script = r#"
import fcntl, mmap
memory = os.memfd_create("sealed", os.MFD_ALLOW_SEALING); os.write(memory, b"text")
F_ADD_SEALS, F_SEAL_WRITE = 1033, 8
fcntl.fcntl(memory, F_ADD_SEALS, F_SEAL_WRITE)
mapped = mmap.mmap(memory, 4, prot=mmap.PROT_READ)
hold(mapped.close)
"#;
    refused_until_it_lets_go(script, &["sealed memfd (F_SEAL_WRITE)", "privately"]);
}

#[apply(as_root_and_user)]
fn a_path_of_a_running_program_is_named() {
    let script = r#"
path = os.open(f"/proc/{os.getpid()}/exe", os.O_PATH)
hold(lambda: os.close(path))
"#;
    refused_until_it_lets_go(script, &["O_PATH", "open the file for reading"]);
}

#[apply(as_root_and_user)]
fn a_stopped_process_with_a_deadly_signal_is_named() {
    let script = r#"
import signal
child = subprocess.Popen(["sleep", "1000"])
child.send_signal(signal.SIGSTOP); os.waitpid(child.pid, os.WUNTRACED)
child.send_signal(signal.SIGUSR1)
def let_go():
    child.send_signal(signal.SIGCONT); assert child.wait() == -signal.SIGUSR1
hold(let_go)
"#;
    refused_until_it_lets_go(script, &["when it continues", "SIGCONT"]);
}

#[apply(as_root)]
fn a_watch_for_one_event_is_named() {
    let script = r#"
import ctypes
c = ctypes.CDLL(None)
IN_CREATE, IN_ONESHOT = 0x100, 0x80000000
os.mkdir("watched"); watches = c.inotify_init()
assert c.inotify_add_watch(watches, b"watched", IN_CREATE | IN_ONESHOT) > 0
hold(lambda: os.close(watches))
"#;
    refused_until_it_lets_go(script, &["IN_ONESHOT", "without that flag"]);
}

#[apply(as_user)]
fn a_segment_in_two_mappings_is_named() {
    let script = r"
import ctypes
c = ctypes.CDLL(None); c.mmap.restype = c.shmat.restype = ctypes.c_void_p
at = ctypes.c_void_p
NO_ACCESS, PRIVATE_ANONYMOUS = 0, 0x22
room = c.mmap(None, 16384, NO_ACCESS, PRIVATE_ANONYMOUS, -1, 0)
c.munmap(at(room), 16384)
segment = c.shmget(0, 8192, 0o1600)
assert [c.shmat(segment, at(room + offset), 0) for offset in (0, 8192)] == [room, room + 8192]
hold(lambda: c.shmdt(at(room)))
";
    refused_until_it_lets_go(script, &["System V segment", "run ckpt-run as root"]);
}
