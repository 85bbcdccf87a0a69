//! Tests of one output, with a pipe or a file instead of the caller.

use std::io::Write;

use super::*;
use crate::job::rewind::OtherBytes;
use crate::job::rewind::error::RewindError;

/// Rewinds the output for a restore that succeeds.
fn rewind(output: &Output, mark: &OutputMark) {
    let aside = tempfile::tempdir().unwrap();
    output
        .rewind(mark, Relation::Ours, aside.path(), "stdout")
        .unwrap();
    output.keep();
}

fn write(output: &mut Output, text: &[u8]) {
    let mut job = File::from(output.connect().unwrap());
    job.write_all(text).unwrap();
    drop(job);
    output.drain()();
}

/// An output to a file that holds `one`, a mark there, and `two`.
fn two_lines() -> (tempfile::NamedTempFile, Output, OutputMark) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut output = Output::new(file.reopen().unwrap().into(), true);
    write(&mut output, b"one\n");
    let mark = output.mark().unwrap();
    write(&mut output, b"two\n");
    (file, output, mark)
}

/// Returns the parts saved in the folders of `aside`.
fn parts(aside: &std::path::Path) -> Vec<String> {
    let list = |path: &std::path::Path| {
        let entries = std::fs::read_dir(path).unwrap().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let files = list(aside).into_iter().flat_map(|folder| list(&folder));
    files
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect()
}

#[test]
fn a_rewind_of_a_failed_restore_is_reverted_by_the_drain() {
    let (file, mut output, mark) = two_lines();
    let text = || std::fs::read_to_string(file.path()).unwrap();
    let newest = output.mark().unwrap();
    let aside = tempfile::tempdir().unwrap();
    let folder = aside.path().join("000001-1");
    for _ in 0..2 {
        output
            .rewind(&mark, Relation::Ours, &folder, "stdout")
            .unwrap();
        assert_eq!(text(), "one\n");
        output.drain()();
        assert_eq!(text(), "one\ntwo\n");
        assert!(!folder.exists());
    }
    rewind(&output, &newest);
    write(&mut output, b"three\n");
    assert_eq!(text(), "one\ntwo\nthree\n");
    assert_eq!(output.mark().unwrap().position, 14);
}

#[test]
fn an_image_of_an_earlier_supervisor_repeats_output_once() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let aside = tempfile::tempdir().unwrap();
    let mut earlier = Output::new(File::create("/dev/null").unwrap().into(), false);
    write(&mut earlier, b"one\n");
    let mark = earlier.mark().unwrap();
    let mut output = Output::new(writer.into(), false);
    for text in [&b"two\nthree\n"[..], b"two\n", b"two\nthree\nfour\n"] {
        let rewound = output.rewind(&mark, Relation::Earlier, aside.path(), "stdout");
        rewound.unwrap();
        output.keep();
        write(&mut output, text);
    }
    assert_eq!(output.mark().unwrap().position, 19);
    drop(output);
    let mut delivered = String::new();
    std::io::Read::read_to_string(&mut reader, &mut delivered).unwrap();
    assert_eq!(delivered, "two\nthree\nfour\n");
}

#[test]
fn output_of_a_job_that_ran_is_not_followed_by_older_output() {
    let (file, mut output, mark) = two_lines();
    let aside = tempfile::tempdir().unwrap();
    let folder = aside.path().join("000001-1");
    let rewound = output.rewind(&mark, Relation::Ours, &folder, "stdout");
    rewound.unwrap();
    write(&mut output, b"2\n");
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "one\n2\n");
    assert!(folder.exists());
}

#[test]
fn a_short_file_is_completed_from_several_parts_or_refused() {
    let (file, mut output, mark) = two_lines();
    let newest = output.mark().unwrap();
    write(&mut output, b"three\n");
    let aside = tempfile::tempdir().unwrap();
    for (number, mark) in [(2, &newest), (1, &mark)] {
        let folder = aside.path().join(format!("00000{number}-{}", 10 - number));
        let rewound = output.rewind(mark, Relation::Earlier, &folder, "stdout");
        rewound.unwrap();
        // As if killed: nothing is reverted.
        output.keep();
    }
    let whole = |mark: &OutputMark, relation| {
        let folder = aside.path().join("000003-10");
        output.make_whole(mark, relation, (&folder, "stdout"), OtherBytes::Refuse)
    };
    let mut other = newest;
    other.file.as_mut().unwrap().sample = Some(7);
    let refused = whole(&other, Relation::Earlier);
    assert!(matches!(
        refused,
        Err(RewindError::ShortOutput {
            then: 8,
            now: 4,
            ..
        })
    ));
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "one\n");
    whole(&newest, Relation::Earlier).unwrap();
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "one\ntwo\n");
    let refused = whole(&other, Relation::Earlier);
    assert!(matches!(refused, Err(RewindError::OtherBytes { .. })));

    // Another attempt has run since.
    std::fs::write(file.path(), "one\n2\nthree\n").unwrap();
    whole(&newest, Relation::Earlier).unwrap();
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "one\ntwo\n");
    let kept = parts(aside.path());
    assert!(kept.contains(&"2\nthree\n".to_owned()), "{kept:?}");

    std::fs::write(file.path(), "").unwrap();
    std::fs::remove_dir_all(aside.path()).unwrap();
    whole(&newest, Relation::Earlier).unwrap();
    let refused = whole(&newest, Relation::Ours);
    assert!(matches!(refused, Err(RewindError::ShortOutput { .. })));
}

#[test]
fn output_written_before_the_mark_is_counted_and_delivered() {
    let (mut heard, sink) = io::pipe().unwrap();
    let mut output = Output::new(sink.into(), true);
    let mut job = File::from(output.connect().unwrap());
    job.write_all(b"hello\n").unwrap();
    let mark = output.mark().unwrap();
    assert_eq!((mark.position, mark.file), (6, None));
    drop(job);
    output.drain()();
    let mut text = [0; 6];
    heard.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"hello\n");
}

#[test]
fn our_own_file_is_cut_back_to_the_mark() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut output = Output::new(file.reopen().unwrap().into(), true);
    let mut job = File::from(output.connect().unwrap());
    job.write_all(b"one\n").unwrap();
    let mark = output.mark().unwrap();
    job.write_all(b"two, at 12:00\n").unwrap();
    drop(job);
    output.drain()();
    assert_eq!(
        std::fs::read_to_string(file.path()).unwrap(),
        "one\ntwo, at 12:00\n"
    );
    rewind(&output, &mark);
    let mut job = File::from(output.connect().unwrap());
    job.write_all(b"two, at 12:01\n").unwrap();
    drop(job);
    output.drain()();
    assert_eq!(
        std::fs::read_to_string(file.path()).unwrap(),
        "one\ntwo, at 12:01\n"
    );
}

#[test]
fn output_of_others_in_our_file_is_not_cut() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let append = || File::options().append(true).open(file.path()).unwrap();
    let mut output = Output::new(append().into(), true);
    let mut job = File::from(output.connect().unwrap());
    job.write_all(b"one\n").unwrap();
    let mark = output.mark().unwrap();
    append().write_all(b"others\n").unwrap();
    job.write_all(b"two\n").unwrap();
    drop(job);
    output.drain()();
    rewind(&output, &mark);
    let mut job = File::from(output.connect().unwrap());
    job.write_all(b"two\nthree\n").unwrap();
    drop(job);
    output.drain()();
    assert_eq!(
        std::fs::read_to_string(file.path()).unwrap(),
        "one\nothers\ntwo\nthree\n"
    );
}

#[test]
fn a_nonblocking_sink_receives_everything() {
    let (mut heard, sink) = io::pipe().unwrap();
    fcntl(&sink, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    let mut output = Output::new(sink.into(), true);
    let mut job = File::from(output.connect().unwrap());
    let text = b"0123456789abcdef".repeat(64 << 10);
    let written = text.clone();
    let writer = thread::spawn(move || job.write_all(&written).unwrap());
    // The test starts reading once the pipe is full.
    while !output.shared.lock().delivering {
        thread::yield_now();
    }
    let mut got = vec![0; text.len()];
    heard.read_exact(&mut got).unwrap();
    assert!(got == text);
    writer.join().unwrap();
    output.drain()();
}

#[test]
fn undeliverable_output_is_reported_once_and_the_job_continues() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut output = Output::new(full.into(), false);
    let mut job = File::from(output.connect().unwrap());
    job.write_all(b"one\n").unwrap();
    drop(job);
    output.drain()();
    assert!(output.shared.lock().lossy);
    assert_eq!(output.mark().unwrap().position, 4);
}

#[test]
fn content_of_an_appended_file_before_the_run_is_not_cut() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "before\n").unwrap();
    let sink = File::options().append(true).open(file.path()).unwrap();
    let mut output = Output::new(sink.into(), true);
    let mut job = File::from(output.connect().unwrap());
    let mark = output.mark().unwrap();
    job.write_all(b"one\n").unwrap();
    drop(job);
    output.drain()();
    rewind(&output, &mark);
    assert_eq!(std::fs::read_to_string(file.path()).unwrap(), "before\n");
}

#[test]
fn a_slow_reader_does_not_delay_the_mark() {
    let (heard, sink) = io::pipe().unwrap();
    let mut output = Output::new(sink.into(), true);
    let job = File::from(output.connect().unwrap());
    fcntl(&job, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    let mut written = 0;
    // Fill every buffer up to the stalled reader. The mark must still be returned.
    loop {
        match (&job).write(&[b'x'; 4096]) {
            Ok(got) => written += got as u64,
            Err(_) if output.shared.lock().delivering => break,
            Err(_) => thread::yield_now(),
        }
    }
    assert_eq!(output.mark().unwrap().position, written);
    drop((job, heard));
    output.drain()();
}

#[test]
fn a_line_of_ckpt_run_waits_for_the_end_of_the_jobs_line() {
    for (rest, whole) in [
        ("2 of the bar]", "\r[1 of the bar]\r[2 of the bar]\nours\n"),
        (
            "2 of the bar]\r[3",
            "\r[1 of the bar]\r[2 of the bar]\nours\n\r[3",
        ),
        (
            "2 of the bar]\nnext",
            "\r[1 of the bar]\r[2 of the bar]\nours\nnext",
        ),
    ] {
        let (mut heard, sink) = io::pipe().unwrap();
        let mut output = Output::new(sink.into(), false);
        // Only the writer of a line delivers output.
        let (read, mut job) = io::pipe().unwrap();
        fcntl(&read, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        output.shared.lock().source = Some(File::from(OwnedFd::from(read)));
        job.write_all(b"\r[1 of the bar]\r[").unwrap();
        output.mark().unwrap();
        job.write_all(rest.as_bytes()).unwrap();
        output.line_writer()("ours\n");
        let mut text = vec![0; whole.len()];
        heard.read_exact(&mut text).unwrap();
        assert_eq!(String::from_utf8_lossy(&text), whole);
        output.drain()();
    }
}
