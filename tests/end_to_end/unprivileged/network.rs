//! Jobs with a network namespace, which pasta connects to the machine's network.

use std::fs;
use std::io::Read;
use std::net::{TcpListener, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    ON_REQUEST, Ordinary, Place, TUN, apply, as_root, as_user, code, connected, copy_environment,
    descendants, in_own_network, installed, name_of, program, skip, stderr, stdout, wait_until,
    wait_until_gone,
};

/// Serves one word to each connection, and has a connection with itself.
const SERVES: &str = r#"
import os, socket, threading, time
server = socket.create_server(("0.0.0.0", 0))
inner = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(inner.getsockname()); accepted = inner.accept()[0]
def serve():
    while True:
        one = server.accept()[0]; one.sendall(b"word"); one.close()
threading.Thread(target=serve, daemon=True).start()
print("port", server.getsockname()[1], flush=True)
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
client.sendall(b"within"); assert accepted.recv(6) == b"within"
print(os.readlink("/proc/self/ns/net"), flush=True)
"#;

fn port_of(place: &Place) -> u16 {
    place.wait_for("out", "ready");
    let text = place.text("out");
    let line = text.lines().find_map(|line| line.strip_prefix("port "));
    line.expect("a port").parse().expect("a number")
}

/// Waits until a new connection to the job's server brings its word.
fn serves(port: u16) {
    wait_until("the job's word", || {
        let mut word = String::new();
        // pasta may have opened the port on the machine, but not reach the job yet.
        let _ = connected(port).read_to_string(&mut word);
        word == "word"
    });
}

/// Returns the pid of the process with this name below the supervisor.
fn find(supervisor: i32, name: &str) -> Option<i32> {
    let all = descendants(supervisor);
    all.into_iter().find(|pid| name_of(*pid).starts_with(name))
}

fn pasta_of(supervisor: i32) -> Option<i32> {
    find(supervisor, "pasta").or_else(|| find(supervisor, "passt"))
}

fn our_network() -> String {
    let link = fs::read_link("/proc/self/ns/net").unwrap();
    link.display().to_string()
}

#[apply(in_own_network)]
fn a_port_of_the_job_is_reachable_before_and_after_a_restore() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, SERVES);
    let port = port_of(&place);
    serves(port);
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored image=000001");
    serves(port);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(!place.text("out").contains(&our_network()));
    assert!(
        !place.text("err").contains("network has lost"),
        "{}",
        place.text("err")
    );
}

/// Serves as a server that does not allow the reuse of its address. The kernel keeps a killed server's connections for as
/// long as the server has asked for.
const KEEPS_ITS_ADDRESS: &str = r#"
import os, socket, time
server = socket.socket()
server.bind(("127.0.0.1", 0)); server.listen()
print("port", server.getsockname()[1], flush=True)
print("ready", flush=True)
client = server.accept()[0]
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 5)
print("accepted", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
"#;

#[apply(as_user)]
fn an_address_that_the_kernel_keeps_is_awaited() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, KEEPS_ITS_ADDRESS);
    // Not closed before the restore, so that the server's end waits for it.
    let client = connected(port_of(&place));
    place.wait_for("out", "accepted");
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored image=000001");
    assert!(place.text("err").contains("the restore waits"));
    drop(client);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(in_own_network)]
fn pasta_that_dies_is_reported_and_started_again() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, SERVES);
    let port = port_of(&place);
    serves(port);
    let pasta = pasta_of(run.pid()).expect("pasta");
    kill(Pid::from_raw(pasta), Signal::SIGKILL).unwrap();
    place.wait_for("err", "pasta has ended (signal: 9 (SIGKILL))");
    place.wait_for("err", "the job's network is connected again");
    serves(port);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(in_own_network)]
fn pasta_has_none_of_the_supervisors_files_and_ends_with_it() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, SERVES);
    port_of(&place);
    let pasta = pasta_of(run.pid()).expect("pasta");
    let folder = place.path().to_str().unwrap();
    let open = fs::read_dir(format!("/proc/{pasta}/fd")).unwrap();
    for file in open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()) {
        let file = file.to_string_lossy().into_owned();
        assert!(!file.contains(folder), "{file}");
    }
    // Includes pasta.
    run.kill_supervisor();
}

/// Returns a listener, and a job that connects to it and sends these words right before its end.
fn sender(words: &str) -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let script = format!(
        r#"
import os, socket, time
other = socket.create_connection(("127.0.0.1", {port}))
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
other.sendall(b"{words}")
"#
    );
    (listener, script)
}

#[apply(in_own_network)]
fn a_connection_to_others_that_is_to_be_kept_is_refused_by_name() {
    let place = Place::new();
    let (listener, script) = sender("still open");
    let mut run = place.start_python_with(&ON_REQUEST, &script, |command| {
        command.env("CKPT_RUN_NETWORK_TCP", "keep");
    });
    let mut other = listener.accept().unwrap().0;
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success());
    assert!(
        said.contains("pasta, which does not restore connections") && said.contains("network.tcp"),
        "{said}"
    );
    place.go();
    let mut words = String::new();
    other.read_to_string(&mut words).unwrap();
    assert_eq!(words, "still open");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(in_own_network)]
fn data_sent_right_before_the_jobs_end_arrive() {
    let place = Place::new();
    let (listener, script) = sender("results");
    let mut run = place.start_python(&ON_REQUEST, &script);
    let mut other = listener.accept().unwrap().0;
    place.wait_for("out", "ready");
    let job = run.job();
    let pasta = Pid::from_raw(pasta_of(run.pid()).expect("pasta"));
    kill(pasta, Signal::SIGSTOP).unwrap();
    place.go();
    wait_until_gone(&[job]);
    // It is dead if the network did not wait for it.
    let _ = kill(pasta, Signal::SIGCONT);
    let mut words = String::new();
    other.read_to_string(&mut words).unwrap();
    assert_eq!(words, "results");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

/// Runs a command in a mount namespace where pasta is not installed. Needs root.
fn without_pasta(command: &Command) -> Command {
    let script = r#"for one in $(PATH=$PATH:/usr/local/bin:/usr/bin:/bin type -ap pasta); do
        mount --bind /dev/null "$(readlink -f "$one")"; done; exec "$@""#;
    let mut wrapped = Command::new("unshare");
    wrapped.args(["--mount", "bash", "-c", script, "bash"]);
    wrapped.arg(command.get_program()).args(command.get_args());
    copy_environment(command, &mut wrapped);
    if let Some(folder) = command.get_current_dir() {
        wrapped.current_dir(folder);
    }
    wrapped
}

/// Returns the user of the test's programs; `None` if the test, which is skipped, cannot mount anything.
fn where_root_mounts() -> Option<Ordinary> {
    let user = Ordinary::of_test();
    if user.is_none() {
        skip("hides programs by mounts, which needs root");
    }
    user
}

#[apply(in_own_network)]
fn own_network_without_pasta_is_an_error_before_anything_starts() {
    let Some(user) = where_root_mounts() else {
        return;
    };
    let place = Place::new();
    let mut command = user.command_with_tun(program(), &place.tun());
    command.args(["--isolation", "user", "--", "touch", "started"]);
    place.in_folder(&mut command);
    let output = without_pasta(&command).output().unwrap();
    let said = stderr(&output);
    assert_eq!(code(output.status), 125, "{said}");
    assert!(said.contains("install the package passt"), "{said}");
    assert!(!place.file("started").exists());
}

#[apply(in_own_network)]
fn an_image_with_own_network_is_refused_without_pasta() {
    let Some(user) = where_root_mounts() else {
        return;
    };
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, SERVES);
    port_of(&place);
    place.snapshot();
    run.kill_supervisor();
    let mut command = user.command_with_tun(program(), &place.tun());
    command.args(["--", "python3", "-u", "job.py"]);
    place.in_folder(&mut command);
    let mut refused = place.spawn(without_pasta(&command), |_| {});
    assert_eq!(refused.wait(), 125, "{}", place.text("err"));
    place.wait_for("err", "install the package passt");
    // The image is as good as before, and keeps its kind of network.
    let mut run = place.start_with(&ON_REQUEST, &["python3", "-u", "job.py"], |command| {
        command.env("CKPT_RUN_NETWORK_NAMESPACE", "host");
    });
    place.wait_for("err", "ckpt-run: restored image=000001");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(!place.text("out").contains(&our_network()));
}

#[apply(in_own_network)]
fn pasta_that_cannot_run_leaves_the_machines_network_by_default() {
    if Path::new("/dev/nvidiactl").exists() {
        skip("jobs on a machine with GPUs stay on its network");
        return;
    }
    let Some(user) = where_root_mounts() else {
        return;
    };
    let job = ["--isolation", "user", "--", "readlink", "/proc/self/ns/net"];
    let place = Place::new();
    let mut command = place.command(&job);
    command.env("CKPT_RUN_NETWORK_NAMESPACE", "auto");
    let own = command.output().unwrap();
    assert!(own.status.success(), "{}", stderr(&own));
    assert!(!stdout(&own).contains(&our_network()), "{}", stderr(&own));
    let place = Place::new();
    let mut command = user.command_with_tun(program(), Path::new("/dev/null"));
    place.in_folder(command.args(job));
    command.env("CKPT_RUN_NETWORK_NAMESPACE", "auto");
    let host = command.output().unwrap();
    let said = stderr(&host);
    assert!(stdout(&host).contains(&our_network()), "{said}");
    assert!(
        said.contains("the job uses the machine's network") && said.contains("/dev/net/tun"),
        "{said}"
    );
}

#[apply(as_root)]
fn own_network_is_refused_outside_of_a_user_namespace() {
    for isolation in ["auto", "namespaces", "none"] {
        let place = Place::new();
        let mut command = place.command(&["--isolation", isolation, "--", "touch", "started"]);
        command.env("CKPT_RUN_NETWORK_NAMESPACE", "own");
        let output = command.output().unwrap();
        let said = stderr(&output);
        assert_eq!(code(output.status), 125, "{said}");
        assert!(said.contains("set isolation = \"user\""), "{said}");
        assert!(!place.file("started").exists());
    }
}

#[apply(as_user)]
fn an_image_on_the_machines_network_is_restored_there() {
    let script = r#"
import os, time
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
print(os.readlink("/proc/self/ns/net"), flush=True)
"#;
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, script);
    place.wait_for("out", "ready");
    place.snapshot();
    run.kill_supervisor();
    let mut run = place.start_with(&ON_REQUEST, &["python3", "-u", "job.py"], |command| {
        command.env("CKPT_RUN_NETWORK_NAMESPACE", "own");
    });
    place.wait_for("err", "ckpt-run: restored image=000001");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(place.text("out").contains(&our_network()));
}

#[apply(in_own_network)]
fn doctor_says_that_connections_are_restored() {
    let place = Place::new();
    let checked = place.verb(&["doctor"]);
    let said = stdout(&checked);
    assert!(
        said.contains("connections inside a job are restored"),
        "{said}"
    );
}

/// Answers all questions for addresses with 192.0.2.77, until the socket is closed.
fn answer_names(server: &UdpSocket) {
    let mut question = [0; 512];
    while let Ok((size, asker)) = server.recv_from(&mut question) {
        let header = [&question[..2], &[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]].concat();
        let name_end = 12
            + question[12..size]
                .iter()
                .position(|byte| *byte == 0)
                .unwrap();
        let record = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 77];
        let answer = [&header, &question[12..name_end + 5], &record[..]].concat();
        let _ = server.send_to(&answer, asker);
    }
}

/// The name server is on a loopback address, like systemd's resolver.
#[apply(in_own_network)]
fn names_are_resolved_by_a_server_on_the_machines_loopback() {
    let Some(user) = where_root_mounts() else {
        return;
    };
    let place = Place::new();
    let server = UdpSocket::bind("127.0.0.77:53").unwrap();
    thread::spawn(move || answer_names(&server));
    let resolver = place.file("resolv.conf");
    fs::write(&resolver, "nameserver 127.0.0.77\n").unwrap();
    let script = r#"
import os, socket, time
def ask(): print(socket.getaddrinfo("name.example", 80, socket.AF_INET)[0][4][0], flush=True)
ask()
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
ask()
"#;
    fs::write(place.file("job.py"), script).unwrap();
    let mut job = user.command_with_tun(program(), &place.tun());
    job.args(ON_REQUEST);
    job.args(["--", "python3", "-u", "job.py"]);
    let with_resolver = r#"mount --bind "$0" "$(readlink -f /etc/resolv.conf)" && exec "$@""#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", with_resolver]);
    command.arg(resolver).arg(job.get_program());
    command.args(job.get_args());
    place.in_folder(&mut command);
    let mut run = place.spawn(command, |_| {});
    place.wait_for("out", "ready");
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored image=000001");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "192.0.2.77\nready\n192.0.2.77\n");
}

#[apply(as_root)]
fn root_in_a_user_namespace_may_have_an_own_network() {
    if !installed("pasta") || !Path::new(TUN).exists() {
        return;
    }
    let place = Place::new();
    let mut command = place.command(&["--isolation", "user", "--"]);
    command.args(["readlink", "/proc/self/ns/net"]);
    command.env("CKPT_RUN_NETWORK_NAMESPACE", "own");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stdout(&output).contains(&our_network()));
}
