//! Files and pipes.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use super::survival::survives;
use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, as_user, skip, wait_until,
};

#[apply(as_root_and_user)]
fn files_opened_in_every_mode_go_back_with_the_job() {
    survives(
        r#"
append = open("append", "ab", 0)
truncated = open("truncated", "wb", 0)
both = open("both", "w+b", 0)
reader = open("append", "rb", 0)
raw = os.open("raw", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
for i in steps():
    line = f"line {i}\n".encode()
    append.write(line); truncated.write(line)
    both.seek(0); note(both.read()); both.seek(0); both.write(line * (STEPS - i))
    note(reader.read(), os.pwrite(raw, line, i * 5), os.pread(raw, 1000, 0))
for name in "append", "truncated", "both", "raw": note(open(name, "rb").read(), oct(os.stat(name).st_mode))
"#,
    );
}

#[apply(as_root_and_user)]
fn unlinked_files_keep_their_content() {
    survives(
        r#"
import tempfile
gone = open("gone", "w+b", 0); os.unlink("gone")
big = tempfile.TemporaryFile(dir="."); big.write(hashlib.shake_128(b"x").digest(3 << 20)); big.flush()
os.makedirs("folder/inner"); inside = open("folder/inner/file", "w+b", 0)
os.unlink("folder/inner/file"); os.removedirs("folder/inner")
for i in steps():
    gone.write(b"%d\n" % i); inside.write(b"%d;" % i)
    big.seek(i * 1000); big.write(b"%d" % i); big.flush()
    for file in gone, inside, big:
        note(os.pread(file.fileno(), 4 << 20, 0))
"#,
    );
}

#[apply(as_root_and_user)]
fn closed_files_and_attributes_go_back_with_the_job() {
    survives(
        r#"
path = "/dev/shm/" + os.getcwd().replace("/", "-")
def write(text):
    with open(path, "w") as file: file.write(text)
write("first")
open("closed", "w").close(); os.mkdir("folder")
places = ["closed", "folder"]
for place in places: os.setxattr(place, "user.at", b"first")
for i in steps():
    with open(path) as file: note(file.read())
    write(f"step {i}")
    for place in places: note(os.getxattr(place, "user.at")); os.setxattr(place, "user.at", b"%d" % i)
os.remove(path)
"#,
    );
}

/// Holes do not count: each file is larger than `files.keep_total`, and than the memory and disk of most machines.
#[apply(as_root_and_user)]
fn files_with_large_holes_are_kept() {
    survives(
        r#"
SIZE = 1 << 40
shared = "/dev/shm/" + os.getcwd().replace("/", "-")
for path in "open", "closed", shared: open(path, "wb").truncate(SIZE)
file = open("open", "r+b", buffering=0)
memory = mmap.mmap(os.open(shared, os.O_RDWR), SIZE)
for i in steps():
    places = [step * (SIZE // STEPS) + step for step in range(STEPS)]
    with open("closed", "r+b", buffering=0) as closed:
        for kept in file, closed:
            kept.seek(places[i]); kept.write(b"%d" % i)
            note([os.pread(kept.fileno(), 8, place) for place in places], os.stat(kept.fileno()).st_blocks < 2048)
    memory[places[i]] = i + 1
    note([memory[place] for place in places], os.stat(shared).st_blocks < 2048)
os.remove(shared)
"#,
    );
}

#[apply(as_root_and_user)]
fn pipes_keep_data_in_flight() {
    survives(
        r#"
plain, loose = os.pipe(), os.pipe2(os.O_NONBLOCK)
fcntl.fcntl(plain[1], 1031, 1 << 20)  # F_SETPIPE_SZ
for n in range(50): os.write(plain[1], hashlib.shake_128(bytes([n])).digest(10000))
for i in steps():
    os.write(plain[1], hashlib.shake_128(b"%d" % i).digest(10000))
    os.write(loose[1], b"packet %03d" % i)
    note(os.read(plain[0], 7777))
    if i % 2: note(os.read(loose[0], 10))
note(fcntl.fcntl(plain[1], 1032))
os.close(plain[1]); os.close(loose[1])
note(open(plain[0], "rb").read())
while data := os.read(loose[0], 4096): note(data)
"#,
    );
}

#[apply(as_root_and_user)]
fn named_pipes_keep_data_in_flight() {
    survives(
        r#"
os.mkfifo("fifo")
fifo = os.open("fifo", os.O_RDWR)
writer = os.open("fifo", os.O_WRONLY); reader = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
for i in steps():
    os.write(writer, b"message %03d" % i)
    if i >= 3: note(os.read(reader, 11))
note(os.read(reader, 1000))
"#,
    );
}

#[apply(as_root_and_user)]
fn devices_stay_open() {
    survives(
        r#"
null, zero, random = [open("/dev/" + name, "r+b", 0) for name in ("null", "zero", "urandom")]
for i in steps():
    note(null.write(b"x" * i), null.read(10), zero.read(i), len(random.read(16)))
"#,
    );
}

#[apply(as_root_and_user)]
fn file_locks_are_held_on() {
    survives(
        r#"
whole, parts = open("whole", "w"), open("parts", "w+")
parts.write("x" * 100); parts.flush()
fcntl.flock(whole, fcntl.LOCK_EX)
fcntl.lockf(parts, fcntl.LOCK_EX, 10, 20)
probe = '''
import fcntl
def free(lock, *args):
    try: lock(*args)
    except OSError: return False
    return True
parts = open("parts", "r+")
print(free(fcntl.flock, open("whole"), fcntl.LOCK_SH | fcntl.LOCK_NB),
      [free(fcntl.lockf, parts, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at) for at in (19, 20, 29, 30)])
'''
for i in steps():
    if i % 6 == 1: note(subprocess.check_output([sys.executable, "-c", probe]))
assert subprocess.check_output([sys.executable, "-c", probe]) == b"False [True, False, False, True]\n"
"#,
    );
}

#[apply(as_root_and_user)]
fn two_thousand_open_files_survive() {
    survives(
        r#"
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
os.mkdir("many")
many = [open(f"many/{n}", "w+b", 0) for n in range(2000)]
for n, file in enumerate(many): file.write(b"%d" % n)
for i in steps():
    for file in many[i::STEPS]: file.write(b"|%d" % i)
for file in many: note(os.pread(file.fileno(), 100, 0))
note(resource.getrlimit(resource.RLIMIT_NOFILE), sum(os.path.getsize(f"many/{n}") for n in range(2000)))
"#,
    );
}

#[apply(as_root_and_user)]
fn the_working_directory_stays_even_when_it_was_deleted() {
    survives(
        r#"
home = os.getcwd()
def gate(name):
    while not os.path.exists(os.path.join(home, name)): time.sleep(0.005)
os.mkdir("deep"); os.mkdir("lost")
os.chdir("deep")
child = subprocess.Popen(["cat"], cwd="../lost", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
os.rmdir("../lost")
for i in steps():
    with open("file", "w") as file: file.write(f"{i}\n")
    child.stdin.write(b"%d\n" % i); child.stdin.flush()
    note(child.stdout.readline(), os.path.basename(os.getcwd()))
    note(os.readlink(f"/proc/{child.pid}/cwd").endswith("/lost (deleted)"))
child.stdin.close(); note(child.wait())
note(open(os.path.join(home, "deep", "file")).read())
"#,
    );
}

/// Maximum number that CRIU gives the files of such a job.
const NUMBERS: u32 = 400;

/// Starts a job with an open file whose name was removed, as POSIX semaphores have; CRIU links it as `link_remap.N`.
fn with_a_renamed_file() -> (Place, Run) {
    let place = Place::new();
    let run = place.start_python(
        &ON_REQUEST,
        r#"
import os, time
file = open("first", "w+b", 0); os.link("first", "second"); os.unlink("first"); file.write(b"content")
print("open", flush=True)
while not os.path.exists("go"): time.sleep(0.005)
assert os.pread(file.fileno(), 10, 0) == b"content" and os.path.sameopenfile(file.fileno(), os.open("second", os.O_RDONLY))
"#,
    );
    place.wait_for("out", "open\n");
    (place, run)
}

/// Checks a snapshot with conflicting names that belong to no running program; `make` creates each of them.
fn survives_names(make: impl Fn(&Place, &Path)) -> Place {
    let (place, mut run) = with_a_renamed_file();
    let names = || (0..NUMBERS).map(|number| place.file(&format!("link_remap.{number}")));
    names().for_each(|name| make(&place, &name));
    place.snapshot();
    run.crash();
    place.wait_for("err", "restored");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    place
}

#[apply(as_root)]
fn links_of_a_foreign_criu_stay_and_do_no_harm() {
    let place = survives_names(|_, name| fs::write(name, "another's").unwrap());
    for number in 0..NUMBERS {
        assert_eq!(place.text(&format!("link_remap.{number}")), "another's");
    }
}

#[apply(as_root_and_user)]
fn links_that_a_killed_dump_has_left_are_taken_away() {
    let place = survives_names(|place, name| fs::hard_link(place.file("second"), name).unwrap());
    for number in 0..NUMBERS {
        assert!(!place.file(&format!("link_remap.{number}")).exists());
    }
}

/// Job with semaphores whose files in `/dev/shm` have lost their original names.
const SEMAPHORES: &str = r#"
import itertools, multiprocessing, os, time
def work(lock, turns, done):
    while True:
        turns.acquire()
        with lock: done.release()
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    lock, turns, done = context.Lock(), context.Semaphore(0), context.Semaphore(0)
    worker = context.Process(target=work, args=(lock, turns, done), daemon=True)
    worker.start()
    for i in itertools.count():
        turns.release(); done.acquire()
        print(i, flush=True)
        if os.path.exists("go"): break
        time.sleep(0.02)
"#;

/// Turns of root and of the ordinary user: a restore waits 20 s at most for the locks of another user's jobs.
static TURNS: Mutex<()> = Mutex::new(());

/// All have semaphores in `/dev/shm`, and CRIU gives them the same names there.
#[apply(as_root_and_user)]
fn concurrently_killed_jobs_are_all_restored() {
    let _turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    let jobs: Vec<(Place, Run)> = (0..4)
        .map(|_| {
            let place = Place::new();
            let run = place.start_python(&ON_REQUEST, SEMAPHORES);
            (place, run)
        })
        .collect();
    std::thread::scope(|scope| {
        for (place, _) in &jobs {
            place.wait_for("out", "5\n");
            scope.spawn(|| place.snapshot());
        }
    });
    for round in 1..=2 {
        for (_, run) in &jobs {
            run.crash();
        }
        for (place, _) in &jobs {
            wait_until("its restore", || {
                place.text("err").matches("restored image=").count() == round
            });
        }
    }
    for (place, mut run) in jobs {
        place.go();
        assert_eq!(run.wait(), 0, "{}", place.text("err"));
        let out = place.text("out");
        let lines: Vec<String> = (0..out.lines().count()).map(|i| i.to_string()).collect();
        assert_eq!(out.lines().collect::<Vec<_>>(), lines);
        assert!(
            !place.text("err").contains("failed"),
            "{}",
            place.text("err")
        );
    }
}

#[apply(as_root)]
fn snapshot_waiting_for_another_job_is_reported() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, SEMAPHORES);
    place.wait_for("out", "5\n");
    // Another program's lock would not be awaited for so long.
    let other = place.file("ckpt-run-of-another-job");
    // Not by this process: a child of another test could have it open for writing (`ETXTBSY`).
    let copied = Command::new("cp")
        .arg("/usr/bin/flock")
        .arg(&other)
        .status();
    assert!(copied.is_ok_and(|ended| ended.success()));
    let mut held = Command::new(other)
        .args(["/dev/shm", "sh", "-c", "echo locked; cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut word = [0; 6];
    let told = held.stdout.as_mut().expect("a pipe").read_exact(&mut word);
    told.expect("the lock is held");
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| place.snapshot());
        place.wait_for("err", "snapshot or restore of another job");
        drop(held.stdin.take());
        taken.join().expect("a snapshot");
    });
    held.wait().expect("it ends");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

/// Project folders of clusters are like this: the kernel gives new files the folder's group, which a user namespace does not
/// have.
#[apply(as_user)]
fn temporary_files_of_a_shared_folder_keep_their_group() {
    if !nix::unistd::geteuid().is_root() {
        skip("folders of other groups need root");
        return;
    }
    let place = Place::new();
    let shared = place.file("shared");
    fs::create_dir(&shared).unwrap();
    chown(&shared, None, Some(64002)).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o2777)).unwrap();
    let script = r#"
import os, socket, tempfile, time
file = tempfile.TemporaryFile(dir="shared"); file.write(b"text"); file.flush()
server = socket.socket(socket.AF_UNIX); server.bind("shared/socket"); server.listen()
group = os.fstat(file.fileno()).st_gid
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
file.seek(0)
client = socket.socket(socket.AF_UNIX); client.connect("shared/socket")
print(file.read(), os.fstat(file.fileno()).st_gid == group)
"#;
    let mut run = place.start_python(&ON_REQUEST, script);
    place.wait_for("out", "ready\n");
    place.snapshot();
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "ready\nb'text' True\n");
    assert_eq!(
        fs::metadata(place.file("shared/socket")).unwrap().gid(),
        64002
    );
}

/// Git makes its objects read-only.
#[apply(as_root_and_user)]
fn read_only_files_that_the_job_replaced_go_back() {
    let place = Place::new();
    let script = r#"
import os, time
def write(name, text):
    with open("new", "w") as file: file.write(text)
    os.chmod("new", 0o444); os.rename("new", name)
write("object", "one"); write("touched", "one"); os.mkdir("pack"); write("pack/a", "one"); os.chmod("pack", 0o555)
log = open("log", "w", opener=lambda name, flags: os.open(name, flags, 0o444)); log.write("one\n"); log.flush()
print("ready", flush=True)
while not os.path.exists("accept"): time.sleep(0.01)
contents = [open(name).read() for name in ("object", "touched", "pack/a", "log")]
print(contents, sorted(os.listdir("pack")), oct(os.stat("pack").st_mode), flush=True)
write("object", "two"); os.utime("touched"); log.write("two\n"); log.flush()
os.chmod("pack", 0o755); write("pack/b", "two"); os.remove("pack/a"); os.chmod("pack", 0)
print("changed", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
os.chmod("pack", 0o755)
"#;
    let mut run = place.start_python(&ON_REQUEST, script);
    place.wait_for("out", "ready\n");
    place.snapshot();
    fs::write(place.file("accept"), "").unwrap();
    place.wait_for("out", "changed\n");
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let state = r"['one', 'one', 'one', 'one\n'] ['a'] 0o40555";
    assert_eq!(place.text("out"), format!("ready\n{state}\nchanged\n"));
}

/// To open it would wait for a writer.
#[apply(as_root)]
fn the_watcher_does_not_open_a_pipe_in_place_of_a_folder() {
    let place = Place::new();
    let script = r#"
import os, time
os.mkdir("place"); open("place/file", "w").close()
os.remove("place/file"); os.rmdir("place"); os.mkfifo("place")
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
"#;
    let mut run = place.start_python(&ON_REQUEST, script);
    place.wait_for("out", "ready\n");
    place.snapshot();
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert!(!said.contains("not watched"), "{said}");
}
