//! Random file operations by several processes: after each restore the files are as at the snapshot, and changes by
//! other programs are kept.
//!
//! More rounds: `RANDOM_FILES_ROUNDS=200 cargo test --test end_to_end random_operations`. A failed seed is added to
//! `SEEDS`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;

use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, wait_until};

/// Seeds used in every run of the tests.
const SEEDS: [u64; 3] = [1, 2, 1011];
/// Process to be killed after each image. The second restore begins with the files that the first one rolled back.
const KILLED: [Killed; 2] = [Killed::Job, Killed::Supervisor];

/// Three processes execute random operations on the files in `data`. In between, the job waits for an order: `some`
/// stands for a number of operations, `run` for operations until it is killed.
const JOB: &str = r#"
import mmap, os, random, shutil, sys, time

random.seed(int(sys.argv[1]))
os.chdir("data")

def name(deep=2):
    parts = [random.choice("abcdefgh") for _ in range(random.randint(1, deep))]
    return "/".join(parts)

def text():
    return os.urandom(random.choice([0, 10, 5000, 70000]))

opened = {}

def kept(mode):
    path = "open-%d-%s" % (os.getpid(), mode.replace("+", ""))
    if path not in opened:
        if not os.path.exists(path):
            open(path, "wb").close()
        opened[path] = open(path, mode + "b", buffering=0)
    return opened[path]

def append(): kept("a").write(text())
def overwrite():
    file = kept("r+")
    file.seek(random.randint(0, 3000)); file.write(text())
def truncate(): kept("r+").truncate(random.randint(0, 100000))
def store():
    file = kept("w+")
    if os.fstat(file.fileno()).st_size < 20000: file.truncate(20000)
    if "map" not in opened: opened["map"] = mmap.mmap(file.fileno(), 20000)
    at = random.randint(0, 19000)
    opened["map"][at:at + 8] = os.urandom(8)
def create():
    with open(name(), "wb") as file: file.write(text())
def extend():
    with open(name(), "ab") as file: file.write(text())
def change():
    with open(name(), "r+b") as file:
        file.seek(random.randint(0, 9000)); file.write(text())
def replace():
    path = name()
    with open(path + ".tmp", "wb") as file: file.write(text())
    os.replace(path + ".tmp", path)
def rename(): os.rename(name(), name())
def remove(): os.remove(name())
def folder(): os.makedirs(name(3))
def remove_folder(): shutil.rmtree(name(1))
def link(): os.link(name(), name())
def symlink(): os.symlink(random.choice("abcdefgh"), name())
def mode(): os.chmod(name(), random.choice([0o600, 0o644, 0o755, 0o400]))
def attribute(): os.setxattr(name(), "user.test", os.urandom(6))
def times(): os.utime(name(), ns=(0, random.randint(1, 10**18)))
def hole():
    with open(name(), "wb") as file: file.seek(1 << 20); file.write(text())

operations = [append, overwrite, truncate, store, create, create, extend, change, change, replace, replace, rename,
              rename, remove, folder, remove_folder, link, link, link, symlink, mode, attribute, times, hole]

def operate():
    try:
        random.choice(operations)()
    except OSError:
        pass

def wait():
    while True:
        try:
            with open("../control/order") as file: return file.read()
        except FileNotFoundError:
            time.sleep(0.002)

ask, told = [], []
for child in range(2):
    ours, theirs = os.pipe(), os.pipe()
    if os.fork() == 0:
        random.seed("%s %d" % (sys.argv[1], child))
        while True:
            if os.read(ours[0], 1) == b"!":
                while True: operate()
            operate()
            os.write(theirs[1], b".")
    ask.append(ours[1]); told.append(theirs[0])

at_rest = 0
while True:
    print("at rest", at_rest, flush=True)
    order = wait()
    if order == "end": break
    if order == "run":
        for pipe in ask: os.write(pipe, b"!")
        print("runs", flush=True)
        while True: operate()
    for _ in range(40):
        for pipe in ask: os.write(pipe, b".")
        operate()
        for pipe in told: os.read(pipe, 1)
    while os.path.exists("../control/order"): time.sleep(0.002)
    at_rest += 1
"#;

#[derive(Clone, Copy, Debug)]
enum Killed {
    Job,
    Supervisor,
}

struct Scene {
    seed: u64,
    place: Place,
    run: Run,
    rests: usize,
}

impl Scene {
    fn begin(seed: u64) -> Self {
        let place = Place::new();
        for folder in ["data", "control"] {
            fs::create_dir(place.file(folder)).unwrap();
        }
        fs::write(place.file("data/notes"), "the user's").unwrap();
        fs::write(place.file("job.py"), JOB).unwrap();
        let run = start(&place, seed);
        let scene = Self {
            seed,
            place,
            run,
            rests: 0,
        };
        scene.wait_for_rest();
        scene
    }

    fn wait_for_rest(&self) {
        let line = format!("at rest {}\n", self.rests);
        self.place.wait_for("out", &line);
    }

    /// Writes an order atomically.
    fn order(&self, order: &str) {
        let draft = self.place.file("control/draft");
        fs::write(&draft, order).unwrap();
        fs::rename(draft, self.place.file("control/order")).unwrap();
    }

    fn take_back(&self) {
        fs::remove_file(self.place.file("control/order")).unwrap();
    }

    fn some(&mut self) {
        let busy = self.place.path().join("data");
        // Before the order: the job may complete it at once.
        let before = tree(&busy);
        self.order("some");
        // The job takes note of an order before it checks if the order was withdrawn.
        wait_until("operations", || tree(&busy) != before);
        self.take_back();
        self.rests += 1;
        self.wait_for_rest();
    }

    /// Lets the job run, kills it or its supervisor after some changes, and waits for the restore.
    fn kill(&mut self, killed: Killed) {
        let count = |text: &str| self.place.text("out").matches(text).count();
        let restored = || self.place.text("err").matches("restored image=").count();
        let (ran, before) = (count("runs"), restored());
        self.order("run");
        wait_until("the job", || count("runs") > ran);
        self.take_back();
        let data = self.place.file("data");
        for _ in 0..self.rests {
            let seen = tree(&data);
            wait_until("a change", || tree(&data) != seen);
        }
        match killed {
            Killed::Job => self.run.crash(),
            Killed::Supervisor => {
                self.run.signal(Signal::SIGKILL);
                self.run.wait();
                self.run = start(&self.place, self.seed);
            }
        }
        wait_until("the restore", || {
            let said = self.place.text("err");
            let seed = self.seed;
            assert!(!said.contains("restore failed"), "seed {seed}: {said}");
            restored() > before
        });
    }
}

fn start(place: &Place, seed: u64) -> Run {
    let job = ["python3", "-u", "job.py", &seed.to_string()];
    place.start_with(&ON_REQUEST, &job, |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "0s");
    })
}

/// Describes a folder: types, modes, times, contents, and hard links.
fn tree(top: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![top.to_owned()];
    let mut inodes = Vec::new();
    while let Some(folder) = folders.pop() {
        let mut entries: Vec<PathBuf> = fs::read_dir(&folder)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect();
        entries.sort();
        for path in entries {
            let Ok(about) = path.symlink_metadata() else {
                continue;
            };
            let mode = about.mode();
            let described = if about.is_dir() {
                folders.push(path.clone());
                format!("{mode:o} folder")
            } else if about.is_symlink() {
                format!("link to {:?}", fs::read_link(&path).ok())
            } else {
                let content = blake3::hash(&fs::read(&path).unwrap_or_default());
                let known = inodes.iter().position(|inode| *inode == about.ino());
                let number = known.unwrap_or(inodes.len());
                if known.is_none() {
                    inodes.push(about.ino());
                }
                let (time, ns) = (about.mtime(), about.mtime_nsec());
                format!("{mode:o} {time}.{ns:09} file {number} {content}")
            };
            found.insert(path, described);
        }
    }
    found
}

fn try_seed(seed: u64) {
    let mut scene = Scene::begin(seed);
    let notes = scene.place.file("data/notes");
    for image in 0..2 {
        scene.some();
        scene.place.snapshot();
        let mut expected = tree(&scene.place.file("data"));
        for killed in KILLED {
            let edited = format!("edited after image {image}, {killed:?}");
            fs::write(&notes, &edited).unwrap();
            scene.kill(killed);
            let mut after = tree(&scene.place.file("data"));
            assert_eq!(fs::read_to_string(&notes).unwrap(), edited, "seed {seed}");
            expected.remove(&notes);
            after.remove(&notes);
            let differs = |(path, before): &(&PathBuf, &String)| after.get(*path) != Some(*before);
            let different: Vec<_> = expected
                .iter()
                .filter(differs)
                .map(|(path, before)| (path, before, after.get(path)))
                .collect();
            let more: Vec<_> = after
                .iter()
                .filter(|(path, _)| !expected.contains_key(*path))
                .collect();
            assert!(
                different.is_empty() && more.is_empty(),
                "seed {seed}, image {image}, {killed:?}: {different:#?}, new: {more:#?}"
            );
        }
    }
    scene.order("end");
    assert_eq!(scene.run.wait(), 0, "{}", scene.place.text("err"));
}

#[apply(as_root)]
fn random_operations_on_files_are_undone_by_a_restore() {
    let rounds = std::env::var("RANDOM_FILES_ROUNDS");
    let rounds: u64 = rounds.ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    for seed in SEEDS.into_iter().chain(1000..1000 + rounds) {
        try_seed(seed);
    }
}
