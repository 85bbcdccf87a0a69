//! Waits for conditions, exit codes and output of commands.

use std::ffi::OsStr;
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Output};
use std::time::{Duration, Instant};

/// Time limit of any wait; a machine with two busy cores needs some of it.
pub const LIMIT: Duration = Duration::from_secs(180);

/// Time between two checks of a condition.
pub const POLL: Duration = Duration::from_millis(10);

/// Waits until a condition holds; fails with a message after [`LIMIT`].
pub fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    wait_until_or(|| what.to_owned(), holds);
}

/// Does the same as [`wait_until`], with a message about the end of the wait.
pub fn wait_until_or(what: impl Fn() -> String, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LIMIT, "waited too long for {}", what());
        std::thread::sleep(POLL);
    }
}

pub fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Connects to a port of a job. The machine opens a port of a job with a network namespace about a second later.
pub fn connected(port: u16) -> TcpStream {
    let mut connection = None;
    wait_until("a connection to the job", || {
        connection = TcpStream::connect(("127.0.0.1", port)).ok();
        connection.is_some()
    });
    connection.expect("it is connected")
}

/// Returns true if a file in or below the folder contains the text, which is one line.
pub fn holds(folder: &Path, text: &[u8]) -> bool {
    // Unoptimized code of ours would take longer than the rest of a test.
    let mut grep = Command::new("grep");
    let grep = grep
        .args(["-rqF", "-e"])
        .arg(OsStr::from_bytes(text))
        .arg(folder);
    match grep.status().expect("grep").code() {
        Some(0) => true,
        Some(1) => false,
        code => panic!("grep exits with {code:?}"),
    }
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
