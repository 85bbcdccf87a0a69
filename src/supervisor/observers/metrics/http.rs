//! The HTTP endpoint for Prometheus: GET /metrics, one request per connection.
//!
//! It implements as little of HTTP as a scraper needs and trusts no request: the size of a request, the time of a
//! connection and the number of connections are limited.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Sender;
use tokio::time::{sleep, timeout};

use super::prometheus_text;
use crate::supervisor::event::Event;

/// A scraper's request has some hundred bytes; servers commonly take this much.
const REQUEST_BYTES_MAX: u64 = 8192;
/// Time for a whole exchange, less than a scraper's own (10 s).
const EXCHANGE_LIMIT: Duration = Duration::from_secs(5);
/// Connections at a time: several scrapers, and a person.
const CONNECTIONS_MAX: usize = 16;
/// Pause before the next attempt to accept, when no descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Answers at this address as long as the runtime lives.
pub(crate) fn listen(address: SocketAddr, events: Sender<Event>) -> io::Result<()> {
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    tracing::info!("metrics at http://{address}/metrics");
    tokio::spawn(serve(listener, events));
    Ok(())
}

async fn serve(listener: TcpListener, events: Sender<Event>) {
    let seats = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    while let Ok(seat) = Arc::clone(&seats).acquire_owned().await {
        let Ok((connection, _)) = listener.accept().await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let events = events.clone();
        tokio::spawn(async move {
            // A scraper that is slow or went away asks again.
            let _ = timeout(EXCHANGE_LIMIT, exchange(connection, &events)).await;
            drop(seat);
        });
    }
}

async fn exchange(mut connection: TcpStream, events: &Sender<Event>) -> io::Result<()> {
    let head = read_head(&mut connection).await?;
    let (status, body) = match meaning(&head) {
        Request::Metrics => match super::exporter::status(events).await {
            Some(status) => ("200 OK", prometheus_text::of(&status)),
            None => ("503 Service Unavailable", "the run has ended\n".to_owned()),
        },
        Request::Elsewhere => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        Request::OtherMethod => ("405 Method Not Allowed", "only GET\n".to_owned()),
        Request::Malformed => ("400 Bad Request", "not a request\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).await?;
    connection.write_all(body.as_bytes()).await?;
    connection.shutdown().await
}

/// The request up to its empty line, or as much of it as there is.
async fn read_head(connection: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut limited = connection.take(REQUEST_BYTES_MAX);
    while !is_whole(&head) && limited.read_buf(&mut head).await? > 0 {}
    Ok(head)
}

fn is_whole(head: &[u8]) -> bool {
    head.windows(4).any(|four| four == b"\r\n\r\n") || head.windows(2).any(|two| two == b"\n\n")
}

/// Kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Metrics,
    Elsewhere,
    OtherMethod,
    Malformed,
}

fn meaning(head: &[u8]) -> Request {
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_ascii_whitespace();
    let (method, target, version) = (words.next(), words.next(), words.next());
    let http = version.is_some_and(|version| version.starts_with("HTTP/1."));
    match (method, target) {
        (Some(_), Some(_)) if !http || !is_whole(head) => Request::Malformed,
        (Some("GET"), Some(target)) if target.split('?').next() == Some("/metrics") => {
            Request::Metrics
        }
        (Some("GET"), Some(_)) => Request::Elsewhere,
        (Some(_), Some(_)) => Request::OtherMethod,
        _ => Request::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_a_whole_get_of_the_metrics_is_answered_with_them() {
        for (head, expected) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Request::Metrics),
            ("GET /metrics?x=1 HTTP/1.0\n\n", Request::Metrics),
            ("GET / HTTP/1.1\r\n\r\n", Request::Elsewhere),
            (
                "GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n",
                Request::Elsewhere,
            ),
            ("POST /metrics HTTP/1.1\r\n\r\n", Request::OtherMethod),
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n", Request::Malformed),
            ("GET /metrics\r\n\r\n", Request::Malformed),
            ("\u{16}\u{3}\u{1}", Request::Malformed),
            ("", Request::Malformed),
        ] {
            assert_eq!(meaning(head.as_bytes()), expected, "{head:?}");
        }
    }

    proptest! {
        #[test]
        fn no_request_makes_a_panic(head in prop::collection::vec(any::<u8>(), 0..200)) {
            meaning(&head);
        }
    }
}
