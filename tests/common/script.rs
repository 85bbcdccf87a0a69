//! Scripts that a test writes to have them executed.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

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
