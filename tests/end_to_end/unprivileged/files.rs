//! Closed files of jobs for which the kernel does not report who writes: an ordinary user's, and root's on an overlay.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{ON_REQUEST, Place, apply, as_root, as_root_and_user, as_user, skip};

/// Works like a training program: appends to a log that it closes, replaces its checkpoint by a rename, keeps the last
/// three, renames a folder, replaces a file as Rust's `tempfile` does, by a system call that no library sees, and starts
/// programs that write. Waits at the snapshot for MORE, and at the end for "go".
const TRAINS: &str = r#"
import ctypes, os, subprocess, sys, tempfile, time
os.mkdir("run")
libc, rename = ctypes.CDLL(None), {"x86_64": 264, "aarch64": 38}[os.uname().machine]
here = ctypes.c_long(-100)
def wait(name):
    while not os.path.exists(name): time.sleep(0.01)
def step(i):
    with open("run/log", "a") as log: log.write(f"step {i}\n")
    with open("run/new", "w") as new: new.write(f"state {i}" * 1000)
    os.replace("run/new", "run/latest")
    with open(f"run/step-{i}", "w") as kept: kept.write(str(i))
    if i >= 3: os.remove(f"run/step-{i - 3}")
    if i in (2, 7): os.symlink("latest", f"run/direct-{i}")
    if i == 8:
        os.rename("run/kept", "run/archive")
    if i == 3:
        os.makedirs("run/kept/deep"); open("run/kept/deep/x", "w").write("x")
    subprocess.run(["sh", "-c", f"echo {i} >> run/shell; cp run/latest run/copy; ln -sf step-{i} run/link"], check=True)
    subprocess.run(["sed", "-i", f"$ a line {i}", "run/shell"], check=True)
    descriptor, name = tempfile.mkstemp(dir="run"); os.close(descriptor); os.remove(name)
    with open(f"run/.tmp{i}", "x") as model: model.write(f"model {i}")
    assert libc.syscall(ctypes.c_long(rename), here, b"run/.tmp%d" % i, here, b"run/model-%d" % (i // 4)) == 0
for i in range(6): step(i)
print("ready", flush=True)
wait("MORE")
for i in range(6, 12): step(i)
print("done", flush=True)
wait("go")
"#;

/// Renames folders onto empty ones and exchanges them with folders and files, puts files in the place of folders in which it
/// has files open, and writes by a link that it changes afterwards. Waits at the snapshot for MORE, and at the end for "go".
const MOVES_FOLDERS: &str = r#"
import ctypes, os, shutil, time
os.mkdir("run"); os.chdir("run")
def wait(name):
    while not os.path.exists(name): time.sleep(0.01)
def exchange(one, other):
    assert ctypes.CDLL(None).renameat2(-100, one.encode(), -100, other.encode(), 2) == 0
def write(*names):
    for name in names:
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "w") as file: file.write(name)
write("one/x", "one/deep/x", "other/y", "full/x", "file", "folder/x", "gone/x", "gone/deep/x")
for name in "empty", "first", "second", "target", "next": os.mkdir(name)
os.symlink("target", "latest")
log = open("gone/log", "w+"); log.write("before "); log.flush()
read = open("gone/deep/x"); inside = os.open("gone/deep", os.O_RDONLY)
print("ready", flush=True)
wait("MORE")
exchange("one", "other")
os.rename("full", "empty")
exchange("file", "folder")
write("first/new"); exchange("first", "second")
shutil.rmtree("gone"); write("gone")
log.write("after"); log.flush(); log.seek(0)
write("log"); open("log", "a").write(log.read() + read.read())
write("latest/new"); os.remove("latest"); os.symlink("next", "latest")
print("done", flush=True)
wait("../go")
"#;

/// Names with the contents of files and the targets of links.
type Contents = Vec<(String, String)>;

/// Returns the names and contents below a folder.
fn contents(place: &Place, folder: &str) -> Contents {
    let mut found = Vec::new();
    for entry in fs::read_dir(place.file(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(contents(place, &name));
        } else if kind.is_symlink() {
            let target = fs::read_link(entry.path()).unwrap();
            found.push((name, target.to_string_lossy().into_owned()));
        } else {
            found.push((name.clone(), place.text(&name)));
        }
    }
    found.sort();
    found
}

#[apply(as_user)]
fn closed_files_that_the_job_writes_are_rolled_back() {
    files_are_rolled_back(&Place::new());
}

#[apply(as_root)]
fn closed_files_on_an_overlay_are_rolled_back() {
    let (place, layers) = (Place::new(), Place::new());
    let Some(_overlay) = Overlay::over(&place, &layers) else {
        skip("no overlay can be mounted here");
        return;
    };
    files_are_rolled_back(&place);
}

/// Overlay whose layers are in memory and have no path, as in a container; unmounted on drop.
struct Overlay(PathBuf);

impl Overlay {
    fn over(place: &Place, layers: &Place) -> Option<Self> {
        let layers = layers.path();
        let made = mount("tmpfs", "mode=755", layers);
        for name in ["lower", "upper", "work"] {
            fs::create_dir(layers.join(name)).unwrap();
        }
        let folders = layers.to_str().unwrap();
        let options =
            format!("lowerdir={folders}/lower,upperdir={folders}/upper,workdir={folders}/work");
        let made = made && mount("overlay", &options, place.path());
        unmount(layers);
        made.then(|| Self(place.path().to_owned()))
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

fn unmount(folder: &Path) {
    let _ = Command::new("umount").arg("--lazy").arg(folder).status();
}

fn mount(kind: &str, options: &str, folder: &Path) -> bool {
    let mut mount = Command::new("mount");
    let mount = mount.args(["-t", kind, "-o", options, kind]).arg(folder);
    mount.status().is_ok_and(|status| status.success())
}

#[apply(as_root)]
fn files_on_an_overlay_beside_the_folder_are_rolled_back() {
    let (place, beside, layers) = (Place::new(), Place::new(), Place::new());
    let Some(_overlay) = Overlay::over(&beside, &layers) else {
        skip("no overlay can be mounted here");
        return;
    };
    let go = TRAINS.replace(r#""go""#, &format!("{:?}", place.file("go")));
    let script = format!("import os; os.chdir({:?}){go}", beside.path());
    let (then, untouched) = rolled_back((&place, &beside), &script);
    assert_ne!(then, untouched);
    assert_eq!(contents(&beside, "run"), untouched);
    // What the kernel reports, the programs do not.
    let reports = fs::read_dir(place.file(".ckpt-run/writes")).unwrap();
    for report in reports {
        let text = fs::read_link(report.unwrap().path()).unwrap();
        let text = text.to_string_lossy().into_owned();
        assert!(text.contains(beside.path().to_str().unwrap()), "{text}");
    }
}

#[apply(as_user)]
fn an_open_log_with_a_second_name_is_restored() {
    let script = r#"
import os, time
def wait(name):
    while not os.path.exists(name): time.sleep(0.01)
os.mkdir("run"); log = open("run/log", "a")
def note(text): log.write(text); log.flush()
note("before "); os.link("run/log", "run/second")
print("ready", flush=True)
wait("MORE")
note("after ")
print("done", flush=True)
wait("go")
"#;
    let place = Place::new();
    let (_, untouched) = rolled_back((&place, &place), script);
    assert_eq!(contents(&place, "run"), untouched);
}

#[apply(as_root_and_user)]
fn folders_that_change_places_are_rolled_back() {
    let place = Place::new();
    let (then, untouched) = rolled_back((&place, &place), MOVES_FOLDERS);
    assert_ne!(then, untouched);
    assert_eq!(contents(&place, "run"), untouched);
}

fn files_are_rolled_back(place: &Place) {
    let (then, untouched) = rolled_back((place, place), TRAINS);
    assert_ne!(then, untouched);
    assert_eq!(contents(place, "run"), untouched);
    let log: Vec<_> = (0..12).map(|i| format!("step {i}\n")).collect();
    assert_eq!(place.text("run/log"), log.concat());
}

/// Runs a script that is killed after a snapshot and restored. Returns the contents of its folder `run`, which is in the second
/// place, at the snapshot and at its first end.
fn rolled_back((place, top): (&Place, &Place), script: &str) -> (Contents, Contents) {
    let elsewhere = Place::new();
    let more = elsewhere.file("more");
    let script = script.replace("MORE", more.to_str().unwrap());
    let mut run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready");
    place.snapshot();
    let then = contents(top, "run");
    fs::write(more, "").unwrap();
    place.wait_for("out", "done");
    let untouched = contents(top, "run");
    run.crash();
    place.wait_for("err", "ckpt-run: restored image=000001");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    (then, untouched)
}

/// Runs a job that executes this code after its snapshot, then lets another program act, and crashes the job. Returns the
/// messages about the refused restore.
fn refusal(write: &str, meanwhile: impl FnOnce(&Place)) -> (Place, String) {
    let (place, elsewhere) = (Place::new(), Place::new());
    let more = elsewhere.file("more");
    let script = format!(
        r#"
import ctypes, os, time
def wait(name):
    while not os.path.exists(name): time.sleep(0.01)
open("data", "w").write("before")
print("ready", flush=True)
wait("{}")
{write}
print("done", flush=True)
wait("go")
"#,
        more.display()
    );
    let mut run = place.start_python(&ON_REQUEST, &script);
    place.wait_for("out", "ready");
    place.snapshot();
    fs::write(more, "").unwrap();
    place.wait_for("out", "done");
    meanwhile(&place);
    run.crash();
    assert_eq!(run.wait(), 125, "{}", place.text("err"));
    let said = place.text("err");
    (place, said)
}

#[apply(as_user)]
fn a_change_without_a_report_is_refused_with_the_remedy() {
    // A system call by its number, as programs do that do not use the C library's functions.
    let raw = r#"
libc = ctypes.CDLL(None)
number, here = {"x86_64": 257, "aarch64": 56}[os.uname().machine], ctypes.c_long(-100)
data = libc.syscall(ctypes.c_long(number), here, b"data", ctypes.c_long(0o1001), ctypes.c_long(0))
assert data >= 0
os.write(data, b"after"); os.close(data)"#;
    let (place, said) = refusal(raw, |_| ());
    assert!(
        said.contains("data") && said.contains("if the job writes it, list it in files.include"),
        "{said}"
    );
    assert_eq!(place.text("data"), "after");
}

#[apply(as_user)]
fn a_file_of_another_program_is_never_rolled_back() {
    let (place, said) = refusal("", |place| {
        fs::write(place.file("notes"), "mine").unwrap();
    });
    assert!(
        said.contains("notes (changed or created since by an unknown program;"),
        "{said}"
    );
    assert_eq!(place.text("notes"), "mine");
}

/// Slurm gives the output of each submission a name of its own (`slurm-%j.out`).
#[apply(as_root_and_user)]
fn output_of_earlier_starts_is_no_file_of_another_program() {
    let script = r#"
import os, time
for step in range(1000):
    print(step, flush=True); time.sleep(0.01)
    if os.path.exists("go"): break
"#;
    let place = Place::new();
    fs::write(place.file("job.py"), script).unwrap();
    let start = |number: u32| {
        let name = format!("slurm-{number}.out");
        let output = File::create(place.file(&name)).unwrap();
        place.start_with(&ON_REQUEST, &["python3", "-u", "job.py"], |command| {
            command.stderr(output.try_clone().unwrap()).stdout(output);
        })
    };
    for number in 1..3 {
        let mut run = start(number);
        place.wait_for(&format!("slurm-{number}.out"), "\n5");
        place.snapshot();
        run.kill_supervisor();
    }
    let mut run = start(3);
    place.wait_for("slurm-3.out", "restored image=000002");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("slurm-3.out"));
}
