//! Compiles the libraries that the program carries, with the compiler and for the target of the build: the CRIU plugin
//! (`plugin/`) and the agent that a job preloads (`agent/`).
//!
//! They are no crates of their own, for cargo cannot hand a shared library of one package to another. Nothing but
//! `core` is linked, always optimised: what they are built as does not depend on the profile, and they load into any
//! process.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Folder of the source, which also says the name of the library.
const LIBRARIES: [&str; 2] = ["plugin", "agent"];

fn main() -> ExitCode {
    for folder in LIBRARIES {
        println!("cargo::rerun-if-changed={folder}");
        if let Err(reason) = compile(folder) {
            println!("cargo::error=cannot compile {folder}: {reason}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn compile(folder: &str) -> Result<(), String> {
    let variable = |name| env::var_os(name).ok_or(format!("{name} is not set (run cargo)"));
    let target = variable("TARGET")?;
    let library = PathBuf::from(variable("OUT_DIR")?).join(format!("ckpt-run-{folder}.so"));
    let mut rustc = Command::new(variable("RUSTC")?);
    rustc
        .args(["--crate-type=cdylib", "--edition=2024"])
        .arg(format!("--crate-name=ckpt_run_{folder}"))
        .arg("--target")
        .arg(&target)
        .args(["-Copt-level=s", "-Cpanic=abort", "-Cstrip=symbols", "-Clto"])
        // For musl, which links statically unless told; on others it changes nothing.
        .arg("-Ctarget-feature=-crt-static")
        // The functions of the C library are those of the process; no file of it is needed to link.
        .arg("-Clink-arg=-nostdlib")
        .arg("-o")
        .arg(&library)
        .arg(Path::new(folder).join("main.rs"));
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
