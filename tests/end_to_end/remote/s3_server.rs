//! S3 server on loopback, and a gate in front of it that makes it unreachable, at any time or at a request.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::harness::{skip, wait_until, wait_until_or};

/// Name of the bucket; S3 requires at least three characters.
const BUCKET: &str = "bucket";
/// Variable with the path of s3s-fs, which then serves in place of moto (`tests/s3s-fs/run`).
const OTHER_SERVER: &str = "TEST_S3S_FS";
/// Beginning of the address in the server's messages.
const LISTENING: &str = "http://127.0.0.1:";
/// Credentials.
const KEY: &str = "x";
const SECRET: &str = "y";
/// Beginnings of requests.
const METHODS: [&[u8]; 5] = [b"GET /", b"PUT /", b"POST /", b"HEAD /", b"DELETE /"];

/// Server with one bucket, killed on drop.
pub(super) struct S3Server {
    child: Child,
    gate: Gate,
    /// Address of a run's folder.
    url: String,
    _folder: TempDir,
}

impl S3Server {
    /// Starts the server. Returns `None` if it is not installed; then the test counts as skipped.
    pub(super) fn start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut command = server(folder.path())?;
        let log = File::create(folder.path().join("log")).unwrap();
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let mut child = command.spawn().unwrap();
        let said = || std::fs::read_to_string(folder.path().join("log")).unwrap();
        let mut port = None;
        wait_until_or(
            || format!("the S3 server: {}", said()),
            || {
                assert!(child.try_wait().unwrap().is_none(), "{}", said());
                port = port_of(&said());
                port.is_some()
            },
        );
        let port = port.unwrap();
        if std::env::var_os(OTHER_SERVER).is_none() {
            create_bucket(port);
        }
        Some(Self {
            gate: Gate::before(port),
            child,
            url: format!("s3://{BUCKET}/runs/one"),
            _folder: folder,
        })
    }

    /// Returns the address of a run's folder.
    pub(super) fn url(&self) -> String {
        self.url.clone()
    }

    /// Makes a command use this server.
    pub(super) fn is_used_by(&self, command: &mut Command) {
        self.is_reached_by(command);
        command
            .env("AWS_ACCESS_KEY_ID", KEY)
            .env("AWS_SECRET_ACCESS_KEY", SECRET)
            .env("AWS_REGION", "us-east-1");
    }

    /// Makes a command use this server with the credentials and the region of a profile in this file.
    pub(super) fn is_used_with(&self, command: &mut Command, file: &Path, profile: &str) {
        self.is_reached_by(command);
        // Another `aws` may be first in PATH, of the version 1.
        let path = std::env::var("PATH").unwrap();
        command
            .env("PATH", format!("/usr/bin:{path}"))
            .env("AWS_CONFIG_FILE", file)
            .env("AWS_PROFILE", profile);
    }

    fn is_reached_by(&self, command: &mut Command) {
        command.env("AWS_ENDPOINT_URL", format!("{LISTENING}{}", self.gate.port));
    }

    /// Stops or continues the server's process; a stopped one accepts connections and does not answer.
    pub(super) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
    }

    /// Returns the way to the server.
    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the command of a server that keeps its data in memory or in this folder; `None` if none is installed. The
/// server also ends if the tests are killed.
fn server(folder: &Path) -> Option<Command> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if let Some(program) = std::env::var_os(OTHER_SERVER) {
        let root = folder.join("root");
        std::fs::create_dir_all(root.join(BUCKET)).unwrap();
        command.arg(program).args(["--host", "127.0.0.1"]);
        command.args(["--port", "0", "--access-key", KEY, "--secret-key", SECRET]);
        // It writes its port then.
        command.arg(root).env("RUST_LOG", "info");
    } else {
        command
            .arg(installed()?)
            .args(["-H", "127.0.0.1", "-p", "0"]);
    }
    Some(command)
}

/// Returns the program of moto, which `scripts/setup-tests` installs.
fn installed() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = root.join("target/tools/moto/bin/moto_server");
    if !program.exists() {
        skip("no S3 server here (scripts/setup-tests installs moto)");
        return None;
    }
    Some(program)
}

fn port_of(messages: &str) -> Option<u16> {
    let (_, rest) = messages.split_once(LISTENING)?;
    let (port, _) = rest.split_once(|c: char| !c.is_ascii_digit())?;
    port.parse().ok()
}

fn create_bucket(port: u16) {
    let request = format!(
        "PUT /{BUCKET} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    let answer = || -> io::Result<String> {
        let mut connection = TcpStream::connect(("127.0.0.1", port))?;
        connection.write_all(request.as_bytes())?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer)?;
        Ok(answer)
    };
    wait_until("a bucket", || {
        answer().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 "))
    });
}

/// TCP relay to the server, which can cut it off.
pub(super) struct Gate {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Connections are closed at once, as by a machine without the server.
    is_closed: AtomicBool,
    /// Requests that write packs end their connections.
    refuses_packs: AtomicBool,
    /// Number of requests that read packs.
    pack_reads: AtomicUsize,
    /// Keys by which requests were signed.
    keys: Mutex<BTreeSet<String>>,
    /// Packs in the order of the requests that wrote them.
    pack_writes: Mutex<Vec<String>>,
    connections: Mutex<Vec<TcpStream>>,
    cut: Mutex<Cut>,
    mended: Condvar,
}

/// End of the way to the server at a request. Connections stay open, and nothing passes.
#[derive(Default)]
struct Cut {
    /// Number of requests until then.
    left: Option<usize>,
    /// The last request still reaches the server. Its answer does not come back.
    last_passes: bool,
    is_reached: bool,
}

/// Treatment of bytes at the gate.
#[derive(PartialEq, Eq)]
enum Passage {
    Free,
    /// The bytes begin the last request before the cut, all of which passes.
    Last,
    Ended,
}

impl Gate {
    fn before(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        // It ends with the process of the tests.
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // A server that was killed refuses.
                let _ = own.connect(client, server);
            }
        });
        Self { port, shared }
    }

    /// Makes the server unreachable, and ends the connections to it.
    pub(super) fn close(&self) {
        self.end_connections(true);
    }

    fn end_connections(&self, closes: bool) {
        let mut connections = self.shared.connections.lock().unwrap();
        self.shared.is_closed.store(closes, Ordering::SeqCst);
        for connection in connections.drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// Makes all uploads of packs fail. Everything else works.
    pub(super) fn refuse_packs(&self) {
        self.shared.refuses_packs.store(true, Ordering::SeqCst);
    }

    /// Returns the number of requests that have read packs, or parts of them.
    pub(super) fn pack_reads(&self) -> usize {
        self.shared.pack_reads.load(Ordering::SeqCst)
    }

    /// Ends the way to the server at a request, counted from 1.
    pub(super) fn cut_at(&self, request: usize, last_passes: bool) {
        let mut cut = self.shared.cut.lock().unwrap();
        (cut.left, cut.last_passes) = (Some(request), last_passes);
    }

    pub(super) fn is_cut(&self) -> bool {
        self.shared.cut.lock().unwrap().is_reached
    }

    /// Ends all connections, also those that were held at the cut. New ones pass.
    pub(super) fn mend(&self) {
        self.end_connections(false);
        *self.shared.cut.lock().unwrap() = Cut::default();
        self.shared.mended.notify_all();
    }

    /// Returns the keys by which requests were signed.
    pub(super) fn keys(&self) -> Vec<String> {
        self.shared.keys.lock().unwrap().iter().cloned().collect()
    }

    /// Returns the packs in the order of the requests that wrote them.
    pub(super) fn pack_writes(&self) -> Vec<String> {
        self.shared.pack_writes.lock().unwrap().clone()
    }

    /// Makes the server reachable again, for everything.
    pub(super) fn open(&self) {
        self.shared.refuses_packs.store(false, Ordering::SeqCst);
        self.shared.is_closed.store(false, Ordering::SeqCst);
    }
}

impl Shared {
    fn connect(self: &Arc<Self>, client: TcpStream, server: u16) -> io::Result<()> {
        // Locked, so that no connection is made after `close`.
        let mut connections = self.connections.lock().unwrap();
        if self.is_closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let server = TcpStream::connect(("127.0.0.1", server))?;
        connections.extend([client.try_clone()?, server.try_clone()?]);
        let (requests, to_server) = (client.try_clone()?, server.try_clone()?);
        let shared = Arc::clone(self);
        thread::spawn(move || {
            let _ = shared.relay(requests, &to_server);
            let _ = to_server.shutdown(Shutdown::Both);
        });
        let shared = Arc::clone(self);
        thread::spawn(move || {
            let _ = shared.relay_answers(server, &client);
            let _ = client.shutdown(Shutdown::Both);
        });
        Ok(())
    }

    fn relay_answers(&self, mut answers: TcpStream, mut client: &TcpStream) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let len = answers.read(&mut buffer)?;
            if len == 0 || self.passage(false) == Passage::Ended {
                return Ok(());
            }
            client.write_all(&buffer[..len])?;
        }
    }

    /// Waits at a cut.
    fn passage(&self, begins_request: bool) -> Passage {
        let mut cut = self.cut.lock().unwrap();
        if let (false, true, Some(left)) = (cut.is_reached, begins_request, cut.left) {
            cut.is_reached = left <= 1;
            cut.left = Some(left.saturating_sub(1));
            if cut.is_reached && cut.last_passes {
                return Passage::Last;
            }
        }
        if !cut.is_reached {
            return Passage::Free;
        }
        drop(self.mended.wait_while(cut, |cut| cut.is_reached).unwrap());
        Passage::Ended
    }

    /// Passes requests on until their end, or until a refused one. A client sends a request after the answer to the
    /// previous one, so a request begins where a read begins.
    fn relay(&self, mut requests: TcpStream, mut server: &TcpStream) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        let mut passage = Passage::Free;
        loop {
            let len = requests.read(&mut buffer)?;
            let bytes = &buffer[..len];
            let line = bytes.split(|byte| *byte == b'\r').next().unwrap_or(bytes);
            let begins = METHODS.iter().any(|method| line.starts_with(method));
            let is_pack = line.windows(7).any(|part| part == b"/packs/");
            let is_write = is_pack && line.starts_with(b"PUT ");
            if len == 0 || is_write && self.refuses_packs.load(Ordering::SeqCst) {
                return Ok(());
            }
            if passage != Passage::Last {
                passage = self.passage(begins);
            }
            if passage == Passage::Ended {
                return Ok(());
            }
            if begins {
                let text = String::from_utf8_lossy(bytes);
                let key = text
                    .split_once("Credential=")
                    .and_then(|(_, rest)| rest.split_once('/'));
                let key = key.map(|(key, _)| key.to_owned());
                self.keys.lock().unwrap().extend(key);
            }
            if is_write {
                let line = String::from_utf8_lossy(line).into_owned();
                self.pack_writes.lock().unwrap().push(line);
            }
            if is_pack && line.starts_with(b"GET ") {
                self.pack_reads.fetch_add(1, Ordering::SeqCst);
            }
            server.write_all(bytes)?;
        }
    }
}
