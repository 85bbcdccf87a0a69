//! The CRIU plugin that the program carries: how it gets to CRIU and what CRIU's environment tells it.
//!
//! CRIU loads every `*.so` in the folder it is given (`--libdir`); that folder is ours, private, and holds this one
//! file, so that no plugin of the system's ever acts on the job. The plugin itself is in `plugin/`.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::Version;

#[cfg(test)]
#[path = "../../plugin/hooks.rs"]
mod hooks;
#[path = "../../plugin/variables.rs"]
mod variables;

/// Compiled by `build.rs`.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ckpt-run-plugin.so"));
/// CRIU takes what ends in `.so`.
const NAME: &str = "ckpt-run.so";
/// First CRIU that calls `RESTORE_EXT_FILE` with a second argument: 4.2.1 does not, its development branch does.
const RETRY_SINCE: Version = Version {
    major: 4,
    minor: 3,
    patch: 0,
};

/// A variable of a tool's environment.
type Variable = (OsString, OsString);

/// Writes the plugin into the folder, which must be closed to others: CRIU runs what is in it as root.
///
/// # Errors
/// When the file is there already or cannot be written.
pub fn install_plugin(folder: &Path) -> io::Result<()> {
    File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(folder.join(NAME))?
        .write_all(LIBRARY)
}

/// For a dump: the plugin takes character devices with these major numbers, and no other file.
#[must_use]
pub fn plugin_takes(majors: &[u32]) -> Variable {
    let list: Vec<String> = majors.iter().map(ToString::to_string).collect();
    (name(variables::MAJORS), list.join(" ").into())
}

/// For a restore by this CRIU.
#[must_use]
pub fn plugin_restores(criu: Version) -> Option<Variable> {
    (criu >= RETRY_SINCE).then(|| (name(variables::RETRY), "1".into()))
}

fn name(variable: &std::ffi::CStr) -> OsString {
    variable.to_string_lossy().into_owned().into()
}

#[cfg(test)]
mod tests;
