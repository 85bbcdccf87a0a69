//! S3 server on loopback, and a gate in front of it that makes it unreachable.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::harness::{skip, wait_until, wait_until_or};

/// Name of the bucket; S3 requires at least three characters.
const BUCKET: &str = "bucket";
/// Beginning of the address in the server's messages.
const LISTENING: &str = "http://127.0.0.1:";

/// Server with one bucket, killed on drop. Its content is in its memory.
pub(super) struct S3Server {
    child: Child,
    gate: Gate,
    /// Address of a run's folder.
    url: String,
    _logs: TempDir,
}

impl S3Server {
    /// Starts the server. Returns `None` if it is not installed; then the test counts as skipped.
    pub(super) fn start() -> Option<Self> {
        let program = installed()?;
        let logs = tempfile::tempdir().unwrap();
        let log = |name: &str| File::create(logs.path().join(name)).unwrap();
        // The server also ends if the tests are killed.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(["-H", "127.0.0.1", "-p", "0"])
            .stdin(Stdio::null())
            .stdout(log("out"))
            .stderr(log("err"))
            .spawn();
        let mut child = child.unwrap();
        let said = || std::fs::read_to_string(logs.path().join("err")).unwrap();
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
        create_bucket(port);
        Some(Self {
            gate: Gate::before(port),
            child,
            url: format!("s3://{BUCKET}/runs/one"),
            _logs: logs,
        })
    }

    /// Returns the address of a run's folder.
    pub(super) fn url(&self) -> String {
        self.url.clone()
    }

    /// Makes a command use this server.
    pub(super) fn is_used_by(&self, command: &mut Command) {
        command
            .env("AWS_ACCESS_KEY_ID", "x")
            .env("AWS_SECRET_ACCESS_KEY", "y")
            .env("AWS_REGION", "us-east-1")
            .env("AWS_ENDPOINT_URL", format!("{LISTENING}{}", self.gate.port));
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

/// Returns the server's program, which `scripts/setup-tests` installs.
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
    connections: Mutex<Vec<TcpStream>>,
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
        let mut connections = self.shared.connections.lock().unwrap();
        self.shared.is_closed.store(true, Ordering::SeqCst);
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
        let (mut answers, mut to_client) = (server, client);
        thread::spawn(move || {
            let _ = io::copy(&mut answers, &mut to_client);
            let _ = to_client.shutdown(Shutdown::Both);
        });
        Ok(())
    }

    /// Passes requests on until their end, or until a refused one. A client sends a request after the answer to the
    /// previous one, so a request begins where a read begins.
    fn relay(&self, mut requests: TcpStream, mut server: &TcpStream) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let len = requests.read(&mut buffer)?;
            let bytes = &buffer[..len];
            let line = bytes.split(|byte| *byte == b'\r').next().unwrap_or(bytes);
            let is_pack = line.windows(7).any(|part| part == b"/packs/");
            let is_write = is_pack && line.starts_with(b"PUT ");
            if len == 0 || is_write && self.refuses_packs.load(Ordering::SeqCst) {
                return Ok(());
            }
            if is_pack && line.starts_with(b"GET ") {
                self.pack_reads.fetch_add(1, Ordering::SeqCst);
            }
            server.write_all(bytes)?;
        }
    }
}
