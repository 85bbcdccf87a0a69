//! The HTTP endpoint for Prometheus: GET /metrics, one request per connection.
//!
//! It implements as little of HTTP as a scraper needs and trusts no request: the size of a request, the time of a
//! connection and the number of connections are limited, and one more connection ends the oldest, so that slow clients keep
//! nobody out. Where only this machine may ask, the request has to name this machine: a page in a browser here could
//! otherwise read the figures under a name that its server points to 127.0.0.1.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::Sender;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::prometheus_text;
use crate::supervisor::inbox::{Message, ask_status};

/// A scraper's request has some hundred bytes; servers commonly take this much.
const REQUEST_BYTES_MAX: u64 = 8192;
/// Time for a whole exchange, less than a scraper's own (10 s).
const EXCHANGE_LIMIT: Duration = Duration::from_secs(5);
/// Connections at a time: several scrapers, and a person.
const CONNECTIONS_MAX: usize = 16;
/// Pause before the next attempt to accept, when no descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Names that a request may give the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hosts {
    /// Addresses, `localhost` and this machine's name.
    ThisMachine,
    /// Any: everybody may ask.
    Any,
}

/// Answers at this address as long as the runtime lives.
pub(crate) fn listen(address: SocketAddr, hosts: Hosts, inbox: Sender<Message>) -> io::Result<()> {
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    tracing::info!("metrics at http://{address}/metrics");
    tokio::spawn(serve(listener, hosts, inbox));
    Ok(())
}

async fn serve(listener: TcpListener, hosts: Hosts, inbox: Sender<Message>) {
    let mut exchanges: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let Ok((connection, _)) = listener.accept().await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        exchanges.retain(|exchange| !exchange.is_finished());
        if exchanges.len() == CONNECTIONS_MAX
            && let Some(oldest) = exchanges.pop_front()
        {
            oldest.abort();
        }
        let inbox = inbox.clone();
        let exchange = tokio::spawn(async move {
            // A scraper that is slow or went away asks again.
            let _ = timeout(EXCHANGE_LIMIT, exchange(connection, hosts, &inbox)).await;
        });
        exchanges.push_back(exchange.abort_handle());
    }
}

async fn exchange(
    mut connection: TcpStream,
    hosts: Hosts,
    inbox: &Sender<Message>,
) -> io::Result<()> {
    let head = read_head(&mut connection).await?;
    let (status, body) = match meaning(&head, hosts) {
        Request::Metrics => match ask_status(inbox).await {
            Some(status) => ("200 OK", prometheus_text::of(&status)),
            None => ("503 Service Unavailable", "the run has ended\n".to_owned()),
        },
        Request::Elsewhere => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        Request::OtherMethod => ("405 Method Not Allowed", "only GET\n".to_owned()),
        Request::OtherHost => (
            "403 Forbidden",
            "the request names another host: use localhost or an address, or set metrics.allow_remote\n".to_owned(),
        ),
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Metrics,
    Elsewhere,
    OtherMethod,
    OtherHost,
    Malformed,
}

fn meaning(head: &[u8], hosts: Hosts) -> Request {
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_ascii_whitespace();
    let (method, target, version) = (words.next(), words.next(), words.next());
    let http = version.is_some_and(|version| version.starts_with("HTTP/1."));
    match (method, target) {
        (Some(_), Some(_)) if !http || !is_whole(head) => Request::Malformed,
        (Some(_), Some(_)) if hosts == Hosts::ThisMachine && !names_this_machine(head) => {
            Request::OtherHost
        }
        (Some("GET"), Some(target)) if target.split('?').next() == Some("/metrics") => {
            Request::Metrics
        }
        (Some("GET"), Some(_)) => Request::Elsewhere,
        (Some(_), Some(_)) => Request::OtherMethod,
        _ => Request::Malformed,
    }
}

/// Returns true if no `Host` of a request is another machine's. A request without any comes from no browser.
fn names_this_machine(head: &[u8]) -> bool {
    let head = String::from_utf8_lossy(head);
    let fields = head.lines().skip(1).filter_map(|line| line.split_once(':'));
    let mut hosts = fields.filter(|(name, _)| name.trim().eq_ignore_ascii_case("host"));
    hosts.all(|(_, value)| is_this_machine(value.trim()))
}

fn is_this_machine(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']'))
        .unwrap_or(name);
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let ours = nix::unistd::gethostname().ok();
    let ours = ours.and_then(|name| name.into_string().ok());
    address.parse::<IpAddr>().is_ok()
        || name == "localhost"
        || name.ends_with(".localhost")
        || ours.is_some_and(|ours| name == ours.to_ascii_lowercase())
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
            assert_eq!(meaning(head.as_bytes(), Hosts::Any), expected, "{head:?}");
        }
    }

    #[test]
    fn a_page_under_another_name_reads_nothing() {
        let asked = |host: &str| {
            let head = format!("GET /metrics HTTP/1.1\r\nhost: {host}\r\n\r\n");
            meaning(head.as_bytes(), Hosts::ThisMachine)
        };
        let ours = nix::unistd::gethostname().unwrap().into_string().unwrap();
        for host in [
            "localhost",
            "LocalHost:9464",
            "127.0.0.1:9464",
            "[::1]:9464",
            &ours,
        ] {
            assert_eq!(asked(host), Request::Metrics, "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9464",
            "127.0.0.1.evil.example",
            "",
            "a, localhost",
        ] {
            assert_eq!(asked(host), Request::OtherHost, "{host}");
        }
        let two = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n";
        assert_eq!(
            meaning(two.as_bytes(), Hosts::ThisMachine),
            Request::OtherHost
        );
        let none = "GET /metrics HTTP/1.0\r\n\r\n";
        assert_eq!(
            meaning(none.as_bytes(), Hosts::ThisMachine),
            Request::Metrics
        );
    }

    proptest! {
        #[test]
        fn no_request_makes_a_panic(head in prop::collection::vec(any::<u8>(), 0..200)) {
            meaning(&head, Hosts::ThisMachine);
        }
    }
}
