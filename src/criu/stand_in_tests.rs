//! Tests of the functions by which the plugin answers a CRIU without privileges, in a process that preloads it: an ordinary
//! user's, in namespaces as the sandbox has them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use super::plugin::{NAME, install_plugin};

/// Id of a user without privileges.
const NOBODY: u32 = 65534;

/// A child maps files and memory, and its parent asks for them as CRIU does.
const SCRIPT: &str = r#"
import ctypes, errno, os, tempfile
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
SHARED, PRIVATE, ANONYMOUS, PAGE = 1, 2, 0x20, 4096
def mapped(fd, length, flags, offset=0):
    at = libc.mmap(None, length, 3, flags, fd, offset)
    assert at != ctypes.c_void_p(-1).value
    return at, at + (length + PAGE - 1) // PAGE * PAGE
def subject(tell):
    f = tempfile.TemporaryFile(); f.write(b"x" * 10000); f.flush()
    first, rest = mapped(f.fileno(), PAGE, SHARED), mapped(f.fileno(), 5904, SHARED, PAGE)
    f.close()
    f = tempfile.TemporaryFile(); f.write(b"y" * PAGE); f.flush()
    private = mapped(f.fileno(), PAGE, PRIVATE); f.close()
    f = os.open("named", os.O_RDWR | os.O_CREAT); os.truncate(f, PAGE)
    named = mapped(f, PAGE, SHARED)
    anonymous = mapped(-1, 3 * PAGE, SHARED | ANONYMOUS)
    ctypes.memset(anonymous[0] + 2 * PAGE, 122, 1)
    memory = os.memfd_create("open"); os.truncate(memory, PAGE)
    opened = mapped(memory, PAGE, SHARED)
    os.write(tell, repr((first, rest, private, named, anonymous, opened, memory)).encode())
    os.read(0, 1)
r, w = os.pipe(); hold, release = os.pipe()
child = os.fork()
if child == 0:
    os.close(release); os.dup2(hold, 0); subject(w); os._exit(0)
first, rest, private, named, anonymous, opened, memory = eval(os.read(r, 4096))
process = os.open(f"/proc/{child}", os.O_RDONLY)
links = os.open("map_files", os.O_RDONLY, dir_fd=process)
def ask(place, folder=links, before="", flags=os.O_RDONLY):
    try: return os.open(before + "%x-%x" % place, flags, dir_fd=folder)
    except OSError as error: return errno.errorcode[error.errno]
def content(place): return ask(place, process, "map_files/")

one, two = ask(first), ask(rest)
assert os.fstat(one).st_ino == os.fstat(two).st_ino
assert os.pread(one, 20000, 0) == b"x" * 10000 + b"\0" * (3 * PAGE - 10000)
assert ask(first, flags=os.O_RDWR) == "EPERM"
assert ask(private) == "EIO"
assert ask(named) == "EPERM"
assert ask(anonymous) == "EPERM"
assert os.pread(content(anonymous), 20000, 0) == b"\0" * 2 * PAGE + b"z" + b"\0" * (PAGE - 1)
assert os.fstat(ask(opened)).st_ino == os.stat(f"/proc/{child}/fd/{memory}").st_ino
assert ask((1, 2)) == "ENOENT" or ask((1, 2)) == "EPERM"

own = mapped(-1, PAGE, SHARED | ANONYMOUS)
line = next(line for line in open("/proc/self/maps") if line.startswith("%x-" % own[0]))
assert os.stat("/proc/self/map_files/%x-%x" % own).st_ino == int(line.split()[4])

proc = os.open("/proc", os.O_RDONLY)
value = open("/proc/sys/kernel/msgmax").read()
def put(text):
    setting = os.open("sys/kernel/msgmax", os.O_RDWR, dir_fd=proc)
    try: return os.write(setting, text.encode())
    except OSError as error: return errno.errorcode[error.errno]
    finally: os.close(setting)
assert put(value) == len(value)
assert put("1\n") == "EACCES"
assert put("") == "EACCES"
print("all answers are right")
"#;

/// Children have filters, and their parent asks for them as CRIU does. The parent may have an outer filter itself, as in a
/// container.
const FILTERED: &str = r#"
import ctypes, os, signal, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
NO_NEW_PRIVILEGES, DIE_WITH_PARENT, THREADS = 38, 1, 1
allow = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\xff\x7f")
class Program(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(1, ctypes.addressof(allow))
def install(flags=0):
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    assert libc.syscall(317, 1, flags, ctypes.byref(program), 0, 0, 0) == 0
outer, of_sandbox = int(sys.argv[2]), int(sys.argv[3])
for _ in range(outer): install()
class Descriptor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("init", ctypes.c_void_p), ("exit", ctypes.c_void_p),
                ("version", ctypes.c_uint), ("max", ctypes.c_uint), ("hooks", ctypes.c_void_p * 12)]
hook = Descriptor.in_dll(ctypes.CDLL(sys.argv[1]), "CR_PLUGIN_DESC").hooks[11]
frozen = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(hook)
def child(prepare):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        for _ in range(of_sandbox): install()
        threads = prepare() or []
        os.write(w, b" ".join(b"%d" % thread for thread in [os.getpid(), *threads]))
        libc.syscall(34, 0, 0, 0, 0, 0, 0)
    ids = [int(number) for number in os.read(r, 100).split()]
    return pid, ids
def thread(then):
    told, tell = os.pipe()
    def run():
        then()
        os.write(tell, b"x")
        signal.pause()
    begun = threading.Thread(target=run, daemon=True); begun.start(); os.read(told, 1)
    return [begun.native_id]
def mode(pid):
    folder = os.open(f"/proc/{pid}", os.O_PATH)
    # The thread may still be on its way to its pause: then more lines differ.
    for _ in range(10000):
        told = os.fdopen(os.open("status", os.O_RDONLY, dir_fd=folder)).read().splitlines()
        true = open(f"/proc/{pid}/status").read().splitlines()
        differ = [one for one, other in zip(told, true, strict=True) if one != other and "ctxt" not in one]
        if all(line.startswith("Seccomp:") for line in differ): break
    else: raise AssertionError(differ)
    os.close(folder)
    return [line[-1] for line in told if line.startswith("Seccomp:")][0]
def answers(prepare):
    pid, threads = child(prepare)
    modes = [mode(thread) for thread in threads]
    may_go_on = frozen(pid) == -95
    os.kill(pid, 9); os.waitpid(pid, 0)
    return *modes, may_go_on
for prepare in (lambda: None, lambda: thread(lambda: None), install, lambda: thread(install),
                lambda: thread(lambda: install(THREADS))):
    print(*answers(prepare))
"#;

/// Creates a folder with the plugin, which all users may read.
fn plugin() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    install_plugin(folder.path()).unwrap();
    let plugin = folder.path().join(NAME);
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o644)).unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    (folder, plugin)
}

#[test]
fn only_inherited_filters_are_left_out() {
    const NO_OTHERS: &str = "0 True\n0 0 True\n2 False\n0 2 False\n2 2 False\n";
    const TRUE: &str = "2 True\n2 2 True\n2 True\n2 2 True\n2 2 True\n";
    const TRUE_AND_REFUSED: &str = "2 False\n2 2 False\n2 False\n2 2 False\n2 2 False\n";
    let (_folder, plugin) = plugin();
    for (outer, of_sandbox, variable, expected) in [
        ("0", "1", Some("1"), NO_OTHERS),
        ("0", "0", Some("0"), NO_OTHERS),
        ("1", "0", Some("0"), NO_OTHERS),
        ("2", "1", Some("1"), NO_OTHERS),
        ("0", "1", None, TRUE),
        ("0", "1", Some("0"), TRUE_AND_REFUSED),
        ("0", "1", Some("x"), TRUE_AND_REFUSED),
    ] {
        let mut command = Command::new("python3");
        command
            .args(["-c", FILTERED])
            .arg(&plugin)
            .args([outer, of_sandbox])
            .env("LD_PRELOAD", &plugin)
            .envs(variable.map(|value| ("CKPT_RUN_PLUGIN_FILTERS", value)));
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let told = String::from_utf8_lossy(&output.stdout);
        assert_eq!(told, expected, "{outer} {of_sandbox} {variable:?}");
    }
}

#[test]
fn an_unprivileged_criu_gets_the_same_file_or_an_error() {
    let (folder, plugin) = plugin();
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-current-user", "--pid", "--fork"])
        .args(["--mount-proc", "python3", "-c", SCRIPT])
        .env("LD_PRELOAD", &plugin)
        .current_dir(folder.path());
    if nix::unistd::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("unshare failed") {
        eprintln!("SKIPPED: no user namespaces here");
        return;
    }
    assert!(output.status.success(), "{said}");
    assert_eq!(output.stdout, b"all answers are right\n");
}
