//! The action script of a dump: keeps CRIU from releasing the tasks.
//!
//! CRIU hands memory pages to the image pipes by reference. Were the tasks
//! released while pages still sit unread in a pipe, their later writes would
//! show up in the image. `post-dump` runs after all images are closed and
//! before the tasks are released: there this program waits until the
//! supervisor has read every pipe to its end and says so. A non-zero exit
//! aborts the dump and the tasks go on.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

/// Name under which the binary acts as the action script; CRIU gives a script no arguments.
pub const HOLD_PROGRAM: &str = "ckpt-run-hold";
/// Environment variable that names the socket on which the supervisor is asked.
pub const HOLD_SOCKET_VARIABLE: &str = "CKPT_RUN_HOLD_SOCKET";
/// The supervisor's word that the tasks may be released.
pub(super) const RELEASE: u8 = b'r';

/// Runs the action script: asks the supervisor at `post-dump`, does nothing at other times.
///
/// The wait has no limit of its own: it ends with the supervisor's word or its death.
#[must_use]
pub fn main() -> ExitCode {
    if std::env::var("CRTOOLS_SCRIPT_ACTION").as_deref() != Ok("post-dump") {
        return ExitCode::SUCCESS;
    }
    let path = std::env::var_os(HOLD_SOCKET_VARIABLE).unwrap_or_default();
    match ask(Path::new(&path)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) | Err(_) => ExitCode::FAILURE,
    }
}

fn ask(path: &Path) -> std::io::Result<bool> {
    let mut supervisor = UnixStream::connect(path)?;
    // The connection is the question: the supervisor may have answered and hung up already.
    let mut word = [0; 1];
    supervisor.read_exact(&mut word)?;
    Ok(word[0] == RELEASE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_word_is_heard_though_the_supervisor_hangs_up_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hold");
        let listener = UnixListener::bind(&path).unwrap();
        // Either side may be the faster one.
        for _ in 0..200 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut script, _) = listener.accept().unwrap();
                    script.write_all(&[RELEASE]).unwrap();
                });
                assert!(ask(&path).unwrap());
            });
        }
    }
}
