//! Scripts that a test writes to have them executed.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ckpt_run::criu::{Criu, Search};

/// Writes an executable file by another process: of a file that this one has open to write, a child that another test
/// starts has it open too until it executes its program, and meanwhile nobody can execute the file (`ETXTBSY`).
pub fn write_script(path: &Path, text: &str) {
    let mut install = Command::new("install")
        .args(["-m", "755", "/dev/stdin"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("install starts");
    let mut input = install.stdin.take().expect("its input");
    input.write_all(text.as_bytes()).expect("written");
    drop(input);
    assert!(install.wait().expect("a child").success());
}

/// The `ckpt-run` that is tested.
pub fn program() -> &'static str {
    env!("CARGO_BIN_EXE_ckpt-run")
}

/// Gives a command the changes of the environment that another one has.
pub fn copy_environment(from: &Command, to: &mut Command) {
    for (name, value) in from.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
}

/// The CRIU that `scripts/setup` has built in the checkout.
pub fn criu_prefix() -> Option<PathBuf> {
    let prefix = Path::new(env!("CARGO_MANIFEST_DIR")).join(".criu");
    prefix.exists().then_some(prefix)
}

/// A program in CRIU's place: a shell script in which `CRIU` is the real one, and `HERE` the folder.
pub fn criu_script(folder: &Path, script: &str) -> PathBuf {
    let found = Criu::find(&Search::new(criu_prefix())).expect("a CRIU");
    let quoted = |word: &Path| format!("'{}'", word.to_str().expect("text"));
    let words: Vec<String> = found
        .argv()
        .iter()
        .map(|word| quoted(word.as_ref()))
        .collect();
    let script = script.replace("CRIU", &words.join(" "));
    let script = script.replace("HERE", &quoted(folder));
    let program = folder.join("criu");
    write_script(&program, &format!("#!/bin/sh\n{script}\n"));
    program
}
