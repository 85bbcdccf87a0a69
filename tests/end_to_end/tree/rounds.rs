//! Many attempts of one job.

use std::fs;

use crate::harness::{ON_REQUEST, Place, apply, as_root};

/// Number of crashes of the job.
const ROUNDS: usize = 10;

/// Uses a child, a shared mapping, a System V segment, a log and a random-number generator over all rounds.
const JOB: &str = r#"
import ctypes, hashlib, mmap, os, random, sys, time
rounds = int(sys.argv[1])
shared = mmap.mmap(-1, 4096)
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
segment = libc.shmget(0, 4096, 0o1600)
system_v = (ctypes.c_ubyte * 4096).from_address(libc.shmat(segment, None, 0))
there, back = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.close(there[1])
    while data := os.read(there[0], 4):
        shared.seek(0); shared.write(hashlib.sha256(shared[:32] + data).digest())
        os.write(back[1], b"x")
    os._exit(0)
os.close(there[0])
log, dice = open("log", "w"), random.Random(1)
for i in range(rounds * 10):
    if i % 10 == 3:
        while not os.path.exists(f"snapshotted-{i // 10}"): time.sleep(0.005)
    if i % 10 == 6:
        while not os.path.exists(f"crashed-{i // 10}"): time.sleep(0.005)
    os.write(there[1], i.to_bytes(4, "little")); os.read(back[0], 1)
    system_v[i] = i + 1
    print(i, dice.random(), shared[:32].hex(), bytes(system_v[:i + 1]).hex(), file=log, flush=True)
    print(i, flush=True)
os.close(there[1])
os.waitpid(child, 0)
libc.shmctl(segment, 0, None)
"#;

#[apply(as_root)]
fn a_job_that_crashes_ten_times_ends_as_if_it_never_had() {
    let reference = Place::new();
    let place = Place::new();
    for round in 0..ROUNDS {
        for gate in ["snapshotted", "crashed"] {
            fs::write(reference.file(&format!("{gate}-{round}")), "").unwrap();
        }
    }
    for folder in [&reference, &place] {
        fs::write(folder.file("job.py"), JOB).unwrap();
    }
    let rounds = ROUNDS.to_string();
    let job = ["python3", "-u", "job.py", &rounds];
    let undisturbed = std::process::Command::new(job[0])
        .args(&job[1..])
        .current_dir(reference.path())
        .output()
        .expect("python3 starts");
    assert!(undisturbed.status.success());

    let mut run = place.start_with(&ON_REQUEST, &job, |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    });
    for round in 0..ROUNDS {
        place.wait_for("out", &format!("{}\n", round * 10 + 2));
        place.snapshot();
        fs::write(place.file(&format!("snapshotted-{round}")), "").unwrap();
        place.wait_for("out", &format!("{}\n", round * 10 + 5));
        run.crash();
        fs::write(place.file(&format!("crashed-{round}")), "").unwrap();
    }
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), reference.text("log"));
    assert_eq!(place.text("out").into_bytes(), undisturbed.stdout);
}
