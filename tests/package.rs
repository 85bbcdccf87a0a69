//! Test of the package that `cargo package` creates: it must contain everything that the build needs.
//!
//! The library and the programs include files by macros, and `build.rs` compiles three folders of `src`; cargo knows of
//! neither. Therefore the test compiles the package itself.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use nix::fcntl::{Flock, FlockArg};

/// Name of the archive without its ending, and of the only folder in it.
const PACKAGE: &str = concat!(env!("CARGO_PKG_NAME"), "-", env!("CARGO_PKG_VERSION"));

#[test]
fn the_package_compiles_by_itself() {
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // Cargo searches the folders above a package for its workspace, but not beyond `target/package`.
    let folder = scratch.join("target/package");
    fs::create_dir_all(&folder).expect("a folder for the package");
    // The folder is the same in each run: with a new one, cargo would keep the results of all runs.
    let lock = File::create(scratch.join("package.lock")).expect("a lock file");
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).expect("the lock");

    let pack = ["package", "--no-verify", "--allow-dirty", "--offline"];
    let mut package = Command::new(env!("CARGO"));
    package
        .args(pack)
        .arg("--target-dir")
        .arg(scratch.join("target"))
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    run(&mut package);

    let unpacked = folder.join(PACKAGE);
    if unpacked.exists() {
        fs::remove_dir_all(&unpacked).expect("the last run's folder is removable");
    }
    // Archived files have a fixed, old time, by which cargo would miss changes.
    let mut unpack = Command::new("tar");
    unpack
        .args(["--extract", "--touch", "--gzip", "--file"])
        .arg(folder.join(format!("{PACKAGE}.crate")))
        .arg("--directory")
        .arg(&folder);
    run(&mut unpack);

    // The workspace's target folder has the dependencies, as clippy left them. With the examples, the package selects the
    // same features of them as clippy does, because examples may use development dependencies.
    let target = scratch.parent().expect("cargo's target folder");
    let mut check = Command::new(env!("CARGO"));
    check
        .args(["check", "--frozen", "--lib", "--bins", "--examples"])
        .env("CARGO_TARGET_DIR", target)
        .current_dir(&unpacked);
    run(&mut check);
}

#[track_caller]
fn run(command: &mut Command) {
    let output = command.output().expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
}
