//! Receiver of the image stream of `criu dump --stream`.
//!
//! ```text
//! pre-dump        ──▶ waits for `run()` ──▶ freezes the tasks
//! plugin          ──▶ `stopped()` ──▶ CRIU inspects the tasks
//! CRIU            request(name), pipe ──▶ one thread per image file, reads to EOF
//! post-dump       ──▶ all requests received, all threads done ──▶ `frozen()` ──▶ release
//! CRIU            closes the stream ──▶ done
//! ```

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::{Scope, ScopedJoinHandle};

use nix::poll::PollTimeout;

use super::message::{read_request, receive_pipe, wait_readable};
use super::question::{BEGIN_SOCKET, FROZEN_SOCKET, HOLD_SOCKET};
use crate::plugin::variables::GO_ON;
use crate::sync::ThreadsError;

/// Limit on the image files of one dump. A process has about 15, so this is enough for some thousand processes.
const FILES_MAX: usize = 65_536;

/// Reasons why an image stream could not be received.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError<E> {
    /// The connection to CRIU broke.
    #[error("cannot receive CRIU's image stream")]
    Stream(#[source] io::Error),
    /// The caller cancelled the dump.
    #[error("cannot receive CRIU's image stream: cancelled")]
    Cancelled,
    /// CRIU ended its stream before the image was complete, or dumped without ckpt-run's plugin.
    #[error("cannot receive CRIU's image stream: it ended before the image was complete")]
    Incomplete,
    /// The dump exceeds the limit on files.
    #[error("cannot receive CRIU's image stream: more than {FILES_MAX} files")]
    TooMany,
    /// A file has no thread that reads it.
    #[error(transparent)]
    Threads(#[from] ThreadsError),
    /// The receiver of an image file failed.
    #[error(transparent)]
    Receiver(E),
}

/// The received image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Captured {
    /// Number of image files.
    pub files: usize,
    /// Total size in bytes.
    pub bytes: u64,
}

/// Sockets for a dump that has not started yet.
#[derive(Debug)]
pub struct Capture {
    stream: UnixListener,
    begin: UnixListener,
    stopped: UnixListener,
    hold: UnixListener,
}

impl Capture {
    /// Binds the sockets in `directory`, which becomes CRIU's image folder and the folder of the plugin's questions.
    /// CRIU may be started after that. It does not touch the tasks until [`run`](Self::run) is called, and exits if
    /// this value is dropped.
    ///
    /// # Errors
    /// A socket cannot be bound, for example because its path is longer than 107 bytes.
    pub fn bind(directory: &Path) -> io::Result<Self> {
        Ok(Self {
            stream: UnixListener::bind(directory.join("streamer-capture.sock"))?,
            begin: UnixListener::bind(directory.join(BEGIN_SOCKET))?,
            stopped: UnixListener::bind(directory.join(FROZEN_SOCKET))?,
            hold: UnixListener::bind(directory.join(HOLD_SOCKET))?,
        })
    }

    /// Returns true if CRIU has finished its start and requests the tasks within a time.
    ///
    /// # Errors
    /// The socket cannot be polled.
    pub fn is_asked(&self, within: PollTimeout) -> io::Result<bool> {
        let [asked] = wait_readable([&self.begin], within)?;
        Ok(asked)
    }

    /// Receives one dump.
    ///
    /// `receive` is called for each image file on a separate thread and must read it to its end. `stopped` is called
    /// once, when the tasks are frozen and CRIU has not inspected their sockets yet. `frozen` is called once, when
    /// every file has been read and the tasks are still frozen. An error of either makes CRIU abort and release the
    /// tasks. When `cancel` becomes readable or is closed, the connection is closed, and CRIU releases the tasks.
    ///
    /// # Errors
    /// The first error of `receive`, `stopped` or `frozen`, or the stream's own. The tasks continue in every case.
    pub fn run<E: Send>(
        self,
        cancel: &impl AsFd,
        receive: impl Fn(&str, File) -> Result<u64, E> + Sync,
        stopped: impl FnOnce() -> Result<(), E>,
        frozen: impl FnOnce(Captured) -> Result<(), E>,
    ) -> Result<Captured, CaptureError<E>> {
        let connection = accept(&self.stream, cancel)?;
        let mut script = accept(&self.begin, cancel)?;
        script.write_all(&[GO_ON]).map_err(CaptureError::Stream)?;
        std::thread::scope(|scope| {
            let mut reception = Reception {
                scope,
                connection: &connection,
                receive: &receive,
                running: Vec::new(),
                done: Captured::default(),
            };
            reception.run((&self.stopped, stopped), (&self.hold, frozen), cancel)
        })
    }
}

fn accept<E>(listener: &UnixListener, cancel: &impl AsFd) -> Result<UnixStream, CaptureError<E>> {
    let [called, _] =
        wait_readable([listener, cancel], PollTimeout::NONE).map_err(CaptureError::Stream)?;
    if !called {
        return Err(CaptureError::Cancelled);
    }
    let (connection, _) = listener.accept().map_err(CaptureError::Stream)?;
    Ok(connection)
}

struct Reception<'scope, 'env, E, R> {
    scope: &'scope Scope<'scope, 'env>,
    connection: &'env UnixStream,
    receive: &'env R,
    running: Vec<ScopedJoinHandle<'scope, Result<u64, E>>>,
    done: Captured,
}

impl<'env, E: Send + 'env, R: Fn(&str, File) -> Result<u64, E> + Sync> Reception<'_, 'env, E, R> {
    fn run(
        &mut self,
        (asked, stopped): (&UnixListener, impl FnOnce() -> Result<(), E>),
        (hold, frozen): (&UnixListener, impl FnOnce(Captured) -> Result<(), E>),
        cancel: &impl AsFd,
    ) -> Result<Captured, CaptureError<E>> {
        let mut stopped = Some(stopped);
        let mut frozen = Some(frozen);
        loop {
            let [requested, plugin, held, cancelled] =
                wait_readable([self.connection, asked, hold, cancel], PollTimeout::NONE)
                    .map_err(CaptureError::Stream)?;
            // CRIU requests the last file before it runs the action script, so requests are handled first. Cancellation
            // is handled last: it may coincide with CRIU's regular end, and then the dump is complete.
            if requested {
                if self.take_request()? {
                    continue;
                }
                self.join()?;
                return if frozen.is_none() {
                    Ok(self.done)
                } else {
                    Err(CaptureError::Incomplete)
                };
            }
            if plugin {
                let (mut plugin, _) = asked.accept().map_err(CaptureError::Stream)?;
                if let Some(stopped) = stopped.take() {
                    stopped().map_err(CaptureError::Receiver)?;
                }
                plugin.write_all(&[GO_ON]).map_err(CaptureError::Stream)?;
                continue;
            }
            if held {
                let (mut script, _) = hold.accept().map_err(CaptureError::Stream)?;
                self.join()?;
                if stopped.is_some() {
                    return Err(CaptureError::Incomplete);
                }
                if let Some(frozen) = frozen.take() {
                    frozen(self.done).map_err(CaptureError::Receiver)?;
                }
                script.write_all(&[GO_ON]).map_err(CaptureError::Stream)?;
                continue;
            }
            if cancelled {
                return Err(CaptureError::Cancelled);
            }
        }
    }

    /// Receives one request. Returns false at the end of the stream.
    fn take_request(&mut self) -> Result<bool, CaptureError<E>> {
        let Some(name) = read_request(self.connection).map_err(CaptureError::Stream)? else {
            return Ok(false);
        };
        if self.done.files + self.running.len() >= FILES_MAX {
            return Err(CaptureError::TooMany);
        }
        let pipe = receive_pipe(self.connection, &name).map_err(CaptureError::Stream)?;
        let receive = self.receive;
        let reader = std::thread::Builder::new()
            .name("image".to_owned())
            .spawn_scoped(self.scope, move || receive(&name, pipe))
            .map_err(ThreadsError::from)?;
        self.running.push(reader);
        Ok(true)
    }

    /// Waits until all started files are received.
    fn join(&mut self) -> Result<(), CaptureError<E>> {
        for reader in self.running.drain(..) {
            let bytes = match reader.join() {
                Ok(result) => result.map_err(CaptureError::Receiver)?,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            self.done.files += 1;
            self.done.bytes += bytes;
        }
        Ok(())
    }
}

impl<E, R> Drop for Reception<'_, '_, E, R> {
    /// Makes CRIU give up, unless it has ended: then readers reach the end of their pipes. CRIU would wait for
    /// readers of pipes that are still in the stream.
    fn drop(&mut self) {
        let _ = self.connection.shutdown(std::net::Shutdown::Both);
        while let Ok(Some(name)) = read_request(self.connection) {
            drop(receive_pipe(self.connection, &name));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read};
    use std::net::Shutdown;
    use std::os::fd::{AsRawFd, OwnedFd};

    use nix::poll::{PollFd, PollFlags, poll};
    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
    use prost::Message;

    use super::super::message::FileRequest;
    use super::*;

    /// Runs a dump without files that ends, by CRIU or by cancellation, while the tasks are frozen.
    fn dump(end: impl FnOnce(UnixStream, UnixStream)) -> Result<Captured, CaptureError<()>> {
        let folder = tempfile::tempdir().unwrap();
        let capture = Capture::bind(folder.path()).unwrap();
        let criu = UnixStream::connect(folder.path().join("streamer-capture.sock")).unwrap();
        let _begin = UnixStream::connect(folder.path().join(BEGIN_SOCKET)).unwrap();
        let _plugin = UnixStream::connect(folder.path().join(FROZEN_SOCKET)).unwrap();
        let _script = UnixStream::connect(folder.path().join(HOLD_SOCKET)).unwrap();
        let (call_off, called_off) = UnixStream::pair().unwrap();
        let frozen = |_| {
            end(criu, call_off);
            Ok(())
        };
        capture.run(&called_off, |_, _| Ok(0), || Ok(()), frozen)
    }

    #[test]
    fn an_end_before_the_start_cancels_and_ends_the_script() {
        let folder = tempfile::tempdir().unwrap();
        let capture = Capture::bind(folder.path()).unwrap();
        let _criu = UnixStream::connect(folder.path().join("streamer-capture.sock")).unwrap();
        let (call_off, called_off) = UnixStream::pair().unwrap();
        drop(call_off);
        let result = capture.run::<()>(&called_off, |_, _| Ok(0), || Ok(()), |_| Ok(()));
        assert!(matches!(result, Err(CaptureError::Cancelled)), "{result:?}");

        let folder = tempfile::tempdir().unwrap();
        let capture = Capture::bind(folder.path()).unwrap();
        assert!(!capture.is_asked(PollTimeout::ZERO).unwrap());
        let mut script = UnixStream::connect(folder.path().join(BEGIN_SOCKET)).unwrap();
        assert!(capture.is_asked(PollTimeout::ZERO).unwrap());
        drop(capture);
        assert_eq!(
            script.read(&mut [0]).unwrap_or(0),
            0,
            "no answer to continue"
        );
    }

    fn request(mut criu: &UnixStream, name: &str, pipe: Option<OwnedFd>) {
        let filename = name.to_owned();
        let body = FileRequest { filename }.encode_to_vec();
        let length = u32::try_from(body.len()).unwrap().to_le_bytes();
        criu.write_all(&[&length, body.as_slice()].concat())
            .unwrap();
        let number = pipe.as_ref().map(|pipe| [pipe.as_raw_fd()]);
        let rights = number.as_ref().map(|pipe| ControlMessage::ScmRights(pipe));
        let (dummy, flags) = ([IoSlice::new(&[0])], MsgFlags::empty());
        sendmsg::<()>(criu.as_raw_fd(), &dummy, rights.as_slice(), flags, None).unwrap();
        drop(pipe);
    }

    #[test]
    fn pipes_in_the_stream_are_closed_after_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let capture = Capture::bind(folder.path()).unwrap();
        let criu = UnixStream::connect(folder.path().join("streamer-capture.sock")).unwrap();
        let _begin = UnixStream::connect(folder.path().join(BEGIN_SOCKET)).unwrap();
        let [(read, written), (unread, refused)] = [(); 2].map(|()| nix::unistd::pipe().unwrap());
        request(&criu, "read", Some(read));
        request(&criu, "without a pipe", None);
        request(&criu, "unread", Some(unread));
        let (_call_off, called_off) = UnixStream::pair().unwrap();
        let receive = |_: &str, mut pipe: File| {
            io::copy(&mut pipe, &mut io::sink()).unwrap();
            Ok(0)
        };
        let result = std::thread::scope(|scope| {
            let run =
                scope.spawn(|| capture.run::<()>(&called_off, receive, || Ok(()), |_| Ok(())));
            let mut without_reader = [PollFd::new(refused.as_fd(), PollFlags::empty())];
            let found = poll(&mut without_reader, PollTimeout::from(20_000_u16));
            drop(written);
            assert_eq!(found, Ok(1), "CRIU would wait for a reader");
            run.join().unwrap()
        });
        assert!(matches!(result, Err(CaptureError::Stream(_))), "{result:?}");
    }

    #[test]
    fn a_cancellation_at_the_regular_end_has_no_effect() {
        let end = |criu: UnixStream, _call_off: UnixStream| {
            // Shut down for all copies: a child of another test may have one for a moment.
            criu.shutdown(Shutdown::Both).unwrap();
        };
        let captured = dump(end).unwrap();
        assert_eq!(captured, Captured::default());
    }

    #[test]
    fn a_cancellation_before_the_end_is_reported() {
        let mut kept = None;
        let result = dump(|criu, _call_off| kept = Some(criu));
        assert!(matches!(result, Err(CaptureError::Cancelled)), "{result:?}");
    }
}
