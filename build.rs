//! Compiles the libraries that the program carries, with the compiler and for the target of the build: the CRIU plugin
//! (`src/plugin`), and the agent and the witness that a job preloads (`src/agent`, `src/witness`).
//!
//! Cargo does not build them, because it cannot hand a shared library of one package to another. The packages in
//! `packages/` exist only for rustfmt, clippy, rustdoc and rust-analyzer. The libraries link nothing but `core` and are
//! always optimised: they do not depend on the profile and load into any process.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Folders in `src`, which are also the names of the libraries.
const LIBRARIES: [&str; 3] = ["plugin", "agent", "witness"];

fn main() -> ExitCode {
    for name in LIBRARIES {
        println!("cargo::rerun-if-changed=src/{name}");
        if let Err(reason) = compile(name) {
            println!("cargo::error=cannot compile src/{name}: {reason}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn compile(name: &str) -> Result<(), String> {
    let variable = |key| env::var_os(key).ok_or(format!("{key} is not set (run cargo)"));
    let target = variable("TARGET")?;
    let library = PathBuf::from(variable("OUT_DIR")?).join(format!("ckpt-run-{name}.so"));
    let mut rustc = Command::new(variable("RUSTC")?);
    rustc
        .args(["--crate-type=cdylib", "--edition=2024"])
        .arg(format!("--crate-name=ckpt_run_{name}"))
        .arg("--target")
        .arg(&target)
        .args(["-Copt-level=s", "-Cpanic=abort", "-Cstrip=symbols", "-Clto"])
        // For musl, which links statically unless told; on others it changes nothing.
        .arg("-Ctarget-feature=-crt-static")
        // The functions of the C library are those of the process; no file of it is needed to link.
        .arg("-Clink-arg=-nostdlib")
        .arg("-o")
        .arg(&library)
        .arg(Path::new("src").join(name).join("lib.rs"));
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        rustc.arg("-C").arg({
            let mut option = std::ffi::OsString::from("linker=");
            option.push(linker);
            option
        });
    }
    let output = rustc
        .output()
        .map_err(|error| format!("{rustc:?}: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(said.lines().take(20).collect::<Vec<_>>().join(" | "));
    }
    Ok(())
}
