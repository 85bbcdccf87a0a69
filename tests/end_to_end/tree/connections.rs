//! Connections within the job with data in transit: random bytes in both directions, checked by hash at both ends, over
//! two kills.

use std::fs;
use std::net::{TcpListener, TcpStream};

use super::survival::survives_two_crashes;
use crate::harness::{
    ON_REQUEST, Place, apply, as_root, as_root_and_in_own_network, as_root_and_user, connected,
    stderr,
};

/// Opens both ends of streams; every byte that passes is counted and hashed.
const STREAMS: &str = r#"
class End:
    """One end: sends a stream of random bytes, and checks the one of the other end."""
    def __init__(self, sock, name, peer):
        sock.setblocking(False)
        self.sock, self.name, self.peer = sock, name, peer
        self.sent = self.received = self.total = 0
        self.hash, self.ended = hashlib.sha256(), False
    def stream(self, name):
        return memoryview(hashlib.shake_128(name.encode()).digest(self.total))
    def extend(self, size):
        """Both streams get longer."""
        self.total += size
        self.mine, self.others = self.stream(self.name), self.stream(self.peer)
    def send(self):
        """Sends what there is room for."""
        try:
            while self.sent < self.total: self.sent += self.sock.send(self.mine[self.sent:])
        except BlockingIOError: pass
    def receive(self, most):
        """Receives what has come, and no more than that."""
        try:
            while most > 0:
                data = self.sock.recv(min(most, 1 << 16))
                if not data: self.ended = True; return
                assert data == self.others[self.received:self.received + len(data)], self.received
                self.hash.update(data); self.received += len(data); most -= len(data)
        except BlockingIOError: pass
    def exchange(self):
        """Everything in both directions."""
        end = time.monotonic() + 120
        while self.sent < self.total or self.received < self.total:
            assert time.monotonic() < end, (self.sent, self.received, self.total)
            select.select([self.sock], [self.sock] if self.sent < self.total else [], [], 1)
            self.send(); self.receive(1 << 20)
        assert self.hash.digest() == hashlib.sha256(self.others).digest()
    def full(self):
        """Sends until nothing passes any more."""
        still = 0
        while still < 20:
            before = self.sent
            self.send(); time.sleep(0.005)
            still = still + 1 if self.sent == before else 0
        assert self.sent < self.total, "never full"
def tcp(host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family); listening.bind((host, 0)); listening.listen()
    client = socket.socket(family); client.connect(listening.getsockname())
    return client, listening.accept()[0]
"#;

/// Runs two processes, one at each end; both directions are full at the snapshot and at the crash.
fn full_both_ways(pair: &str) {
    let script = format!(
        r#"
{STREAMS}
a, b = {pair}
told, tell = os.pipe()
child = os.fork()
end = End(b, "b", "a") if child == 0 else End(a, "a", "b")
(a if child == 0 else b).close()
for n in range(2):
    end.extend(24 << 20)
    end.full()
    if child == 0:
        os.write(tell, b"x"); gate(f"snapshotted-{{n}}")
    else:
        os.read(told, 1); print(f"armed-{{n}}", flush=True); gate(f"snapshotted-{{n}}")
    end.receive(300000); end.send()
    if child: print(f"moved-{{n}}", flush=True)
    gate(f"crashed-{{n}}")
    end.exchange()
if child == 0: os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"#
    );
    survives_two_crashes(&script);
}

#[apply(as_root_and_in_own_network)]
fn tcp_that_is_full_both_ways_loses_nothing() {
    full_both_ways("tcp()");
}

#[apply(as_root_and_in_own_network)]
fn tcp_over_ipv6_that_is_full_both_ways_loses_nothing() {
    full_both_ways("tcp('::1')");
}

#[apply(as_root)]
fn a_unix_stream_that_is_full_both_ways_loses_nothing() {
    full_both_ways("socket.socketpair()");
}

#[apply(as_root_and_in_own_network)]
fn many_tcp_connections_with_data_on_its_way_survive() {
    survives_two_crashes(&format!(
        r#"
{STREAMS}
ends = []
for i in range(60):
    a, b = tcp("127.0.0.1" if i % 2 else "::1")
    ends += [End(a, f"a{{i}}", f"b{{i}}"), End(b, f"b{{i}}", f"a{{i}}")]
shared = []
for i in range(3):
    one = socket.socket(); one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(shared[0].getsockname() if shared else ("127.0.0.1", 0)); one.listen(); shared.append(one)
for n in range(2):
    for number, end in enumerate(ends):
        # Two connections are full, the others hold a little.
        end.extend((24 << 20) if number // 2 < 2 else 100000)
        if end.total > 10 << 20: end.full()
        else: end.send()
    print(f"armed-{{n}}", flush=True); gate(f"snapshotted-{{n}}")
    for end in ends: end.receive(5000)
    print(f"moved-{{n}}", flush=True); gate(f"crashed-{{n}}")
    deadline = time.monotonic() + 120
    while any(end.sent < end.total or end.received < end.total for end in ends):
        assert time.monotonic() < deadline
        for end in ends: end.send(); end.receive(1 << 20)
    for end in ends: assert end.hash.digest() == hashlib.sha256(end.others).digest()
    for i in range(10):
        client = socket.create_connection(shared[0].getsockname())
        ready = select.select(shared, [], [])[0][0]
        server = ready.accept()[0]
        server.sendall(b"hello"); assert client.recv(5) == b"hello"
"#
    ));
}

/// Where other users can write, a restore follows no links; packets are held back there, too.
#[apply(as_root)]
fn tcp_of_a_job_with_files_in_a_folder_for_all_survives() {
    survives_two_crashes(&format!(
        r#"
{STREAMS}
os.mkdir("for-all"); os.chmod("for-all", 0o777)
file = open("for-all/file", "w")
a, b = tcp()
a, b = End(a, "a", "b"), End(b, "b", "a")
for n in range(2):
    a.extend(100000); b.extend(100000)
    a.send()
    print(f"armed-{{n}}", flush=True); gate(f"snapshotted-{{n}}")
    b.receive(5000)
    print(f"moved-{{n}}", flush=True); gate(f"crashed-{{n}}")
    deadline = time.monotonic() + 120
    while any(end.sent < end.total or end.received < end.total for end in (a, b)):
        assert time.monotonic() < deadline
        for end in a, b: end.send(); end.receive(1 << 20)
    for end in a, b: assert end.hash.digest() == hashlib.sha256(end.others).digest()
"#
    ));
}

/// Ends that were shut down: with pending data, with a full receiver, in both directions.
#[apply(as_root_and_in_own_network)]
fn half_closed_tcp_survives() {
    survives_two_crashes(&format!(
        r#"
{STREAMS}
def half(size):
    a, b = tcp()
    a, b = End(a, "a", "b"), End(b, "b", "a")
    a.extend(size); b.extend(size)
    return a, b
def drain(end, size):
    deadline = time.monotonic() + 120
    while not end.ended:
        assert time.monotonic() < deadline, (end.received, size)
        select.select([end.sock], [], [], 1); end.receive(1 << 20)
    assert end.received == size, (end.received, size)
    assert end.hash.digest() == hashlib.sha256(end.others[:size]).digest()
for n in range(2):
    pairs = [half(24 << 20), half(50000), half(50000), half(24 << 20)]
    full, empty, read, both = pairs
    full[0].full()
    empty[0].send()
    read[0].send(); read[0].sock.shutdown(socket.SHUT_WR); drain(read[1], 50000)
    both[0].full(); both[1].full()
    for pair in full, empty, both: pair[0].sock.shutdown(socket.SHUT_WR)
    print(f"armed-{{n}}", flush=True); gate(f"snapshotted-{{n}}")
    for pair in full, empty: pair[1].receive(20000)
    print(f"moved-{{n}}", flush=True); gate(f"crashed-{{n}}")
    for a, b in full, empty:
        drain(b, a.sent)
    for a, b in empty, read:
        b.send(); b.sock.shutdown(socket.SHUT_WR); drain(a, 50000)
    b.sock.close()
    both[1].sock.shutdown(socket.SHUT_WR)
    drain(both[1], both[0].sent); drain(both[0], both[1].sent)
    for pair in pairs:
        for end in pair: end.sock.close()
"#
    ));
}

/// The closed end holds no data any more: the open end receives the rest of the data and the end.
#[apply(as_root_and_in_own_network)]
fn tcp_whose_other_end_was_closed_survives() {
    survives_two_crashes(
        r#"
for n in range(2):
    listening = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listening.getsockname()); server = listening.accept()[0]
    data = hashlib.shake_128(b"%d" % n).digest(30000)
    server.sendall(data); server.close()
    print(f"armed-{n}", flush=True); gate(f"snapshotted-{n}")
    part = client.recv(1000, socket.MSG_WAITALL)
    print(f"moved-{n}", flush=True); gate(f"crashed-{n}")
    while more := client.recv(65536): part += more
    assert part == data
    client.close(); listening.close()
"#,
    );
}

/// Job with a connection that it accepts after the gate `accept`.
const WAITS: &str = r#"
import os, socket, time
if FAMILY == "tcp":
    listening = socket.create_server(("127.0.0.1", 0))
else:
    listening = socket.socket(socket.AF_UNIX); listening.bind("listen"); listening.listen()
client = socket.socket(listening.family); client.connect(listening.getsockname())
client.sendall(b"early")
print("waits", flush=True)
while not os.path.exists("accept"): time.sleep(0.005)
server = listening.accept()[0]
print("accepted", flush=True)
while not os.path.exists("restored"): time.sleep(0.005)
assert server.recv(5) == b"early"
server.sendall(b"late"); assert client.recv(4) == b"late"
"#;

#[apply(as_root_and_in_own_network)]
fn unaccepted_connection_with_data_is_refused() {
    for (family, words) in [
        (
            "tcp",
            &[
                "(python3) has a connection that waits to be accepted",
                "let the job accept",
            ][..],
        ),
        ("unix", &["has not accepted yet"]),
    ] {
        let place = Place::new();
        let script = format!("FAMILY = \"{family}\"\n{WAITS}");
        let mut run = place.start_python(&ON_REQUEST, &script);
        place.wait_for("out", "waits\n");
        let message = stderr(&place.verb(&["snapshot"]));
        for word in words {
            assert!(message.contains(word), "{message}");
        }
        place.snapshot_at_a_later_attempt("accept");
        run.crash();
        place.wait_for("err", "restored");
        fs::write(place.file("restored"), "").expect("a gate");
        assert_eq!(run.wait(), 0, "{}", place.text("err"));
    }
}

/// Connections of outsiders, which a restore closes anyway.
#[apply(as_root_and_user)]
fn pending_connections_of_others_allow_a_snapshot() {
    let script = r#"
import os, select, socket, sys, time
listening = socket.create_server(("127.0.0.1", 0))
def start(port):
    one = socket.socket(); one.setblocking(False)
    try: one.connect(("127.0.0.1", port))
    except BlockingIOError: pass
    return one
pending = [start(int(sys.argv[1])) for i in range(20)]
assert not select.select([], pending[-1:], [], 0.2)[1], "a full backlog"
print(listening.getsockname()[1], "listens", flush=True)
while not os.path.exists("restored"): time.sleep(0.005)
readable = select.select(pending[-1:], [], [], 60)[0]
assert readable and pending[-1].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or not pending[-1].recv(1)
client = socket.create_connection(listening.getsockname())
server, address = listening.accept()
assert address == client.getsockname()
print("done", flush=True)
"#;
    let full = TcpListener::bind("127.0.0.1:0").expect("a listener");
    nix::sys::socket::listen(&full, nix::sys::socket::Backlog::new(1).expect("small"))
        .expect("a small backlog");
    let port = full.local_addr().expect("an address").port().to_string();
    let place = Place::new();
    fs::write(place.file("job.py"), script).expect("the script is written");
    let mut run = place.start_with(&ON_REQUEST, &["python3", "job.py", &port], |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    });
    place.wait_for("out", "listens\n");
    let listens = place.text("out").split(' ').next().map(str::parse::<u16>);
    let listens = listens.expect("a word").expect("a port");
    let _waits = TcpStream::connect(("127.0.0.1", listens)).expect("a connection");
    place.snapshot();
    run.crash();
    place.wait_for("err", "restored");
    fs::write(place.file("restored"), "").expect("a gate");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(place.text("out").ends_with("done\n"));
}

/// Connections of a server that does not set `SO_REUSEADDR`; their remains prevent a bind to the address.
#[apply(as_root_and_in_own_network)]
fn server_is_restored_despite_open_client_connections() {
    let script = r#"
import os, socket, time
listening = socket.socket(); listening.bind(("127.0.0.1", 0)); listening.listen()
print(listening.getsockname()[1], "listens", flush=True)
idle, full = listening.accept()[0], listening.accept()[0]
full.setblocking(False)
try:
    while True: full.send(bytes(1 << 16))
except BlockingIOError: pass
print("accepted", flush=True)
while not os.path.exists("restored"): time.sleep(0.005)
client = socket.create_connection(listening.getsockname()); server = listening.accept()[0]
server.sendall(b"again"); assert client.recv(5) == b"again"
"#;
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, script);
    place.wait_for("out", "listens\n");
    let port = place.text("out").split(' ').next().map(str::parse::<u16>);
    let port = port.expect("a word").expect("a port");
    let _clients = [(); 2].map(|()| connected(port));
    place.wait_for("out", "accepted\n");
    place.snapshot();
    run.crash();
    place.wait_for("err", "restored image");
    fs::write(place.file("restored"), "").expect("a gate");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

/// Behaves like a TCP connection; CRIU saves connections of Unix sockets.
#[apply(as_root)]
fn a_unix_connection_that_is_not_accepted_survives() {
    survives_two_crashes(
        r#"
for n in range(2):
    listening = socket.socket(socket.AF_UNIX); listening.bind(f"listen-{n}"); listening.listen()
    client = socket.socket(socket.AF_UNIX); client.connect(f"listen-{n}")
    half = socket.socketpair(); half[0].sendall(b"rest"); half[0].shutdown(socket.SHUT_WR)
    print(f"armed-{n}", flush=True); gate(f"snapshotted-{n}")
    client.sendall(b"early")
    print(f"moved-{n}", flush=True); gate(f"crashed-{n}")
    server = listening.accept()[0]
    server.sendall(b"late"); assert client.recv(4) == b"late"
    client.sendall(b"word"); assert server.recv(100) in (b"earlyword", b"word")
    assert half[1].recv(10) == b"rest" and half[1].recv(10) == b""
    half[1].sendall(b"back"); assert half[0].recv(4) == b"back"
"#,
    );
}
