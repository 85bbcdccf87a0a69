//! Folders that the dying job removes together with files that an image needs, and a renamed working folder.

use std::fs;

use nix::sys::signal::kill;
use nix::unistd::Pid;

use super::survival::{Survival, survives};
use crate::harness::{
    ON_REQUEST, Ordinary, Place, apply, as_root, as_root_and_user, stderr, wait_until,
};

/// As soon as there is a file `tidy`, once: removes `folder`, then kills the job's first process. Python's
/// multiprocessing does this in the opposite order, with a race against the end of the sandbox.
const TIDY: &str = r#"
import shutil
def tidy(folder):
    while not os.path.exists(os.path.join(home, "tidy")): time.sleep(0.005)
    os.remove(os.path.join(home, "tidy"))
    shutil.rmtree(folder)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)
"#;

/// Checks that the job's result does not depend on its removals before its death.
fn survives_its_own_tidying(script: &str) {
    let script = format!("home = os.getcwd()\n{TIDY}{script}");
    let survival = Survival::begin(&script);
    let job = survival.run.job();
    fs::write(survival.place.file("tidy"), "").unwrap();
    wait_until("the job's end", || kill(Pid::from_raw(job), None).is_err());
    survival.ends_like_an_undisturbed_run();
}

#[apply(as_root)]
fn multiprocessing_listener_is_restored_with_its_folder() {
    survives_its_own_tidying(
        r#"
from multiprocessing import Process, util
from multiprocessing.connection import Client, Listener
listener = Listener(None, "AF_UNIX", authkey=b"key")
def serve():
    while True:
        with listener.accept() as peer: peer.send(peer.recv() * 2)
threading.Thread(target=serve, daemon=True).start()
folder = os.path.dirname(listener.address)
assert os.path.basename(folder).startswith("pymp-")
worker = Process(target=tidy, args=(folder,), daemon=True); worker.start()
for i in steps():
    with Client(listener.address, authkey=b"key") as client:
        client.send(i); note(client.recv())
note(oct(os.stat(folder).st_mode), os.listdir(folder) == [os.path.basename(listener.address)])
worker.kill()
"#,
    );
}

#[apply(as_root)]
fn files_in_a_temporary_folder_are_restored() {
    survives_its_own_tidying(
        r#"
import tempfile
folder = tempfile.mkdtemp()
os.chmod(folder, 0o2751); os.chown(folder, 12, 34)
inner = os.path.join(folder, "a", "b"); os.makedirs(inner); os.chmod(inner, 0o1777)
data = open(os.path.join(inner, "data"), "w+b", 0)
opened = os.open(os.path.join(folder, "a"), os.O_RDONLY | os.O_DIRECTORY)
os.mkfifo(os.path.join(folder, "fifo"), 0o640); fifo = os.open(os.path.join(folder, "fifo"), os.O_RDWR)
child = os.fork()
if child == 0: tidy(folder)
os.chdir(inner)
mail = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); mail.bind("mail")
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); sender.connect("mail")
def gate(name):
    while not os.path.exists(os.path.join(home, name)): time.sleep(0.005)
for i in steps():
    data.write(b"%d;" % i); note(os.pread(data.fileno(), 1000, 0))
    os.write(fifo, b"fifo %02d" % i); sender.send(b"mail %02d" % i)
    if i > 2: note(os.read(fifo, 7), mail.recv(100))
for name in ".", "a", "a/b", "a/b/data", "a/b/mail", "fifo":
    about = os.stat(os.path.join(folder, name)); note(name, oct(about.st_mode), about.st_uid, about.st_gid)
note(os.listdir(opened), os.path.samefile(os.getcwd(), inner), sorted(os.listdir(".")))
os.kill(child, signal.SIGKILL)
"#,
    );
}

#[apply(as_root_and_user)]
fn a_worker_that_hears_of_its_parents_death_changes_nothing() {
    survives(
        r#"
import shutil, tempfile
folder = tempfile.mkdtemp()
listening = socket.socket(socket.AF_UNIX); listening.bind(os.path.join(folder, "listen")); listening.listen()
child = os.fork()
if child == 0:
    def tidy(*_): shutil.rmtree(folder, ignore_errors=True)
    signal.signal(signal.SIGUSR1, tidy)
    check(libc.prctl(1, signal.SIGUSR1))  # PR_SET_PDEATHSIG
    while True: signal.pause()
for i in steps():
    client = socket.socket(socket.AF_UNIX); client.connect(os.path.join(folder, "listen"))
    accepted = listening.accept()[0]; accepted.send(b"%d" % i); note(client.recv(10))
os.kill(child, signal.SIGKILL)
"#,
    );
}

#[apply(as_root_and_user)]
fn a_working_folder_that_was_renamed_is_named() {
    let place = Place::new();
    let (was, is, store) = (place.file("was"), place.file("is"), place.file("store"));
    fs::create_dir(&was).unwrap();
    if let Some(user) = Ordinary::of_test() {
        user.owns(&was);
    }
    let in_store = ["--store", store.to_str().unwrap()];
    let options = [ON_REQUEST, in_store].concat();
    let job = "echo ready; while ! [ -e go ]; do sleep 0.02; done";
    let mut run = place.start_with(&options, &["sh", "-c", job], |command| {
        command.current_dir(&was);
    });
    place.wait_for("out", "ready\n");
    let taken = place.verb(&["snapshot", in_store[0], in_store[1]]);
    assert!(taken.status.success(), "{}", stderr(&taken));
    fs::rename(&was, &is).unwrap();
    run.crash();
    assert_eq!(run.wait(), 125, "{}", place.text("err"));
    let said = place.text("err");
    let now = format!("renamed to {}", is.display());
    assert!(
        said.contains(&now) && said.contains("rename it back"),
        "{said}"
    );
    assert!(!was.exists(), "the job would continue in a new folder");
}
