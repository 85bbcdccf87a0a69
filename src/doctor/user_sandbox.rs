//! The sandbox of an ordinary user, tried where this process may not make one by its privileges.

use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::criu::Criu;
use crate::sandbox::{
    Ended, Hidden, Isolation, Keyring, Network, Sandbox, SandboxError, ToolCommand,
};

/// Limit on `criu check`, which takes well under a second.
const CHECK_LIMIT: Duration = Duration::from_secs(20);
/// Descriptor of CRIU's messages.
const STDERR: i32 = 2;
/// Most bytes of CRIU's messages that are shown.
const SHOWN_BYTES: u64 = 400;

/// A sandbox without a job, which ends with this value.
pub(super) struct UserSandbox(Arc<Sandbox>);

impl UserSandbox {
    /// Starts one, as a run does.
    ///
    /// # Errors
    /// The cause that forbids it.
    pub fn start(network: Network) -> Result<Self, SandboxError> {
        let program = std::env::current_exe().unwrap_or_default();
        let isolation = Isolation::User(network);
        Sandbox::start(&program, isolation, Keyring::Inherited, &[], |_| ()).map(Self)
    }

    /// Asks CRIU in it if the kernel suffices.
    ///
    /// # Errors
    /// CRIU's reason, or why it could not be asked.
    pub fn check(&self, criu: &Criu) -> Result<(), String> {
        let mut said = tempfile::tempfile().map_err(|error| error.to_string())?;
        let mut argv = criu.argv();
        argv.extend(["check".into(), "--unprivileged".into()]);
        let tool = ToolCommand {
            argv,
            environment: Vec::new(),
            first_descriptor: STDERR,
            restores: None,
            hidden: Hidden::NOTHING,
            own_ipc: true,
            clock_offsets: None,
        };
        let run = self.0.run_tool(tool, &[said.as_raw_fd()]);
        let ended = run.and_then(|run| run.wait(CHECK_LIMIT));
        match ended {
            Ok(Ended::Exited(0)) => Ok(()),
            Ok(ended) => {
                let mut text = String::new();
                let read = said.rewind().and_then(|()| {
                    let mut shown = said.take(SHOWN_BYTES);
                    shown.read_to_string(&mut text)
                });
                match read {
                    Ok(bytes) if bytes > 0 => Err(text.trim().replace('\n', "; ")),
                    Ok(_) | Err(_) => Err(format!("criu check ended with {ended}")),
                }
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

impl Drop for UserSandbox {
    fn drop(&mut self) {
        self.0.kill();
    }
}
