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
use std::sync::Arc;

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
    /// `send` sends an image file, or is told why there is no pipe or thread for it. CRIU treats a closed pipe as the end of
    /// the file. With the action script, `restored` is called when everything is restored and no process runs yet.
    ///
    /// # Errors
    /// The connection to CRIU broke.
    pub fn run(
        self,
        cancel: &impl AsFd,
        exists: impl Fn(&str) -> bool,
        send: impl Fn(&str, Result<&ImagePipe<'_>, io::Error>) + Sync,
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
                let (folder, send) = (&self.folder, &send);
                let pipe = match pipe {
                    Ok(Some(pipe)) => Arc::new(ImagePipe { pipe, folder }),
                    Ok(None) => continue,
                    Err(error) => {
                        send(&name, Err(error));
                        continue;
                    }
                };
                let (its_name, its_pipe) = (name.clone(), Arc::clone(&pipe));
                let started = std::thread::Builder::new()
                    .name("image".to_owned())
                    .spawn_scoped(scope, move || send(&its_name, Ok(&its_pipe)));
                if let Err(error) = started {
                    send(&name, Err(error));
                }
            }
        })
    }
}

/// Answers one request. Returns `None` at the end of the stream; otherwise the file's name, and its pipe if it exists.
fn next_request(
    connection: &UnixStream,
    exists: &impl Fn(&str) -> bool,
) -> io::Result<Option<(String, io::Result<Option<File>>)>> {
    let Some(name) = read_request(connection)? else {
        return Ok(None);
    };
    let found = exists(&name);
    write_reply(connection, found)?;
    let pipe = found.then(|| receive_pipe(connection, &name));
    let pipe = pipe.transpose();
    Ok(Some((name, pipe)))
}
