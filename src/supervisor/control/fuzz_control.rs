//! Seams for fuzzing: both ends of the control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net as blocking;

use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::channel;

use super::server::{Answer, converse};
use crate::store::ImageId;
use crate::supervisor::decide::event::Event;
use crate::supervisor::inbox::Message;

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().unwrap();
}

/// A client that says this and hangs up its half; whether anything was asked for.
pub(crate) fn client_says(bytes: &[u8]) -> bool {
    RUNTIME.with(|runtime| runtime.block_on(conversation(bytes)))
}

async fn conversation(bytes: &[u8]) -> bool {
    let (mut client, ours) = blocking::UnixStream::pair().unwrap();
    client.write_all(bytes).unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    ours.set_nonblocking(true).unwrap();
    let ours = UnixStream::from_std(ours).unwrap();
    let (sender, mut receiver) = channel(1);
    let supervisor = async {
        match receiver.recv().await {
            Some(Message::Event(Event::SnapshotRequest(_, reply))) => {
                reply.send(Ok(ImageId::new(1).unwrap())).unwrap();
                true
            }
            Some(Message::Event(Event::UnpauseRequest(reply))) => {
                reply.send(Ok(())).unwrap();
                true
            }
            Some(Message::StatusRequest(reply)) => {
                reply.send(Box::default()).unwrap();
                true
            }
            Some(other) => panic!("no client can cause {other:?}"),
            None => false,
        }
    };
    let clients = tokio::sync::watch::Sender::new(0);
    let (result, asked) = tokio::join!(converse(ours, sender, &clients), supervisor);
    if std::str::from_utf8(bytes).is_err() {
        // Whether it is in the first line or behind it.
        return asked;
    }
    result.unwrap();
    let mut answer = String::new();
    BufReader::new(client).read_line(&mut answer).unwrap();
    assert!(answer.ends_with('\n'));
    let is_done = match serde_json::from_str(&answer).unwrap() {
        Answer::Image(_) | Answer::Done | Answer::Status(_) => true,
        Answer::Later(_) | Answer::Failed(_) => false,
    };
    assert_eq!(is_done, asked);
    asked
}

/// Parses an answer of a supervisor.
pub(crate) fn supervisor_says(line: &str) -> bool {
    serde_json::from_str::<Answer>(line).is_ok()
}
