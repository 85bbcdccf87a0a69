//! Sender of the image stream of `criu restore --stream`.
//!
//! CRIU and the processes that it restores request image files by name over one connection. Each file is sent through a
//! separate pipe by a separate thread, which writes memory pages directly into CRIU (`image_pipe`). If CRIU has an action
//! script, the plugin asks for permission in its place before the processes run.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::poll::PollTimeout;

use super::image_pipe::ImagePipe;
use super::message::{read_request, receive_pipe, wait_readable, write_reply};
use super::question::RESTORED_SOCKET;
use crate::plugin::variables::GO_ON;

/// Sockets for a restore that has not started yet.
#[derive(Debug)]
pub struct Serve {
    folder: PathBuf,
    stream: UnixListener,
    restored: UnixListener,
}

impl Serve {
    /// Binds the sockets in `directory`, which becomes CRIU's image folder and the folder of the plugin's questions.
    ///
    /// # Errors
    /// A socket cannot be bound, for example because its path is longer than 107 bytes.
    pub fn bind(directory: &Path) -> io::Result<Self> {
        Ok(Self {
            folder: directory.to_owned(),
            stream: UnixListener::bind(directory.join("streamer-serve.sock"))?,
            restored: UnixListener::bind(directory.join(RESTORED_SOCKET))?,
        })
    }

    /// Serves one restore until CRIU closes the connection or `cancel` becomes readable or is closed.
    ///
    /// `send` sends an image file. If it fails, it closes the pipe, which CRIU treats as a truncated image. With the
    /// action script, `restored` is called when everything is restored and no process runs yet.
    ///
    /// # Errors
    /// The connection to CRIU broke.
    pub fn run(
        self,
        cancel: &impl AsFd,
        exists: impl Fn(&str) -> bool,
        send: impl Fn(&str, ImagePipe<'_>) + Sync,
        restored: impl FnOnce(),
    ) -> io::Result<()> {
        let [called, _] = wait_readable([&self.stream, cancel], PollTimeout::NONE)?;
        if !called {
            return Ok(());
        }
        let (connection, _) = self.stream.accept()?;
        let mut restored = Some(restored);
        std::thread::scope(|scope| {
            loop {
                let [requested, asked, _] =
                    wait_readable([&connection, &self.restored, cancel], PollTimeout::NONE)?;
                if asked && !requested {
                    let (mut script, _) = self.restored.accept()?;
                    if let Some(restored) = restored.take() {
                        restored();
                    }
                    script.write_all(&[GO_ON])?;
                    continue;
                }
                let Some((name, pipe)) = (if requested {
                    next_request(&connection, &exists)?
                } else {
                    None
                }) else {
                    return Ok(());
                };
                let Some(pipe) = pipe else { continue };
                let (folder, send) = (&self.folder, &send);
                std::thread::Builder::new()
                    .name("image".to_owned())
                    .spawn_scoped(scope, move || send(&name, ImagePipe { pipe, folder }))?;
            }
        })
    }
}

/// Answers one request. Returns `None` at the end of the stream, and no pipe for a file that does not exist.
fn next_request(
    connection: &UnixStream,
    exists: &impl Fn(&str) -> bool,
) -> io::Result<Option<(String, Option<File>)>> {
    let Some(name) = read_request(connection)? else {
        return Ok(None);
    };
    let found = exists(&name);
    write_reply(connection, found)?;
    let pipe = if found {
        Some(receive_pipe(connection, &name)?)
    } else {
        None
    };
    Ok(Some((name, pipe)))
}
