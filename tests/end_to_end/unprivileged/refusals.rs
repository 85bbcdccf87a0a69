//! What an ordinary user cannot have, and how it is said.

use std::process::{Command, Output, Stdio};

use super::snapshot_crash_and_end;
use crate::harness::{
    ON_REQUEST, Place, apply, as_user, code, copy_environment, criu_prefix, stderr, stdout,
};

/// Has a connection with itself and one that listens.
const CONNECTED: &str = r#"
import os, socket, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
accepted = server.accept()[0]
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
try:
    client.send(b"x")
    print(accepted.recv(1), flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
again = socket.create_connection(server.getsockname())
again.send(b"y")
print(server.accept()[0].recv(1), flush=True)
"#;

#[apply(as_user)]
fn connections_are_closed_at_a_restore_and_servers_come_back() {
    let place = Place::new();
    snapshot_crash_and_end(&place, place.start_python(&ON_REQUEST, CONNECTED));
    assert_eq!(place.text("out"), "ready\nBrokenPipeError\nb'y'\n");
    let said = place.text("err");
    assert!(
        said.contains("connections within the job are closed") && said.contains("connections=1"),
        "{said}"
    );
}

#[apply(as_user)]
fn connections_that_are_to_be_kept_are_refused_by_name() {
    let place = Place::new();
    let set = |command: &mut Command| {
        command.env("CKPT_RUN_NETWORK_TCP", "keep");
    };
    let mut run = place.start_python_with(&ON_REQUEST, CONNECTED, set);
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success());
    assert!(
        said.contains("cannot be saved without privileges") && said.contains("network.tcp"),
        "{said}"
    );
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "ready\nb'x'\nb'y'\n");
}

/// Runs the command in a user namespace, as the user whom `map` names, with the rights that the options of `setpriv` leave.
fn in_user_namespace(command: &Command, map: &str, before: &str, rights: &str) -> Command {
    let mut wrapped = Command::new("unshare");
    // Root, to whom the folders above belong, has no number in that namespace: as a rehearsal does, vouch for them.
    let script = format!(
        "{before} export _CKPT_RUN_OWNERS_CHECKED=\"$(readlink /proc/self/ns/user)\"; \
        exec setpriv {rights} \"$@\""
    );
    wrapped.args(["--user", map, "--keep-caps"]);
    wrapped.args(["sh", "-c", &script, "sh"]);
    wrapped.arg(command.get_program()).args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        wrapped.current_dir(folder);
    }
    copy_environment(command, &mut wrapped);
    wrapped.stdin(Stdio::null());
    wrapped
}

fn output_of(place: &Place, command: &mut Command) -> Output {
    place.own(command);
    // Root, to whom these files belong, has no number in that namespace.
    command.env("CKPT_RUN_CRIU", criu_prefix().unwrap_or_default());
    command.output().unwrap()
}

/// The rights are those of root in a container of rootless podman, who may not create namespaces of the machine's kind.
#[apply(as_user)]
fn doctor_has_no_problem_as_root_of_a_user_namespace() {
    let place = Place::new();
    let command = place.command(&["doctor"]);
    let rights = "--bounding-set=-sys_admin --inh-caps=-all --ambient-caps=-all";
    let mut command = in_user_namespace(&command, "--map-root-user", "", rights);
    let output = output_of(&place, &mut command);
    let said = stdout(&output);
    assert_eq!(code(output.status), 0, "{said}{}", stderr(&output));
    assert!(
        said.contains("can be created in a user namespace"),
        "{said}"
    );
}

/// Some containers map only the user who starts them.
#[apply(as_user)]
fn folders_of_a_user_without_a_number_can_be_confirmed() {
    let place = Place::new();
    let command = place.command(&["--interval", "never", "--", "true"]);
    let rights = "--inh-caps=-all --ambient-caps=-all";
    let unconfirmed = "readlink() { :; };";
    for (before, expected) in [(unconfirmed, 125), ("", 0)] {
        let mut command = in_user_namespace(&command, "--map-current-user", before, rights);
        let output = output_of(&place, &mut command);
        let said = stderr(&output);
        assert_eq!(code(output.status), expected, "{said}");
        let remedy = "export _CKPT_RUN_OWNERS_CHECKED=$(readlink /proc/self/ns/user)";
        assert_eq!(said.contains(remedy), expected != 0, "{said}");
    }
}

#[apply(as_user)]
fn the_setting_that_forbids_user_namespaces_is_named() {
    let place = Place::new();
    let command = place.command(&["--isolation", "user", "--", "true"]);
    let forbid = "echo 0 > /proc/sys/user/max_user_namespaces;";
    let rights = "--inh-caps=-all --ambient-caps=-all";
    let mut command = in_user_namespace(&command, "--map-current-user", forbid, rights);
    let output = output_of(&place, &mut command);
    let said = stderr(&output);
    assert_eq!(code(output.status), 125, "{said}");
    assert!(
        said.contains("user.max_user_namespaces forbids it: the machine's administrator"),
        "{said}"
    );
}

#[apply(as_user)]
fn a_job_that_uses_io_uring_is_told_why_it_has_no_snapshot() {
    let place = Place::new();
    let script = r#"
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
print("ready", libc.syscall(425, 4, ctypes.create_string_buffer(120)) >= 0, flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"#;
    let mut run = place.start_python_with(&ON_REQUEST, script, |command| {
        command.env("CKPT_RUN_SANDBOX_IO_URING", "allow");
    });
    place.wait_for("out", "ready");
    if place.text("out") == "ready True\n" {
        let refused = place.verb(&["snapshot"]);
        let said = stderr(&refused);
        assert!(!refused.status.success());
        assert!(said.contains("the job uses io_uring"), "{said}");
    } else {
        crate::harness::skip("no io_uring here");
    }
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
