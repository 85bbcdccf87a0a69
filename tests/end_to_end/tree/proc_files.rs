//! Files of `/proc` that a job keeps open, as programs do that watch their memory or their children.

use super::survival::survives;
use crate::harness::{ON_REQUEST, Place, UNTIL_GO, apply, as_root, as_root_and_user, stderr};

#[apply(as_root)]
fn open_files_of_proc_are_those_of_the_restored_processes() {
    survives(
        r#"
import re
child, gone = os.fork(), None
if child == 0: time.sleep(3600)
gone = os.fork()
if gone == 0: time.sleep(3600)
me, known = os.getpid(), bytes(range(256)) * 16
known_at = ctypes.create_string_buffer(known, len(known))
paths = ["self/status", "thread-self/comm", f"self/task/{me}/comm", f"{child}/comm", "self/cmdline", "self/environ",
         "sys/kernel/pid_max", "1/status", "version"]
opened = {path: os.open("/proc/" + path, os.O_RDONLY) for path in paths}
maps, memory = open("/proc/self/maps"), os.open("/proc/self/mem", os.O_RDONLY)
score = os.open("/proc/self/oom_score_adj", os.O_RDWR)
folder = os.open("/proc/self/task", os.O_RDONLY | os.O_DIRECTORY)
dead = os.open(f"/proc/{gone}/status", os.O_RDONLY)
os.kill(gone, signal.SIGKILL); os.waitpid(gone, 0)
def errno_of(action):
    try: return action()
    except OSError as error: return error.errno
for i in steps():
    for path in "self/status", f"{child}/comm", f"self/task/{me}/comm", "thread-self/comm":
        text = os.pread(opened[path], 4096, 0).decode()
        note(re.search(r"^NSpid:.*\b%d$" % me, text, re.M) is not None if "status" in path else text)
    for path in "self/cmdline", "self/environ", "sys/kernel/pid_max", "version":
        note(os.pread(opened[path], 4096, 0) == open("/proc/" + path, "rb").read() != b"")
    note(os.pread(opened["1/status"], 4096, 0).startswith(b"Name:"))
    note(os.pread(memory, len(known), ctypes.addressof(known_at)) == known)
    note(hex(ctypes.addressof(known_at))[2:6] in open("/proc/self/maps").read())
    os.pwrite(score, b"%d" % (500 + i), 0); note(os.pread(score, 9, 0), open("/proc/self/oom_score_adj").read())
    note(errno_of(lambda: os.pread(dead, 10, 0)), errno_of(lambda: os.waitpid(gone, 0)))
    note(os.listdir(folder) == [str(me)])
note("libc" in maps.read())
os.kill(child, signal.SIGKILL)
"#,
    );
}

#[apply(as_root_and_user)]
fn a_proc_file_that_a_restore_would_not_find_is_named() {
    // `/proc/self` itself is affected by a bug of CRIU.
    for (what, opens, why) in [
        (
            "/task/",
            "f'/proc/self/task/{thread.native_id}/stat'",
            "belongs to a thread",
        ),
        (
            "/fdinfo/1",
            "'/proc/self/fdinfo/1'",
            "belongs to a descriptor",
        ),
        ("/proc/", "'/proc/self'", "under a wrong name"),
        ("/maps", "'/proc/self/maps'", "has begun to read"),
    ] {
        let place = Place::new();
        let script = format!(
            "import os, threading\nthread = threading.Thread(target=threading.Event().wait, daemon=True)\n\
             thread.start()\nopened = os.open({opens}, os.O_RDONLY)\n\
             if {opens}.endswith('maps'): os.read(opened, 1)\n{UNTIL_GO}os.close(opened)\nos.remove('go')\n\
             print('closed', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
        );
        let mut run = place.start_python(&ON_REQUEST, &script);
        place.wait_for("out", "ready");
        if why == "has begun to read" {
            let said = stderr(&place.verb(&["snapshot"]));
            assert!(
                said.contains("let the job close it") && said.contains(why),
                "{said}"
            );
        }
        // Programs that watch themselves have such files open for moments.
        let said = place.snapshot_at_a_later_attempt("go");
        assert!(said.contains(&run.job_named()), "{said}");
        assert!(said.contains("(python3) has /proc/"), "{said}");
        assert!(said.contains(what) && said.contains(why), "{said}");
        place.wait_for("out", "closed");
        place.go();
        assert_eq!(run.wait(), 0, "{}", place.text("err"));
    }
}
