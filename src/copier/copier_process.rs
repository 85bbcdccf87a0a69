//! Process of the copier, started and ended by a thread that lives as long as the process.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

use super::ARGUMENT;

/// Variables that must not reach the copier: it has to see all GPUs, and it must not load the agent, because it is not
/// a process of the job.
const WITHOUT: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "CKPT_RUN_AGENT"];

/// Process of the copier. Killed and waited for on drop.
#[derive(Debug)]
pub(super) struct Process {
    pid: u32,
    stop: Option<Sender<()>>,
    keeper: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts `program` with this socket as its standard input.
    ///
    /// A thread stays alive with the process, because the kernel signals the death of the *thread* that started it
    /// (`PR_SET_PDEATHSIG`), and the caller's thread may end at any time.
    pub(super) fn start(program: &Path, socket: OwnedFd) -> io::Result<Self> {
        let mut command = Command::new(program);
        command
            .arg0("ckpt-run")
            .arg(ARGUMENT)
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for the supervisor, which may need the copier for its last snapshot.
            .process_group(0);
        for name in WITHOUT {
            command.env_remove(name);
        }
        let (started, starting) = channel();
        let (stop, stopping) = channel::<()>();
        let keeper = thread::Builder::new()
            .name("copier".to_owned())
            .spawn(move || {
                let child = command.spawn();
                // The command holds a copy of the socket, which would keep the connection open.
                drop(command);
                match child {
                    Ok(child) => {
                        let _ = started.send(Ok(child.id()));
                        let _ = stopping.recv();
                        end(child);
                    }
                    Err(error) => drop(started.send(Err(error))),
                }
            })?;
        let pid = starting
            .recv()
            .unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Self {
            pid,
            stop: Some(stop),
            keeper: Some(keeper),
        })
    }

    /// Returns the pid as the host sees it.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Kills the process; a separate thread waits for it.
    pub(super) fn leave(mut self) {
        drop(self.keeper.take());
    }

    /// Kills the process without waiting.
    pub(super) fn kill(&self) {
        if let Some(stop) = &self.stop {
            let _ = stop.send(());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

/// The pid is not reused until the process was waited for.
fn end(mut child: Child) {
    if let Err(error) = child.kill().and_then(|()| child.wait()) {
        tracing::warn!(%error, "cannot end the copier");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_variable_is_the_one_that_is_removed() {
        assert_eq!(WITHOUT[2], crate::agent::wire::TOKEN_VARIABLE);
    }
}
