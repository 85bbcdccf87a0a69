//! The action script: keeps CRIU from freezing the tasks, and from releasing them, before we say so.
//!
//! CRIU needs tens of milliseconds before it looks at the tasks. `pre-dump` runs then: there this program waits until
//! the supervisor has the job where it wants it, so that CRIU's start is no part of the freeze.
//!
//! Between the two, when the tasks are frozen and CRIU has not looked at their sockets yet, the plugin asks the same way.
//!
//! CRIU hands memory pages to the image pipes by reference. Were the tasks released while pages still sit unread in a
//! pipe, their later writes would show up in the image. `post-dump` runs after all images are closed and before the
//! tasks are released: there this program waits until the supervisor has read every pipe to its end and says so.
//!
//! At a restore `post-restore` runs when everything is restored and before the tasks run: there this program waits
//! until the supervisor lets packets through to the restored connections.
//!
//! A non-zero exit aborts the dump and the tasks go on, or aborts the restore.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

use crate::plugin::variables::GO_ON;

/// Name under which the binary acts as the action script; CRIU gives a script no arguments.
pub const HOLD_PROGRAM: &str = "ckpt-run-hold";
/// Environment variable that names the folder of the sockets on which the supervisor is asked.
pub const HOLD_FOLDER_VARIABLE: &str = "CKPT_RUN_HOLD_FOLDER";
/// Socket for the question whether the tasks may be frozen.
pub(super) const BEGIN_SOCKET: &str = "begin.sock";
/// Socket for the plugin's question whether CRIU may look at the tasks, which are frozen.
pub(super) const FROZEN_SOCKET: &str = "frozen.sock";
/// Socket for the question whether the tasks may be released.
pub(super) const HOLD_SOCKET: &str = "hold.sock";
/// Socket for the question whether the restored tasks may run.
pub(super) const RESTORED_SOCKET: &str = "restored.sock";

/// Runs the action script: asks the supervisor at `pre-dump`, `post-dump` and `post-restore`, does nothing at other
/// times.
///
/// The wait has no limit of its own: it ends with the supervisor's word or its death.
#[must_use]
pub fn main() -> ExitCode {
    let action = std::env::var("CRTOOLS_SCRIPT_ACTION").unwrap_or_default();
    let socket = match action.as_str() {
        "pre-dump" => BEGIN_SOCKET,
        "post-dump" => HOLD_SOCKET,
        "post-restore" => RESTORED_SOCKET,
        _ => return ExitCode::SUCCESS,
    };
    let folder = std::env::var_os(HOLD_FOLDER_VARIABLE).unwrap_or_default();
    match ask(&Path::new(&folder).join(socket)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) | Err(_) => ExitCode::FAILURE,
    }
}

fn ask(path: &Path) -> std::io::Result<bool> {
    let mut supervisor = UnixStream::connect(path)?;
    // The connection is the question: the supervisor may have answered and hung up already.
    let mut word = [0; 1];
    supervisor.read_exact(&mut word)?;
    Ok(word[0] == GO_ON)
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
                    script.write_all(&[GO_ON]).unwrap();
                });
                assert!(ask(&path).unwrap());
            });
        }
    }
}
