//! Metadata service of a cloud on loopback, with the answers that the clouds document.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use jiff::fmt::strtime;
use jiff::{SignedDuration, Timestamp};

use crate::harness::wait_until_or;

/// Service that is imitated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Service {
    Aws,
    Gcp,
    Azure,
}

impl Service {
    /// Returns the value of `preemption.watch`, and the cloud in status and log.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::Gcp => "gcp",
            Self::Azure => "azure",
        }
    }

    /// Returns the name in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Aws => "AWS",
            Self::Gcp => "Google Cloud",
            Self::Azure => "Azure",
        }
    }
}

/// Present content of the service.
#[derive(Default)]
struct Content {
    /// Earliest end of the machine, once it is announced.
    deadline: Option<Timestamp>,
    /// True while all answers are garbage.
    is_garbage: bool,
    /// Number of the valid token of AWS; each request for one makes another.
    token: u32,
    /// First lines of the requests.
    requests: Vec<String>,
}

/// Server of the service, until the end of the tests.
pub(super) struct MetadataServer {
    service: Service,
    address: String,
    content: Arc<Mutex<Content>>,
}

impl MetadataServer {
    pub(super) fn start(service: Service) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let content = Arc::new(Mutex::new(Content::default()));
        let shared = Arc::clone(&content);
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (connection, shared) = (connection.unwrap(), Arc::clone(&shared));
                thread::spawn(move || serve(service, &connection, &shared));
            }
        });
        Self {
            service,
            address,
            content,
        }
    }

    /// Makes a run ask this server as `preemption.watch` (`watch`) says. A proxy of the environment must not be used.
    pub(super) fn is_asked_by(&self, command: &mut Command, watch: &str) {
        command
            .env("CKPT_RUN_PREEMPTION_WATCH", watch)
            .env("CKPT_RUN_PREEMPTION_ENDPOINT", &self.address)
            .env("http_proxy", "http://127.0.0.1:9")
            .env_remove("no_proxy");
    }

    /// Announces the end of the machine in two minutes, as AWS does. Google does not name the time.
    pub(super) fn announce(&self) {
        let deadline = Timestamp::now() + SignedDuration::from_secs(120);
        self.content().deadline = Some(deadline);
    }

    pub(super) fn answer_garbage(&self, is_garbage: bool) {
        self.content().is_garbage = is_garbage;
    }

    /// Makes the token of AWS invalid.
    pub(super) fn expire_token(&self) {
        self.content().token += 1;
    }

    /// Returns the first lines of the requests so far.
    pub(super) fn requests(&self) -> Vec<String> {
        self.content().requests.clone()
    }

    /// Waits until the notice was asked for so many times more.
    pub(super) fn wait_for_questions(&self, count: usize) {
        let asked = || {
            let requests = self.requests();
            let questions = requests.iter().filter(|line| is_question(line));
            questions.count()
        };
        let before = asked();
        wait_until_or(
            || format!("questions to {:?}: {:?}", self.service, self.requests()),
            || asked() >= before + count,
        );
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap()
    }
}

/// Returns true if a request asks for a notice.
fn is_question(line: &str) -> bool {
    ["/instance-action", "/preempted", "/scheduledevents?"]
        .iter()
        .any(|part| line.contains(part))
}

fn serve(service: Service, connection: &TcpStream, content: &Mutex<Content>) {
    while let Some(request) = read(connection) {
        let (fields, body) = {
            let mut content = content.lock().unwrap();
            let line = request.lines().next().unwrap().to_owned();
            content.requests.push(line);
            answer(service, &request, &mut content)
        };
        let date = http_time(Timestamp::now());
        let length = body.len();
        let head = format!("HTTP/1.1 {fields}\r\nDate: {date}\r\nContent-Length: {length}\r\n\r\n");
        let sent = (&mut &*connection).write_all(format!("{head}{body}").as_bytes());
        if sent.is_err() {
            return; // the run has ended
        }
    }
}

/// Reads a request without a body, in lower case; `None` at the end of the connection.
fn read(connection: &TcpStream) -> Option<String> {
    let mut reader = BufReader::new(connection).take(8192);
    let mut request = String::new();
    while !request.ends_with("\r\n\r\n") {
        let read = reader.read_line(&mut request).ok();
        read.filter(|length| *length > 0)?;
    }
    Some(request.to_lowercase())
}

/// Returns the status with further fields, and the body.
fn answer(service: Service, request: &str, content: &mut Content) -> (String, String) {
    let has = |field: &str| request.contains(&format!("\r\n{field}\r\n"));
    let status = |status: &str| (status.to_owned(), String::new());
    let found = |body: String| ("200 OK".to_owned(), body);
    if content.is_garbage {
        return found("<html>Please log in</html>".to_owned());
    }
    let deadline = content.deadline;
    match (service, request.split(' ').nth(1).unwrap()) {
        (Service::Aws, "/latest/api/token") => {
            assert!(
                request.starts_with("put ") && has("x-aws-ec2-metadata-token-ttl-seconds: 21600")
            );
            content.token += 1;
            found(format!("token-{}", content.token))
        }
        (Service::Aws, "/latest/meta-data/spot/instance-action") => {
            if !has(&format!(
                "x-aws-ec2-metadata-token: token-{}",
                content.token
            )) {
                return status("401 Unauthorized");
            }
            deadline.map_or(status("404 Not Found"), |time| {
                let time = time.strftime("%Y-%m-%dT%H:%M:%SZ");
                found(format!(r#"{{"action": "terminate", "time": "{time}"}}"#))
            })
        }
        (Service::Gcp, "/computemetadata/v1/instance/preempted") => {
            if !has("metadata-flavor: google") {
                return status("403 Forbidden");
            }
            let preempted = if deadline.is_some() { "TRUE" } else { "FALSE" };
            (
                "200 OK\r\nMetadata-Flavor: Google".to_owned(),
                preempted.to_owned(),
            )
        }
        (Service::Azure, _) if !has("metadata: true") => status("400 Bad Request"),
        (Service::Azure, path) if path.starts_with("/metadata/instance/compute/name?") => {
            found("FrontEnd_IN_0".to_owned())
        }
        (Service::Azure, path) if path.starts_with("/metadata/scheduledevents?") => {
            let events = deadline.map_or_else(String::new, |time| event(&http_time(time)));
            found(format!(
                r#"{{"DocumentIncarnation": 1, "Events": [{events}]}}"#
            ))
        }
        _ => status("404 Not Found"),
    }
}

/// Returns an event of Azure.
fn event(not_before: &str) -> String {
    format!(
        r#"{{"EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123", "EventStatus": "Scheduled", "EventType": "Preempt",
        "ResourceType": "VirtualMachine", "Resources": ["FrontEnd_IN_0"], "NotBefore": "{not_before}",
        "Description": "", "EventSource": "Platform", "DurationInSeconds": -1}}"#
    )
}

/// Returns a time as HTTP writes it.
fn http_time(time: Timestamp) -> String {
    strtime::format("%a, %d %b %Y %H:%M:%S GMT", time).unwrap()
}
