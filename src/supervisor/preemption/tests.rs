//! Answers of the clouds, as they document them, from a server on loopback.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use jiff::Timestamp;

use super::announcement::{Action, Announcement, Cloud};
use super::clouds::Asked;
use super::metadata_service::{AskError, MetadataService};
use super::notice_watch::notice;

/// Date of all answers.
const DATE: &str = "Mon, 18 Sep 2017 08:20:30 GMT";
/// Beginning of the requests, in lower case, and their answers: status line and fields, and body.
type Script = Vec<(&'static str, &'static str, &'static str)>;

const TOKEN: (&str, &str, &str) = ("put /latest/api/token", "200 OK", "AQAEAHZ1cG9uLXRva2Vu==");
const NO_ACTION: (&str, &str, &str) = (
    "get /latest/meta-data/spot/instance-action",
    "404 Not Found",
    "<?xml version=\"1.0\"?><html>404 - Not Found</html>",
);
const ACTION: (&str, &str, &str) = (
    "get /latest/meta-data/spot/instance-action",
    "200 OK",
    r#"{"action": "terminate", "time": "2017-09-18T08:22:00Z"}"#,
);
const NAME: (&str, &str, &str) = ("get /metadata/instance/compute/name", "200 OK", "WestNO_0");

/// Server that answers requests by a script, one after the other, and repeats the last answer.
struct Server {
    address: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&requests);
        thread::spawn(move || {
            let mut next = 0;
            for connection in listener.incoming() {
                while let Some(request) = read(connection.as_ref().unwrap()) {
                    let (begin, fields, body) = script[next.min(script.len() - 1)];
                    next += 1;
                    assert!(request.starts_with(begin), "{request} instead of {begin}");
                    log.lock().unwrap().push(request);
                    let length = body.len();
                    let answer = format!(
                        "HTTP/1.1 {fields}\r\nDate: {DATE}\r\nContent-Length: {length}\r\n\r\n{body}"
                    );
                    connection
                        .as_ref()
                        .unwrap()
                        .write_all(answer.as_bytes())
                        .unwrap();
                }
            }
        });
        Self { address, requests }
    }

    fn service(&self) -> MetadataService {
        MetadataService::new(Some(&self.address.parse().unwrap())).unwrap()
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

/// Reads a request without a body, in lower case; `None` at the end of the connection.
fn read(connection: &TcpStream) -> Option<String> {
    let mut reader = BufReader::new(connection).take(8192);
    let mut request = String::new();
    while !request.ends_with("\r\n\r\n") {
        reader
            .read_line(&mut request)
            .ok()
            .filter(|length| *length > 0)?;
    }
    Some(request.to_lowercase())
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().unwrap();
    let limit = Duration::from_secs(60);
    let limited = async { tokio::time::timeout(limit, future).await };
    runtime.block_on(limited).expect("an end")
}

type Found = Result<Option<(Announcement, Duration)>, AskError>;

/// Returns the results of a number of questions, one after the other.
fn ask(cloud: Cloud, times: usize, script: Script) -> (Vec<Found>, Vec<String>) {
    let server = Server::start(script);
    let service = server.service();
    let mut asked = Asked::new(cloud);
    let found = run(async {
        let mut found = Vec::new();
        for _ in 0..times {
            found.push(asked.ask(&service).await);
        }
        found
    });
    (found, server.requests())
}

/// Returns the only result of one question.
fn answer(cloud: Cloud, script: Script) -> Found {
    ask(cloud, 1, script).0.pop().unwrap()
}

fn announced(cloud: Cloud, action: Action, deadline: &str) -> Announcement {
    let deadline: Timestamp = deadline.parse().unwrap();
    Announcement {
        cloud,
        action,
        deadline,
    }
}

#[test]
fn aws_announces_an_action_by_its_own_clock() {
    let (found, requests) = ask(Cloud::Aws, 2, vec![TOKEN, NO_ACTION, ACTION]);
    assert!(matches!(found[0], Ok(None)), "{:?}", found[0]);
    let expected = announced(Cloud::Aws, Action::Terminate, "2017-09-18T08:22:00Z");
    let (notice, left) = found[1].as_ref().unwrap().unwrap();
    assert_eq!((notice, left), (expected, Duration::from_secs(90)));
    assert!(requests[0].contains("\r\nx-aws-ec2-metadata-token-ttl-seconds: 21600\r\n"));
    let token = "\r\nx-aws-ec2-metadata-token: aqaeahz1cg9ulxrva2vu==\r\n";
    assert!(requests[1].contains(token) && requests[2].contains(token));
    assert_eq!(requests.len(), 3, "the token is used again");
}

#[test]
fn an_expired_token_of_aws_is_replaced() {
    let expired = (ACTION.0, "401 Unauthorized", "");
    let new = (TOKEN.0, TOKEN.1, "new");
    let script = vec![TOKEN, NO_ACTION, expired, new, ACTION];
    let (found, requests) = ask(Cloud::Aws, 2, script);
    assert!(matches!(found[1], Ok(Some(_))), "{:?}", found[1]);
    assert!(requests[4].contains("\r\nx-aws-ec2-metadata-token: new\r\n"));
}

#[test]
fn a_new_token_that_aws_refuses_is_an_error() {
    let refused = (ACTION.0, "401 Unauthorized", "");
    let found = answer(Cloud::Aws, vec![TOKEN, refused]);
    assert!(matches!(found, Err(AskError::NotUnderstood { .. })));
    let disabled = (TOKEN.0, "403 Forbidden", "");
    let found = answer(Cloud::Aws, vec![disabled]);
    assert!(matches!(found, Err(AskError::NotUnderstood { .. })));
}

#[test]
fn an_unknown_action_of_aws_is_a_notice() {
    let new = r#"{"action": "teleport", "time": "2017-09-18T08:22:00Z"}"#;
    let found = answer(Cloud::Aws, vec![TOKEN, (ACTION.0, "200 OK", new)]);
    assert_eq!(found.unwrap().unwrap().0.action, Action::Other);
}

#[test]
fn google_gives_thirty_seconds() {
    let path = "get /computemetadata/v1/instance/preempted";
    let fields = "200 OK\r\nMetadata-Flavor: Google";
    let script = vec![(path, fields, "FALSE"), (path, fields, "TRUE\n")];
    let (found, requests) = ask(Cloud::Gcp, 2, script);
    assert!(matches!(found[0], Ok(None)), "{:?}", found[0]);
    let expected = announced(Cloud::Gcp, Action::Preempt, "2017-09-18T08:21:00Z");
    let (notice, left) = found[1].as_ref().unwrap().unwrap();
    assert_eq!((notice, left), (expected, Duration::from_secs(30)));
    assert!(requests[0].contains("\r\nmetadata-flavor: google\r\n"));
}

#[test]
fn an_answer_without_googles_flavor_is_not_from_google() {
    let path = "get /computemetadata/v1/instance/preempted";
    let error = answer(Cloud::Gcp, vec![(path, "200 OK", "TRUE")]).unwrap_err();
    assert!(error.to_string().contains("not from Google"), "{error}");
}

/// List of events as Azure documents it, with these values.
macro_rules! events {
    ($kind:literal, $resource:literal, $not_before:literal) => {
        (
            "get /metadata/scheduledevents?api-version=2020-07-01",
            "200 OK",
            concat!(
                r#"{"DocumentIncarnation": 2, "Events": [{"EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123", "EventType": ""#,
                $kind,
                r#"", "ResourceType": "VirtualMachine", "Resources": ["WestNO_1", ""#,
                $resource,
                r#""], "EventStatus": "Scheduled", "NotBefore": ""#,
                $not_before,
                r#"", "Description": "", "EventSource": "Platform", "DurationInSeconds": -1}]}"#
            ),
        )
    };
}

#[test]
fn azure_announces_events_of_this_machine() {
    let none = (
        "get /metadata/scheduledevents",
        "200 OK",
        r#"{"DocumentIncarnation": 1, "Events": []}"#,
    );
    let script = vec![
        NAME,
        none,
        events!("Freeze", "WestNO_0", "Mon, 18 Sep 2017 08:21:10 GMT"),
        events!("Preempt", "WestNO_2", "Mon, 18 Sep 2017 08:21:10 GMT"),
        events!("Preempt", "westno_0", "Mon, 18 Sep 2017 08:21:10 GMT"),
        events!("Terminate", "WestNO_0", ""),
    ];
    let (found, requests) = ask(Cloud::Azure, 5, script);
    for none in &found[..3] {
        assert!(matches!(none, Ok(None)), "{none:?}");
    }
    let expected = announced(Cloud::Azure, Action::Preempt, "2017-09-18T08:21:10Z");
    let (notice, left) = found[3].as_ref().unwrap().unwrap();
    assert_eq!((notice, left), (expected, Duration::from_secs(40)));
    let (notice, left) = found[4].as_ref().unwrap().unwrap();
    assert_eq!(
        (notice.action, left),
        (Action::Terminate, Duration::ZERO),
        "it has begun"
    );
    assert!(
        requests
            .iter()
            .all(|request| request.contains("\r\nmetadata: true\r\n"))
    );
}

#[test]
fn all_events_are_ours_if_azure_does_not_name_the_machine() {
    let unnamed = (NAME.0, "404 Not Found", "");
    let event = events!("Preempt", "WestNO_2", "Mon, 18 Sep 2017 08:21:10 GMT");
    let found = answer(Cloud::Azure, vec![unnamed, event]);
    assert!(matches!(found, Ok(Some(_))), "{found:?}");
}

#[test]
fn garbage_is_no_notice() {
    let long: &str = "x".repeat(100_000).leak();
    for body in [
        "",
        "null",
        "{}",
        "<html>",
        r#"{"action": 1, "time": "soon"}"#,
        long,
    ] {
        let scripts = [
            (Cloud::Aws, vec![TOKEN, (ACTION.0, "200 OK", body)]),
            (
                Cloud::Gcp,
                vec![("get ", "200 OK\r\nMetadata-Flavor: Google", body)],
            ),
            (Cloud::Azure, vec![NAME, ("get /metadata/", "200 OK", body)]),
        ];
        for (cloud, script) in scripts {
            let found = answer(cloud, script);
            assert!(
                matches!(found, Err(AskError::NotUnderstood { .. })),
                "{found:?}"
            );
        }
    }
    let moved = ("get ", "302 Found\r\nLocation: http://127.0.0.1:9/", "");
    let found = answer(Cloud::Gcp, vec![moved]);
    assert!(
        matches!(found, Err(AskError::NotUnderstood { .. })),
        "{found:?}"
    );
}

#[test]
fn no_message_contains_a_token() {
    let token = (TOKEN.0, TOKEN.1, "secret\u{7f}token");
    let error = answer(Cloud::Aws, vec![token]).unwrap_err();
    assert!(!error.to_string().contains("secret"), "{error}");
}

#[test]
fn auto_finds_the_cloud_that_answers() {
    let not_aws = (TOKEN.0, "404 Not Found", "");
    let not_google = ("get /computemetadata/", "404 Not Found", "");
    let event = events!("Preempt", "WestNO_0", "Mon, 18 Sep 2017 08:21:00 GMT");
    let server = Server::start(vec![not_aws, not_google, NAME, event]);
    let service = server.service();
    let (notice, _) = run(notice(&service, &Cloud::ALL));
    assert_eq!(notice.cloud, Cloud::Azure);
}
