//! Input and output of a job: stdin, stdout, stderr, exit codes.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use crate::harness::{Place, apply, as_root, as_root_and_user, code, lines, stderr};

#[apply(as_root_and_user)]
fn the_exit_code_is_the_jobs_own() {
    for (script, expected) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
    ] {
        let place = Place::new();
        let output = place.verb(&["--", "sh", "-c", script]);
        assert_eq!(
            code(output.status),
            expected,
            "{script}: {}",
            stderr(&output)
        );
    }
}

#[apply(as_root_and_user)]
fn unrunnable_command_is_126_and_missing_command_is_127() {
    let place = Place::new();
    let write = |name: &str, text: &str, mode| {
        fs::write(place.file(name), text).unwrap();
        fs::set_permissions(place.file(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    write("plain", "#!/bin/sh\n", 0o644);
    write("homeless", "#!/no/such/interpreter\n", 0o755);
    for (program, expected) in [
        ("no-such-program", 127),
        ("./no-such-program", 127),
        ("./plain", 126),
        ("/", 126),
        ("./homeless", 127),
    ] {
        let output = place.verb(&["--", program]);
        let text = stderr(&output);
        assert_eq!(code(output.status), expected, "{program}: {text}");
        assert!(text.starts_with("ckpt-run: "), "{text}");
        assert!(text.contains(program), "{text}");
    }
}

#[apply(as_root_and_user)]
fn stdin_is_passed_through_from_a_pipe() {
    let place = Place::new();
    let mut run = place.start_with(&[], &["cat"], |command| {
        command.stdin(Stdio::piped());
    });
    let sent: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut stdin = run.stdin();
    stdin.write_all(&sent).unwrap();
    drop(stdin);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(fs::read(place.file("out")).unwrap() == sent);
}

#[apply(as_root_and_user)]
fn stdin_comes_from_a_file_or_is_empty() {
    let place = Place::new();
    fs::write(place.file("in"), "from a file").unwrap();
    let mut run = place.start_with(&[], &["cat"], |command| {
        command.stdin(fs::File::open(place.file("in")).unwrap());
    });
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "from a file");

    let place = Place::new();
    let mut run = place.start(&[], &["sh", "-c", "wc -c; readlink /proc/self/fd/0"]);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "0\n/dev/null\n");
}

#[apply(as_root_and_user)]
fn output_is_passed_on_byte_for_byte() {
    let place = Place::new();
    // Every byte value including zero; the length is not a multiple of any buffer's size.
    let bytes: Vec<u8> = (0..1_500_001_u32)
        .map(|i| i.to_le_bytes()[0] ^ i.to_le_bytes()[1])
        .collect();
    fs::write(place.file("bytes"), &bytes).unwrap();
    let output = place.verb(&["-q", "--", "sh", "-c", "cat bytes; cat bytes >&2"]);
    assert_eq!(code(output.status), 0);
    assert!(output.stdout == bytes);
    assert!(output.stderr == bytes);
}

#[apply(as_root_and_user)]
fn output_keeps_its_order() {
    let place = Place::new();
    let script = "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done";
    let mut run = place.start(&[], &["sh", "-c", script]);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), lines(3000));
}

#[apply(as_root_and_user)]
fn our_lines_never_break_a_line_of_the_jobs() {
    let place = Place::new();
    let mut run = place.start(&[], &["sh", "-c", "printf unfinished >&2; kill -KILL $$"]);
    assert_eq!(run.wait(), 137);
    let err = place.text("err");
    assert!(err.lines().any(|line| line == "unfinished"), "{err}");
    assert!(
        err.lines()
            .all(|line| line == "unfinished" || line.starts_with("ckpt-run: ")),
        "{err}"
    );
}

#[apply(as_root)]
fn file_input_continues_under_another_supervisor() {
    let place = Place::new();
    fs::write(place.file("input"), format!("title\n{}", lines(40))).unwrap();
    let job = "while read n; do echo $n\ndone=no; [ $n = 20 ] || [ $n = 30 ] || done=yes\n\
        until [ $done = yes ] || [ -e go-$n ]; do sleep 0.05; done; done > log";
    // Another process has read the title: the input begins after it.
    let start = || {
        let mut input = File::open(place.file("input")).unwrap();
        input.seek(SeekFrom::Start(6)).unwrap();
        place.start_with(&[], &["sh", "-c", job], |command| {
            command.stdin(input);
        })
    };
    let mut run = start();
    place.wait_for("log", "\n20\n");
    assert_eq!(code(place.verb(&["stop"]).status), 0);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    // Repeated: the second run counts from the first one's beginning, too.
    let mut run = start();
    fs::write(place.file("go-20"), "").unwrap();
    place.wait_for("log", "\n30\n");
    assert_eq!(code(place.verb(&["stop"]).status), 0);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let mut run = start();
    fs::write(place.file("go-30"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    let said = place.text("err");
    assert!(!said.contains("later input only"), "{said}");
}

#[apply(as_root_and_user)]
fn different_input_file_continues_with_a_warning() {
    let place = Place::new();
    fs::write(place.file("one"), "1\n2\n").unwrap();
    fs::write(place.file("other"), "3\n").unwrap();
    let job = "read a; read b; until [ -e go ]; do sleep 0.05; done; read c; echo $a $b $c > log";
    let start = |name| {
        let input = File::open(place.file(name)).unwrap();
        place.start_with(&[], &["sh", "-c", job], |command| {
            command.stdin(input);
        })
    };
    let mut run = start("one");
    run.job();
    place.snapshot();
    assert_eq!(code(place.verb(&["stop"]).status), 0);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let mut run = start("other");
    place.wait_for("err", "the job reads later input only");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), "1 2 3\n");
}
