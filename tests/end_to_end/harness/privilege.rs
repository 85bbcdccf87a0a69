//! What tests need of the machine.

use std::process::Command;

/// Whether the end-to-end tests can run here; says aloud why not.
pub fn can_run() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: end-to-end tests need root");
    }
    root
}

/// Whether a program is installed; says aloud when it is not.
pub fn installed(program: &str) -> bool {
    let found = Command::new("sh")
        .args([
            "-c",
            &format!("PATH=$PATH:/usr/sbin:/sbin; command -v {program}"),
        ])
        .output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("SKIPPED: no {program} here");
    }
    found
}
