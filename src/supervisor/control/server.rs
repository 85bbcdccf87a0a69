//! Server of the control socket, by which `ckpt-run snapshot`, `pause`, `unpause`, `stop` and `status` reach the supervisor.
//!
//! Each direction carries one JSON object per line. Every process that can open the socket (mode 0600 in a folder of mode
//! 0700) may send requests.

use std::fs::{self, File};
use std::future;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net as blocking;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::Sender;
use tokio::sync::watch;

use crate::run::environment::{SOCKET, socket_path};
use crate::snapshot::paused::StillPaused;
use crate::snapshot::take_snapshot::Afterwards;
use crate::store::ImageId;
use crate::supervisor::decide::event::Event;
use crate::supervisor::inbox::{Message, ask, ask_status};
use crate::supervisor::observers::run_status::Status;

const REQUEST_BYTES_MAX: u64 = 4096;
/// Time for the last answers to be written: a client that reads takes no time.
const ANSWERS_LIMIT: Duration = Duration::from_secs(1);
/// Limit on the arrival of a request; a client sends it at once.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Pause before the next client is accepted, after a failure to accept one.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// The answer to what came too late.
pub(super) const RUN_ENDED: &str = "the run has ended";

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Request {
    Snapshot,
    Pause,
    Unpause,
    Stop,
    Status,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Answer {
    Image(ImageId),
    Done,
    Status(Box<Status>),
    /// The request cannot be carried out now; the same request may succeed later.
    Later(String),
    Failed(String),
}

/// Clients that have asked and have no answer yet.
#[derive(Debug)]
pub(crate) struct Asking(watch::Receiver<usize>);

impl Asking {
    /// Waits until all have their answers, for a limited time: an event loop that ends takes those with it that the
    /// supervisor has given and nobody has written.
    pub(crate) async fn end(&mut self) {
        let none = self.0.wait_for(|clients| *clients == 0);
        // Those that are left find the connection closed.
        let _ = tokio::time::timeout(ANSWERS_LIMIT, none).await;
    }
}

/// Listens on the store's control socket. The caller holds the store's lock, so an old socket is a dead one.
pub(crate) fn listen(store: &Path, inbox: Sender<Message>) -> io::Result<Asking> {
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
                    tokio::spawn(answer(connection, inbox.clone(), clients.clone()));
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
pub(crate) fn remove(store: &Path) {
    // The next supervisor removes one that is left.
    let _ = fs::remove_file(socket_path(store));
}

async fn answer(connection: UnixStream, inbox: Sender<Message>, clients: watch::Sender<usize>) {
    // A client that went away needs no answer.
    if let Ok(Some(writer)) = converse(connection, inbox, &clients).await {
        // Closed when the event loop is dropped, after the supervisor.
        future::pending::<()>().await;
        drop(writer);
    }
}

/// Answers a client's request. Returns the connection if the client waits for the run's end.
pub(super) async fn converse(
    connection: UnixStream,
    inbox: Sender<Message>,
    clients: &watch::Sender<usize>,
) -> io::Result<Option<OwnedWriteHalf>> {
    let (reader, mut writer) = connection.into_split();
    let mut line = String::new();
    let mut reader = tokio::io::BufReader::new(reader.take(REQUEST_BYTES_MAX));
    tokio::time::timeout(REQUEST_LIMIT, reader.read_line(&mut line)).await??;
    let request = serde_json::from_str(&line);
    let is_stop = matches!(request, Ok(Request::Stop));
    clients.send_modify(|clients| *clients += 1);
    let answer = match request {
        Err(error) => Answer::Failed(format!("the request is not valid: {error}")),
        Ok(request) => answered(request, &inbox).await,
    };
    let written = write(&mut writer, &answer).await;
    clients.send_modify(|clients| *clients -= 1);
    written?;
    let stops = is_stop && matches!(answer, Answer::Image(_));
    Ok(stops.then_some(writer))
}

async fn write(writer: &mut OwnedWriteHalf, answer: &Answer) -> io::Result<()> {
    let mut text = serde_json::to_vec(answer)?;
    text.push(b'\n');
    writer.write_all(&text).await
}

async fn answered(request: Request, inbox: &Sender<Message>) -> Answer {
    let afterwards = match request {
        Request::Snapshot => Afterwards::Continue,
        Request::Pause => Afterwards::Pause,
        Request::Stop => Afterwards::Stop,
        Request::Status => {
            return ask_status(inbox).await.map_or_else(ended, Answer::Status);
        }
        Request::Unpause => {
            return match ask(inbox, |reply| Message::Event(Event::UnpauseRequest(reply))).await {
                Some(Ok(())) => Answer::Done,
                Some(Err(StillPaused::NoRoom(reason))) => Answer::Later(reason),
                Some(Err(StillPaused::Failed(reason))) => Answer::Failed(reason),
                None => ended(),
            };
        }
    };
    match ask(inbox, |reply| {
        Message::Event(Event::SnapshotRequest(afterwards, reply))
    })
    .await
    {
        Some(Ok(id)) => Answer::Image(id),
        Some(Err(reason)) => Answer::Failed(reason),
        None => ended(),
    }
}

fn ended() -> Answer {
    Answer::Failed(RUN_ENDED.to_owned())
}

/// Socket paths end at 107 bytes; a store's may be longer, one through `/proc` is not.
pub(super) fn with_short_path<T>(
    store: &Path,
    action: impl FnOnce(&Path) -> io::Result<T>,
) -> io::Result<T> {
    let folder = File::open(store)?;
    action(
        &Path::new("/proc/self/fd")
            .join(folder.as_raw_fd().to_string())
            .join(SOCKET),
    )
}
