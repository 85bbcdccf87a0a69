//! Container image of the tests: the Dockerfile from `ckpt-run template docker`, built unchanged. Its base image is
//! made from Debian's packages, because there is no registry. Both are kept below `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use nix::fcntl::{Flock, FlockArg};

use super::machine::Machine;
use crate::harness::{Place, program, skip, stderr};

/// Base image in the Dockerfile, and its release of Debian.
const BASE: (&str, &str) = ("docker.io/library/debian:13", "trixie");
/// Name in the Dockerfile's comments.
pub const IMAGE: &str = "train";
/// Name in the Kubernetes template, which users replace.
pub const IN_A_REGISTRY: &str = "registry.example/train:latest";
/// Job in both.
pub const JOB: [&str; 3] = ["python3", "-u", "job.py"];

/// Counts to 40 with the help of another process, into a log in the volume and onto stdout. Halfway it waits for a file
/// `go`, so that it does not end before the test's actions.
const SCRIPT: &str = r#"
import os, subprocess, sys, time
helper = "import sys\nfor line in sys.stdin: print(int(line), flush=True)"
helper = subprocess.Popen([sys.executable, "-c", helper], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
log = open("/store/log", "w")
for i in range(40):
    helper.stdin.write(b"%d\n" % i); helper.stdin.flush()
    number = int(helper.stdout.readline())
    print(number, flush=True)
    log.write(f"{number}\n"); log.flush()
    time.sleep(0.02)
    while i == 20 and not os.path.exists("/store/go"):
        time.sleep(0.02)
"#;

/// Returns a template with the job filled in, which is snapshotted only on a stop.
pub fn template(scheduler: &str) -> String {
    let line = ["template", scheduler, "--interval", "never", "--"];
    let output = Place::new().verb(&[&line[..], &JOB].concat());
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns a machine with the image; prints the reason if there is none.
pub fn machine() -> Option<Machine> {
    static IMAGES: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = IMAGES.get_or_init(make).clone();
    match made.and_then(Machine::with_images) {
        Ok(machine) => Some(machine),
        Err(reason) => {
            skip(&format!("no containers here: {reason}"));
            None
        }
    }
}

fn make() -> Result<PathBuf, String> {
    for program in ["podman", "mmdebstrap"] {
        said(Command::new(program).arg("--version"))?;
    }
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("containers");
    fs::create_dir_all(&kept).unwrap();
    let lock = fs::File::create(kept.join("lock")).unwrap();
    let lock =
        Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno.to_string())?;
    let images = kept.join("images");
    let machine = Machine::to_make_images(images.clone())?;
    if !machine.try_podman(&["info"]).status.success() {
        // Left by another version of podman, or by a checkout that was moved.
        let _ = fs::remove_dir_all(&images);
    }
    make_base(&machine, &kept)?;
    probe(&machine)?;
    let context = tempfile::tempdir().unwrap();
    let file = |name| context.path().join(name);
    fs::copy(program(), file("ckpt-run")).unwrap();
    fs::write(file("Dockerfile"), template("docker")).unwrap();
    fs::write(file("job.py"), SCRIPT).unwrap();
    let context = context.path().to_str().unwrap();
    let line = ["build", "--network", "host", "--tag", IMAGE, context];
    let built = machine.try_podman(&line);
    let text = stderr(&built);
    if !built.status.success() && is_for_want_of_network(&text) {
        return Err(format!("packages cannot be fetched: {text}"));
    }
    assert!(
        built.status.success(),
        "the Dockerfile cannot be built: {text}"
    );
    machine.podman(&["tag", IMAGE, IN_A_REGISTRY]);
    // Left by earlier builds.
    machine.podman(&["image", "prune", "--force"]);
    drop((machine, lock));
    Ok(images)
}

fn make_base(machine: &Machine, kept: &Path) -> Result<(), String> {
    let (name, release) = BASE;
    assert!(template("docker").contains("\nFROM debian:13\n"));
    if machine
        .try_podman(&["image", "exists", name])
        .status
        .success()
    {
        return Ok(());
    }
    let archive = tempfile::Builder::new()
        .suffix(".tar")
        .tempfile_in(kept)
        .unwrap();
    let mut debian = Command::new("mmdebstrap");
    debian
        .args(["--variant=minbase", "--mode=root", "--quiet"])
        .args(["--dpkgopt=force-unsafe-io", release])
        .arg(archive.path());
    said(&mut debian)?;
    machine.podman(&["import", archive.path().to_str().unwrap(), name]);
    Ok(())
}

/// Checks if kernel and file system support containers at all.
fn probe(machine: &Machine) -> Result<(), String> {
    let output = machine.try_podman(&["run", "--rm", "--pull", "never", BASE.0, "true"]);
    let text = stderr(&output).trim().to_owned();
    if output.status.success() {
        Ok(())
    } else {
        Err(text)
    }
}

fn is_for_want_of_network(text: &str) -> bool {
    let signs = [
        "Temporary failure resolving",
        "Unable to fetch",
        "Failed to fetch",
    ];
    signs.iter().any(|sign| text.contains(sign))
}

fn said(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = stderr(&output).trim().to_owned();
    Err(format!("{program}: {text}"))
}
