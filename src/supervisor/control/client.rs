//! Client of the control socket: sends one request and returns the answer.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::server::{Answer, RUN_ENDED, Request, with_short_path};
use crate::store::ImageId;
use crate::supervisor::observers::run_status::Status;

const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// The loop answers between two events, each a matter of milliseconds; a stopped process never does.
const STATUS_LIMIT: Duration = Duration::from_secs(10);

/// Why a supervisor could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No supervisor listens.
    #[error("cannot reach a supervisor at {}: none runs with this store (is --store right?)", .0.display())]
    NoSupervisor(PathBuf),
    /// The connection failed.
    #[error("cannot talk to the supervisor")]
    Talk(#[from] io::Error),
    /// The supervisor does not answer.
    #[error(
        "cannot get an answer from the supervisor within {0:?}: it may be stopped (Ctrl-Z); continue it with `fg` or kill -CONT"
    )]
    Silent(Duration),
    /// The supervisor exited before it answered.
    #[error("cannot wait for the answer: the supervisor ended")]
    Ended,
    /// The supervisor does not understand the request, or its answer is not understood.
    #[error("cannot talk to the supervisor: it is another version of ckpt-run")]
    OtherVersion,
    /// The supervisor could not carry out the request.
    #[error("cannot {action}: {reason}")]
    Refused {
        /// The request.
        action: &'static str,
        /// Its reason.
        reason: String,
    },
    /// The supervisor cannot carry out the request at present.
    #[error("cannot unpause the job: {0}; `ckpt-run unpause --wait` waits for it")]
    NotYet(String),
}

/// Asks the supervisor of `store` for a snapshot and waits until the image is durable.
///
/// # Errors
/// No supervisor runs, or the snapshot failed. The job continues in every case.
pub fn request_snapshot(store: &Path) -> Result<ImageId, ControlError> {
    image(ask(store, &Request::Snapshot)?, "take a snapshot")
}

/// Asks the supervisor of `store` to pause the job: it is snapshotted, stopped, and holds no GPU any more.
///
/// # Errors
/// No supervisor runs, or the snapshot failed. The job continues in every case.
pub fn request_pause(store: &Path) -> Result<ImageId, ControlError> {
    image(ask(store, &Request::Pause)?, "pause the job")
}

/// Asks the supervisor of `store` to end the run once an image of it is durable, and waits until it has ended. The same
/// command line continues from that image.
///
/// # Errors
/// No supervisor runs, or the snapshot failed. The job continues then.
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

/// Asks the supervisor of `store` to continue a paused job.
///
/// # Errors
/// No supervisor runs, or the job is not paused; [`ControlError::NotYet`] while the GPUs have no room for it.
pub fn request_unpause(store: &Path) -> Result<(), ControlError> {
    let action = "unpause the job";
    match ask(store, &Request::Unpause)? {
        Answer::Done => Ok(()),
        Answer::Later(reason) => Err(ControlError::NotYet(reason)),
        Answer::Failed(reason) => Err(ControlError::Refused { action, reason }),
        Answer::Image(_) | Answer::Status(_) => Err(ControlError::OtherVersion),
    }
}

/// Asks the supervisor of `store` for the status of the run.
///
/// # Errors
/// No supervisor runs, or it does not answer: one that the terminal has stopped cannot.
pub fn request_status(store: &Path) -> Result<Status, ControlError> {
    let action = "get the status";
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

/// Sends a request whose answer may take any time, to a supervisor that answers at all. A stopped supervisor gets no
/// request.
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
    let mut connection =
        with_short_path(store, |path| UnixStream::connect(path)).map_err(|error| {
            match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    ControlError::NoSupervisor(store.to_owned())
                }
                _ => ControlError::Talk(error),
            }
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

/// Converts an error of the connection. A supervisor that ends leaves requests unread, and the kernel reports that.
fn talk(error: io::Error) -> ControlError {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ControlError::Ended,
        _ => ControlError::Talk(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::run::environment::socket_path;

    #[test]
    fn a_supervisor_that_ends_with_a_request_unread_has_ended() {
        let store = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(socket_path(store.path())).unwrap();
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
