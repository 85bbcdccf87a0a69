//! Sockets within the job, and connections to others.

use std::fs;
use std::net::TcpListener;

use super::survival::survives;
use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, as_root_and_in_own_network, as_root_and_user,
};

/// A server that is started again removes its socket.
#[apply(as_root_and_user)]
fn a_socket_that_the_job_removed_after_the_snapshot_is_back() {
    survives(
        r#"
server = socket.socket(socket.AF_UNIX)
server.bind("socket"); server.listen()
for i in steps():
    if i == 10: note(os.path.exists("socket")); server.close(); os.remove("socket")
note(os.path.exists("socket"))
"#,
    );
}

/// `/var/run` is such a link, to `/run`.
#[apply(as_root_and_user)]
fn a_socket_bound_through_a_link_survives() {
    survives(
        r#"
os.makedirs("real/folder"); os.symlink("real", "link")
names = [os.path.abspath("link") + "/one", os.getcwd() + "/real/folder/../other"]
servers = [socket.socket(socket.AF_UNIX) for _ in names]
for server, name in zip(servers, names): server.bind(name); server.listen()
for i in steps():
    for server, name in zip(servers, names):
        with socket.socket(socket.AF_UNIX) as client: client.connect(name); server.accept()[0].send(b"x"); note(client.recv(1))
"#,
    );
}

/// supervisord links its socket to the final name; other servers rename theirs into place.
#[apply(as_root)]
fn sockets_with_other_names_than_they_were_bound_by_survive() {
    survives(
        r#"
def serve(name):
    server = socket.socket(socket.AF_UNIX); server.bind(name); server.listen()
    return server
linked = serve(os.path.abspath("linked.tmp")); os.link("linked.tmp", "linked"); os.remove("linked.tmp")
moved = serve(os.path.abspath("moved.tmp")); os.rename("moved.tmp", "moved"); os.chmod("moved", 0o640)
both = serve("one"); os.link("one", "two")
servers = [(linked, "linked"), (moved, "moved"), (both, "one"), (both, "two")]
for i in steps():
    for server, name in servers:
        with socket.socket(socket.AF_UNIX) as client: client.connect(name); server.accept()[0].send(b"x"); note(client.recv(1))
        note(name, oct(os.stat(name).st_mode), os.stat(name).st_nlink)
    note(os.path.exists("linked.tmp"), os.path.exists("moved.tmp"))
"#,
    );
}

/// Pipes and names of sockets that nobody has open at the snapshot: removed after it, and made again after it.
#[apply(as_root_and_user)]
fn closed_pipes_and_sockets_are_as_they_were() {
    survives(
        r#"
def make(pipe, name):
    os.mkfifo(pipe, 0o640)
    with socket.socket(socket.AF_UNIX) as one: one.bind(name)
def remove(*names):
    for name in names: note(name, oct(os.lstat(name).st_mode)); os.remove(name)
make("pipe", "socket"); make("other-pipe", "other-socket"); remove("pipe", "socket")
for i in steps():
    if i == 10: make("pipe", "socket"); remove("other-pipe", "other-socket")
remove("pipe", "socket")
"#,
    );
}

#[apply(as_root_and_user)]
fn unix_sockets_keep_data_in_flight() {
    survives(
        r#"
pair = socket.socketpair()
packets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening = socket.socket(socket.AF_UNIX); listening.bind("listen"); listening.listen()
client = socket.socket(socket.AF_UNIX); client.connect("listen"); server = listening.accept()[0]
mail = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); mail.bind("mail")
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); sender.connect("mail")
hidden = socket.socket(socket.AF_UNIX); hidden.bind("\0" + hashlib.sha256(os.getcwd().encode()).hexdigest()); hidden.listen()
for n in range(4):
    for one in pair[0], packets[0], client, sender: one.send(b"early %d;" % n)
for i in steps():
    for one, other in (pair, packets, (client, server), (sender, mail)):
        one.send(b"message %d;" % i)
        note(other.recv(10))
    if i % 4 == 0:
        for address in "listen", hidden.getsockname():
            late = socket.socket(socket.AF_UNIX); late.connect(address)
            accepted = (listening if address == "listen" else hidden).accept()[0]
            late.send(b"late"); note(accepted.recv(10))
for one, other in (pair, packets, (client, server)):
    one.close()
    while data := other.recv(1000): note(data)
"#,
    );
}

/// Creates a listening socket, connections through it and data in transit, on a family's loopback address.
fn tcp(family: &str, address: &str) -> String {
    format!(
        r#"
listening = socket.socket(socket.{family}); listening.bind(("{address}", 0)); listening.listen()
"#
    ) + r#"
def connect():
    client = socket.socket(listening.family); client.connect(listening.getsockname())
    return client, listening.accept()[0]
def exactly(sock, size):
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data)); assert more; data += more
    return data
child_end, parent_end = connect()
child = os.fork()
if child == 0:
    parent_end.close(); listening.close()
    state = hashlib.sha256()
    while data := child_end.recv(1):
        state.update(data); child_end.sendall(state.digest())
    os._exit(0)
child_end.close()
client, server = connect()
client.sendall(hashlib.shake_128(b"in flight").digest(50000))
silent = connect()
for i in steps():
    parent_end.sendall(bytes([i])); note(exactly(parent_end, 32))
    client.sendall(hashlib.shake_128(b"%d" % i).digest(3000)); note(exactly(server, 2000))
    server.sendall(b"back %02d" % i); note(exactly(client, 7))
    if i % 5 == 0:
        a, b = connect()
        a.sendall(b"short-lived"); note(exactly(b, 11)); a.close(); b.close()
silent[1].sendall(b"late"); note(exactly(silent[0], 4))
client.shutdown(socket.SHUT_WR)
rest = b""
while data := server.recv(65536): rest += data
note(rest)
parent_end.close(); os.waitpid(child, 0)
"#
}

#[apply(as_root_and_in_own_network)]
fn tcp_inside_the_tree_survives() {
    survives(&tcp("AF_INET", "127.0.0.1"));
}

#[apply(as_root_and_in_own_network)]
fn tcp_over_ipv6_inside_the_tree_survives() {
    survives(&tcp("AF_INET6", "::1"));
}

#[apply(as_root_and_user)]
fn messages_behind_an_empty_one_are_kept() {
    survives(
        r#"
pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)]
def send(end, i):
    for text in b"one %d" % i, b"", b"three %d" % i: end.send(text)
def receive(end):
    while not (text := end.recv(99)): pass
    return text
for ours, _ in pairs: send(ours, -1)
closed, left = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); send(closed, -2); closed.close()
for i in steps():
    for ours, theirs in pairs: send(ours, i); note(receive(theirs), receive(theirs))
note(receive(left), receive(left))
"#,
    );
}

#[apply(as_root_and_in_own_network)]
fn udp_inside_the_tree_survives() {
    survives(
        r#"
receiver = socket.socket(type=socket.SOCK_DGRAM); receiver.bind(("127.0.0.1", 0))
sender = socket.socket(type=socket.SOCK_DGRAM); sender.connect(receiver.getsockname())
for i in steps():
    sender.send(b"datagram %d" % i); note(receiver.recv(100))
"#,
    );
}

#[apply(as_root_and_in_own_network)]
fn options_that_criu_does_not_restore_survive() {
    survives(
        r#"
def of(kind):
    one = socket.socket(*kind)
    if kind[0] != socket.AF_UNIX: one.bind(("::1" if kind[0] == socket.AF_INET6 else "127.0.0.1", 0))
    return one
tcp, tcp6 = of((socket.AF_INET, socket.SOCK_STREAM)), of((socket.AF_INET6, socket.SOCK_STREAM))
tcp.listen(); tcp6.listen()
client = socket.create_connection(tcp.getsockname()); server = tcp.accept()[0]
udp, udp6 = of((socket.AF_INET, socket.SOCK_DGRAM)), of((socket.AF_INET6, socket.SOCK_DGRAM))
unix = of((socket.AF_UNIX, socket.SOCK_DGRAM))
options = [
    (client, 6, 18, 4321), (server, 6, 18, 1234), (tcp, 6, 9, 3), (tcp, 6, 25, 70000), (client, 1, 60, 1),  # TCP_USER_TIMEOUT
    (udp, 0, 8, 1), (udp, 0, 11, 1), (udp, 0, 33, 0), (udp, 0, 34, 0), (udp, 17, 104, 1), (udp, 0, 10, 2),  # IP_PKTINFO
    (udp6, 41, 49, 1), (udp6, 41, 16, 9), (udp6, 41, 51, 1), (tcp6, 41, 16, 7), (udp, 1, 35, 1), (unix, 1, 42, 2),
]
for one, *option in options: one.setsockopt(*option)
group = socket.inet_aton("239.86.7.6")
member = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); member.bind(("239.86.7.6", 0))
member.setsockopt(0, 35, group + socket.inet_aton("127.0.0.1"))  # IP_ADD_MEMBERSHIP
speaker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); speaker.setsockopt(0, 32, socket.inet_aton("127.0.0.1"))
for i in steps(): time.sleep(0.01)
for one, level, name, value in options: note(level, name, one.getsockopt(level, name) == value)
speaker.sendto(b"to all", member.getsockname()); member.settimeout(5); note(member.recv(10))
udp.sendto(b"data", udp.getsockname())
data, extra, _, _ = udp.recvmsg(10, 1000)
note(data, sorted(one[:2] for one in extra))
"#,
    );
}

#[apply(as_root)]
fn raw_packet_and_netlink_sockets_inside_the_tree_survive() {
    survives(
        r#"
raw = socket.socket(type=socket.SOCK_RAW, proto=253)
raw.bind(("127.0.0.1", 0))
sender = socket.socket(type=socket.SOCK_RAW, proto=253)
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x88b5))
packets.bind(("lo", 0x88b5))
light = socket.socket(type=socket.SOCK_DGRAM, proto=136); light.bind(("127.0.0.1", 0))
lighter = socket.socket(type=socket.SOCK_DGRAM, proto=136); lighter.connect(light.getsockname())
routes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); routes.bind((0, 0))
for one in raw, packets, light, routes: one.settimeout(30)
for i in steps():
    sender.sendto(b"raw %d" % i, ("127.0.0.1", 0)); note(raw.recv(100)[20:])
    packets.sendto(b"packet %d" % i, ("lo", 0x88b5)); note(packets.recv(100))
    lighter.send(b"light %d" % i); note(light.recv(100))
    routes.send(struct.pack("=IHHIIBxHiII", 32, 18, 1, i, 0, 0, 0, 1, 0, 0))
    note(struct.unpack_from("=IHHI", routes.recv(65536))[1:4])
"#,
    );
}

/// Runs a job that is connected to the test, in addition to `more`, crashes and is restored; returns its output about
/// the connection. Everything within the job continues in any case.
fn connection_to_others(setting: &str, more: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("an address");
    let script = format!(
        r#"
import os, socket, time
def until(name):
    while not os.path.exists(name): time.sleep(0.005)
other = socket.create_connection(("{}", {}))
{more}
print("connected", flush=True)
until("snapshotted")
print("on", flush=True)
until("restored")
for one, another in inside:
    one.sendall(b"within"); assert another.recv(6) == b"within"
try:
    other.send(b"hello")
    print("open", flush=True)
except OSError as error:
    print("closed", flush=True)
"#,
        address.ip(),
        address.port()
    );
    let place = Place::new();
    fs::write(place.file("job.py"), script).expect("the script is written");
    let mut run = place.start_with(&ON_REQUEST, &["python3", "job.py"], |command| {
        command.env("CKPT_RUN_NETWORK_TCP", setting);
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    });
    let _ours = listener.accept().expect("the job's connection");
    place.wait_for("out", "connected\n");
    place.snapshot();
    fs::write(place.file("snapshotted"), "").expect("a gate");
    place.wait_for("out", "on\n");
    run.crash();
    place.wait_for("err", "restored");
    fs::write(place.file("restored"), "").expect("a gate");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let out = place.text("out");
    out.lines().last().unwrap_or_default().to_owned()
}

const NOTHING_INSIDE: &str = "inside = []";
const ALSO_INSIDE: &str = r#"
listening = socket.create_server(("127.0.0.1", 0))
inside = [(socket.create_connection(listening.getsockname()), listening.accept()[0])]
"#;

#[apply(as_root_and_in_own_network)]
fn a_connection_to_others_is_found_closed_after_a_restore() {
    for more in [NOTHING_INSIDE, ALSO_INSIDE] {
        assert_eq!(connection_to_others("close", more), "closed", "{more}");
    }
}

#[apply(as_root)]
fn a_connection_to_others_is_kept_where_that_is_wanted() {
    assert_eq!(connection_to_others("keep", NOTHING_INSIDE), "open");
}

/// The CUDA driver binds such an address; jobs on one machine share the network namespace.
#[apply(as_root_and_user)]
fn two_jobs_may_name_addresses_by_their_pids() {
    let script = r#"
import os, socket, time
name = socket.socket(socket.AF_UNIX); name.bind("\0ckpt-run-test-%d" % os.getpid()); name.listen()
print("bound", flush=True)
while not os.path.exists("restored"): time.sleep(0.005)
child = os.fork()
if child == 0: os._exit(0)
os.waitpid(child, 0)
assert child > os.getpid(), (child, os.getpid())
"#;
    let begun: Vec<(Place, Run)> = (0..2)
        .map(|_| {
            let place = Place::new();
            let run = place.start_python(&ON_REQUEST, script);
            place.wait_for("out", "bound\n");
            place.snapshot();
            (place, run)
        })
        .collect();
    for (place, mut run) in begun {
        run.crash();
        place.wait_for("err", "restored");
        fs::write(place.file("restored"), "").expect("a gate");
        assert_eq!(run.wait(), 0, "{}", place.text("err"));
    }
}
