//! Compiles the CRIU plugin (`plugin/`) that the program carries, with the compiler and for the target of the build.
//!
//! It is no crate of its own, for cargo cannot hand a shared library of one package to another. Nothing but `core` is
//! linked, always optimised: what it is built as does not depend on the profile, and it loads into any CRIU.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=plugin");
    match compile() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            println!("cargo::error=cannot compile the CRIU plugin: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn compile() -> Result<(), String> {
    let variable = |name| env::var_os(name).ok_or(format!("{name} is not set (run cargo)"));
    let target = variable("TARGET")?;
    let library = PathBuf::from(variable("OUT_DIR")?).join("ckpt-run-plugin.so");
    let mut rustc = Command::new(variable("RUSTC")?);
    rustc
        .args([
            "--crate-type=cdylib",
            "--crate-name=ckpt_run_plugin",
            "--edition=2024",
        ])
        .arg("--target")
        .arg(&target)
        .args(["-Copt-level=s", "-Cpanic=abort", "-Cstrip=symbols", "-Clto"])
        // For musl, which links statically unless told; on others it changes nothing.
        .arg("-Ctarget-feature=-crt-static")
        // The functions of the C library are CRIU's own; no file of it is needed to link.
        .arg("-Clink-arg=-nostdlib")
        .arg("-o")
        .arg(&library)
        .arg(Path::new("plugin").join("main.rs"));
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
