//! The connection of a sandbox's own network namespace to the machine's network, as the supervisor sees it.
//!
//! ```text
//! supervisor ── keeper (network_keeper.rs) ── pasta
//!     └─ pid 1 of the sandbox: network namespace with loopback, and a tap device that pasta serves
//! ```
//! The keeper exists as long as the sandbox, also if the supervisor is killed. pasta runs outside of the sandbox, as the
//! user, and joins the namespace for its tap device.

use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use nix::unistd::Pid;
use rustix::fd::OwnedFd;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::network_keeper::{KEEPER_ARGUMENT, Report};

/// Folders in which `pasta` is searched for after those of `PATH`.
const FOLDERS: &str = "/usr/local/bin:/usr/bin:/bin";
/// Time limit for the keeper's exit after the sandbox's end. It only kills pasta.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Reasons why a sandbox has no connection to the machine's network.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// pasta is not installed.
    #[error(
        "cannot connect the job's own network: pasta is not installed; install the package passt, or set \
         network.namespace = \"host\" for a new job"
    )]
    Missing,
    /// pasta does not run.
    #[error(
        "cannot connect the job's own network: pasta does not run ({0}); it needs the package passt of 2023-03 \
         or newer, access to /dev/net/tun and a default route; set network.namespace = \"host\" for a new job \
         without it"
    )]
    Failed(String),
    /// The job is not in a user namespace.
    #[error(
        "cannot give the job a network of its own (network.namespace = \"own\") outside of a user namespace, where its \
         connections are restored on the machine's network; set isolation = \"user\", or network.namespace = \"auto\""
    )]
    Shared,
    /// The keeper could not be started.
    #[error("cannot connect the job's own network")]
    Keeper(#[source] io::Error),
}

/// Returns the path of pasta, if it is installed.
#[must_use]
pub fn find_pasta() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(std::env::split_paths(FOLDERS));
    let mut programs = folders
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("pasta"));
    programs.find(|program| {
        nix::unistd::access(program, nix::unistd::AccessFlags::X_OK).is_ok() && program.is_file()
    })
}

/// The running keeper of a sandbox's network.
#[derive(Debug)]
pub(super) struct Connection {
    keeper: Child,
    reports: BufReader<ChildStdout>,
    /// pasta at the last report.
    pasta: Option<OwnedFd>,
}

impl Connection {
    /// Connects the network namespace of a sandbox, and waits until it is usable. `program` is ckpt-run.
    pub fn start(program: &Path, sandbox: Pid) -> Result<Self, NetworkError> {
        let pasta = find_pasta().ok_or(NetworkError::Missing)?;
        let mut keeper = Command::new(program)
            .arg(KEEPER_ARGUMENT)
            .arg(sandbox.to_string())
            .arg(pasta)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(NetworkError::Keeper)?;
        let Some(reports) = keeper.stdout.take() else {
            unreachable!("its output is a pipe");
        };
        let mut connection = Self {
            keeper,
            reports: BufReader::new(reports),
            pasta: None,
        };
        match connection.next() {
            Some(Report::Connected) => Ok(connection),
            Some(Report::Failed(reason)) => {
                let _ = connection.keeper.wait();
                Err(NetworkError::Failed(reason))
            }
            None => {
                let _ = connection.keeper.wait();
                Err(NetworkError::Failed("its keeper has died".to_owned()))
            }
        }
    }

    /// Logs the reports of the keeper on a thread of its own. The receiver is notified when the keeper and pasta have
    /// exited.
    pub fn follow(mut self) -> io::Result<Receiver<()>> {
        let (ended, when_ended) = channel();
        thread::Builder::new()
            .name("network".to_owned())
            .spawn(move || {
                while let Some(report) = self.next() {
                    match report {
                        Report::Connected => tracing::warn!(
                            "the job's network is connected again; its connections to others are closed"
                        ),
                        Report::Failed(reason) => tracing::warn!(
                            "the job's network has lost its connection to the machine's: pasta has ended ({reason}); \
                             ckpt-run starts it again"
                        ),
                    }
                }
                let ended_well = self.keeper.wait().is_ok_and(|status| status.success());
                if !ended_well {
                    tracing::warn!(
                        "the job's network has lost its connection to the machine's until the next restore: the \
                         process that keeps it has died; connections within the job are not affected"
                    );
                    self.kill_pasta();
                }
                drop(ended);
            })?;
        Ok(when_ended)
    }

    /// Reads the next report; `None` when the keeper has exited.
    fn next(&mut self) -> Option<Report> {
        let mut line = String::new();
        let read = self.reports.read_line(&mut line).unwrap_or_default();
        let (report, pasta) = (read > 0).then(|| Report::parse(&line)).flatten()?;
        // The keeper has not reaped it when it reports it.
        self.pasta = pasta
            .and_then(rustix::process::Pid::from_raw)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Some(report)
    }

    fn kill_pasta(&self) {
        if let Some(pasta) = &self.pasta {
            // It may have exited.
            let _ = pidfd_send_signal(pasta, Signal::KILL);
        }
    }
}

/// Waits until the keeper and pasta have exited, so that pasta's ports are free for the next sandbox.
pub(super) fn await_end(ended: &Receiver<()>) {
    let _ = ended.recv_timeout(END_LIMIT);
}
