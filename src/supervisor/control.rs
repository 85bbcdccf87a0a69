//! The control socket in the store: how `ckpt-run snapshot`, `pause`, `unpause`, `stop` and `status` reach the supervisor.
//!
//! One JSON object a line in each direction. Whoever can open the socket (mode
//! 0600 in a folder of mode 0700) may ask.

use std::fs::{self, File};
use std::future;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net as blocking;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::Sender;
use tokio::sync::{oneshot, watch};

use super::event::Event;
use super::pause::StillPaused;
use super::snapshot::Afterwards;
use super::status::Status;
use crate::store::ImageId;

#[cfg(any(fuzzing, test))]
pub(super) mod fuzz;

/// The socket's name in the store.
const SOCKET: &str = "control.sock";
/// Longest request.
const REQUEST_BYTES_MAX: u64 = 4096;
/// Longest answer.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// The loop answers between two events, each a matter of milliseconds; a stopped process never does.
const STATUS_LIMIT: Duration = Duration::from_secs(10);
/// Time for the last answers to be written: a client that reads takes no time.
const ANSWERS_LIMIT: Duration = Duration::from_secs(1);
/// For a client's request to come; a client sends it at once.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Before the next client is taken, when one could not be.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The answer to what came too late.
const RUN_ENDED: &str = "the run has ended";

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Request {
    Snapshot,
    Pause,
    Unpause,
    Stop,
    Status,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Answer {
    Image(ImageId),
    Done,
    Status(Box<Status>),
    /// Not now; the same request may succeed later.
    Later(String),
    Failed(String),
}

/// Why a supervisor could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nobody listens.
    #[error("cannot reach a supervisor at {}: none runs with this store (is --store right?)", .0.display())]
    NoSupervisor(PathBuf),
    /// The connection failed.
    #[error("cannot talk to the supervisor")]
    Talk(#[from] io::Error),
    /// It says nothing.
    #[error(
        "cannot get an answer from the supervisor within {0:?}: it may be stopped (Ctrl-Z; `fg` or kill -CONT lets it go on)"
    )]
    Silent(Duration),
    /// It ended before it answered.
    #[error("cannot wait for the answer: the supervisor ended")]
    Ended,
    /// It does not understand, or its answer is not understood.
    #[error("cannot talk to the supervisor: it is of another version of ckpt-run")]
    OtherVersion,
    /// It could not.
    #[error("cannot {action}: {reason}")]
    Refused {
        /// What was asked for.
        action: &'static str,
        /// Its reason.
        reason: String,
    },
    /// It cannot now.
    #[error("cannot unpause the job: {0}; --wait waits for that")]
    NotYet(String),
}

/// Path of the control socket of a store.
#[must_use]
pub fn socket_path(store: &Path) -> PathBuf {
    store.join(SOCKET)
}

/// Asks the supervisor of `store` for a snapshot and waits until the image is durable.
///
/// # Errors
/// When no supervisor runs, or the snapshot failed; the job goes on in every case.
pub fn request_snapshot(store: &Path) -> Result<ImageId, ControlError> {
    image(ask(store, &Request::Snapshot)?, "take a snapshot")
}

/// Asks the supervisor of `store` to pause the job: it is snapshotted, stopped, and holds no GPU any more.
///
/// # Errors
/// When no supervisor runs, or the snapshot failed; the job goes on in every case.
pub fn request_pause(store: &Path) -> Result<ImageId, ControlError> {
    image(ask(store, &Request::Pause)?, "pause the job")
}

/// Asks the supervisor of `store` to end the run once an image of it is durable, and waits until it has ended. The same
/// line goes on from that image.
///
/// # Errors
/// When no supervisor runs, or the snapshot failed; the job goes on then.
pub fn request_stop(store: &Path) -> Result<ImageId, ControlError> {
    let (answer, mut rest) = ask_long(store, &Request::Stop)?;
    let id = image(answer, "stop the job")?;
    // The supervisor's end, which closes the connection: from then on the store is free.
    match rest.read(&mut [0]) {
        Ok(0) => Ok(id),
        Ok(_) => Err(ControlError::OtherVersion),
        Err(error) => match talk(error) {
            ControlError::Ended => Ok(id),
            error => Err(error),
        },
    }
}

/// Asks the supervisor of `store` to let a paused job go on.
///
/// # Errors
/// When no supervisor runs or the job is not paused; [`ControlError::NotYet`] while the GPUs have no room for it.
pub fn request_unpause(store: &Path) -> Result<(), ControlError> {
    let action = "unpause the job";
    match ask(store, &Request::Unpause)? {
        Answer::Done => Ok(()),
        Answer::Later(reason) => Err(ControlError::NotYet(reason)),
        Answer::Failed(reason) => Err(ControlError::Refused { action, reason }),
        Answer::Image(_) | Answer::Status(_) => Err(ControlError::OtherVersion),
    }
}

/// Asks the supervisor of `store` how the run is.
///
/// # Errors
/// When no supervisor runs, or it does not answer: stopped by the terminal, it cannot.
pub fn request_status(store: &Path) -> Result<Status, ControlError> {
    let action = "tell the status";
    match ask_within(store, &Request::Status, Some(STATUS_LIMIT))?.0 {
        Answer::Status(status) => Ok(*status),
        Answer::Failed(reason) if reason == RUN_ENDED => Err(ControlError::Ended),
        Answer::Failed(reason) => Err(ControlError::Refused { action, reason }),
        Answer::Image(_) | Answer::Done | Answer::Later(_) => Err(ControlError::OtherVersion),
    }
}

fn image(answer: Answer, action: &'static str) -> Result<ImageId, ControlError> {
    match answer {
        Answer::Image(id) => Ok(id),
        Answer::Failed(reason) => Err(ControlError::Refused { action, reason }),
        Answer::Done | Answer::Status(_) | Answer::Later(_) => Err(ControlError::OtherVersion),
    }
}

fn ask(store: &Path, request: &Request) -> Result<Answer, ControlError> {
    ask_long(store, request).map(|(answer, _)| answer)
}

/// For what takes as long as it takes, of a supervisor that answers at all: of one that is stopped nothing is asked.
fn ask_long(store: &Path, request: &Request) -> Result<(Answer, impl Read), ControlError> {
    match ask_within(store, &Request::Status, Some(STATUS_LIMIT)) {
        Err(silent @ ControlError::Silent(_)) => Err(silent),
        Ok(_) | Err(_) => ask_within(store, request, None),
    }
}

/// The answer, and what comes after it.
fn ask_within(
    store: &Path,
    request: &Request,
    limit: Option<Duration>,
) -> Result<(Answer, impl Read), ControlError> {
    let mut connection = with_short_path(store, |path| blocking::UnixStream::connect(path))
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ControlError::NoSupervisor(store.to_owned())
            }
            _ => ControlError::Talk(error),
        })?;
    connection.set_read_timeout(limit)?;
    let mut line = serde_json::to_vec(request).map_err(io::Error::from)?;
    line.push(b'\n');
    connection.write_all(&line).map_err(talk)?;
    let mut answer = String::new();
    let mut connection = BufReader::new(connection.take(ANSWER_BYTES_MAX));
    connection
        .read_line(&mut answer)
        .map_err(|error| match (error.kind(), limit) {
            (io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut, Some(limit)) => {
                ControlError::Silent(limit)
            }
            _ => talk(error),
        })?;
    if answer.is_empty() {
        return Err(ControlError::Ended);
    }
    let answer = serde_json::from_str(&answer).map_err(|_| ControlError::OtherVersion)?;
    Ok((answer, connection))
}

/// A supervisor that ends leaves what it was asked unread, and the kernel says so.
fn talk(error: io::Error) -> ControlError {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ControlError::Ended,
        _ => ControlError::Talk(error),
    }
}

/// Clients that have asked and have no answer yet.
#[derive(Debug)]
pub(super) struct Asking(watch::Receiver<usize>);

impl Asking {
    /// Waits until all have their answers, for a limited time: an event loop that ends takes those with it that the
    /// supervisor has given and nobody has written.
    pub(super) async fn end(&mut self) {
        let none = self.0.wait_for(|clients| *clients == 0);
        // Those that are left find the connection closed.
        let _ = tokio::time::timeout(ANSWERS_LIMIT, none).await;
    }
}

/// Listens on the store's control socket. The caller holds the store's lock, so an old socket is a dead one.
pub(super) fn listen(store: &Path, events: Sender<Event>) -> io::Result<Asking> {
    let listener = with_short_path(store, |path| {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let listener = blocking::UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    })?;
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let (clients, asking) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((connection, _)) => {
                    tokio::spawn(answer(connection, events.clone(), clients.clone()));
                }
                // Out of descriptors, as a rule: somebody gives some back.
                Err(error) => {
                    tracing::debug!(%error, "cannot take a client");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    });
    Ok(Asking(asking))
}

/// Removes the socket at the end of a run.
pub(super) fn remove(store: &Path) {
    // The next supervisor removes one that is left.
    let _ = fs::remove_file(socket_path(store));
}

async fn answer(connection: UnixStream, events: Sender<Event>, clients: watch::Sender<usize>) {
    // A client that went away needs no answer.
    if let Ok(Connection::UntilTheEnd(writer)) = converse(connection, events, &clients).await {
        // Closed when the event loop is dropped, after the supervisor.
        future::pending::<()>().await;
        drop(writer);
    }
}

/// What becomes of a connection whose client has its answer.
#[derive(Debug)]
enum Connection {
    Done,
    /// The client waits for the run's end.
    UntilTheEnd(OwnedWriteHalf),
}

async fn converse(
    connection: UnixStream,
    events: Sender<Event>,
    clients: &watch::Sender<usize>,
) -> io::Result<Connection> {
    let (reader, mut writer) = connection.into_split();
    let mut line = String::new();
    let mut reader = tokio::io::BufReader::new(reader.take(REQUEST_BYTES_MAX));
    tokio::time::timeout(REQUEST_LIMIT, reader.read_line(&mut line)).await??;
    let request = serde_json::from_str(&line);
    let is_stop = matches!(request, Ok(Request::Stop));
    clients.send_modify(|clients| *clients += 1);
    let answer = match request {
        Err(error) => Answer::Failed(format!("understand the request: {error}")),
        Ok(request) => answered(request, &events).await,
    };
    let written = write(&mut writer, &answer).await;
    clients.send_modify(|clients| *clients -= 1);
    written?;
    Ok(match answer {
        Answer::Image(_) if is_stop => Connection::UntilTheEnd(writer),
        Answer::Image(_)
        | Answer::Done
        | Answer::Status(_)
        | Answer::Later(_)
        | Answer::Failed(_) => Connection::Done,
    })
}

async fn write(writer: &mut OwnedWriteHalf, answer: &Answer) -> io::Result<()> {
    let mut text = serde_json::to_vec(answer)?;
    text.push(b'\n');
    writer.write_all(&text).await
}

async fn answered(request: Request, events: &Sender<Event>) -> Answer {
    let afterwards = match request {
        Request::Snapshot => Afterwards::Continue,
        Request::Pause => Afterwards::Pause,
        Request::Stop => Afterwards::Stop,
        Request::Status => {
            let status = asked(events, Event::StatusRequest).await;
            return status.map_or_else(ended, Answer::Status);
        }
        Request::Unpause => {
            return match asked(events, Event::UnpauseRequest).await {
                Some(Ok(())) => Answer::Done,
                Some(Err(StillPaused::NoRoom(reason))) => Answer::Later(reason),
                Some(Err(StillPaused::Failed(reason))) => Answer::Failed(reason),
                None => ended(),
            };
        }
    };
    match asked(events, |reply| Event::SnapshotRequest(afterwards, reply)).await {
        Some(Ok(id)) => Answer::Image(id),
        Some(Err(reason)) => Answer::Failed(reason),
        None => ended(),
    }
}

/// Asks the loop; `None` when the run ends before it answers.
async fn asked<T>(
    events: &Sender<Event>,
    event: impl FnOnce(oneshot::Sender<T>) -> Event,
) -> Option<T> {
    let (reply, replied) = oneshot::channel();
    events.send(event(reply)).await.ok()?;
    replied.await.ok()
}

fn ended() -> Answer {
    Answer::Failed(RUN_ENDED.to_owned())
}

/// Socket paths end at 107 bytes; a store's may be longer, one through `/proc` is not.
fn with_short_path<T>(store: &Path, action: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    let folder = File::open(store)?;
    action(
        &Path::new("/proc/self/fd")
            .join(folder.as_raw_fd().to_string())
            .join(SOCKET),
    )
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_supervisor_that_ends_with_a_request_unread_has_ended() {
        let store = tempfile::tempdir().unwrap();
        let listener = blocking::UnixListener::bind(socket_path(store.path())).unwrap();
        let asked = std::thread::scope(|scope| {
            let asks = scope.spawn(|| request_status(store.path()));
            let (mut connection, _) = listener.accept().unwrap();
            connection.read_exact(&mut [0]).unwrap();
            drop(connection);
            asks.join().unwrap()
        });
        assert!(matches!(asked, Err(ControlError::Ended)), "{asked:?}");
    }
}
