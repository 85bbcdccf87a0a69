//! Tests of stdin, with pipes instead of the caller and the job.

use std::io::{Read, Write};

use super::*;

#[test]
fn a_restored_job_reads_the_same_bytes_again_and_then_the_rest() {
    let (source, mut caller) = io::pipe().unwrap();
    let mut input = Input::new(Some(File::from(OwnedFd::from(source)))).unwrap();
    let mut job = File::from(input.connect().unwrap());
    input.open();
    caller.write_all(b"abcdef").unwrap();
    let mut two = [0; 2];
    job.read_exact(&mut two).unwrap();
    let mut marked = input.mark().unwrap();
    assert_eq!(marked.position, 2);
    marked.pipe = 0;
    job.read_exact(&mut two).unwrap();
    drop(job);

    assert!(input.rewind(&marked));
    let mut job = File::from(input.connect().unwrap());
    input.open();
    caller.write_all(b"gh").unwrap();
    drop(caller);
    let mut rest = String::new();
    job.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "cdefgh");
}

#[test]
fn input_unread_after_the_callers_end_is_read_again() {
    let (source, mut caller) = io::pipe().unwrap();
    let mut input = Input::new(Some(File::from(OwnedFd::from(source)))).unwrap();
    let mut job = File::from(input.connect().unwrap());
    input.open();
    caller.write_all(b"abcdef").unwrap();
    drop(caller);
    let shared = Arc::clone(input.shared.as_ref().unwrap());
    let mut state = shared.lock();
    while state.unread.is_none() {
        state = shared.changed.wait(state).unwrap();
    }
    drop(state);
    let mut two = [0; 2];
    job.read_exact(&mut two).unwrap();
    let marked = input.mark().unwrap();
    assert_eq!(marked.position, 2);
    drop(job);
    assert!(input.rewind(&marked));
    let mut job = File::from(input.connect().unwrap());
    input.open();
    let mut rest = String::new();
    job.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "cdef");
}

#[test]
fn without_a_caller_the_job_reads_nothing() {
    let mut input = Input::new(None).unwrap();
    let mut text = String::new();
    File::from(input.connect().unwrap())
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "");
    assert_eq!(input.mark().unwrap(), InputMark::default());
}

#[test]
fn a_nonblocking_source_without_data_has_not_ended() {
    let (source, mut caller) = io::pipe().unwrap();
    let source = File::from(OwnedFd::from(source));
    nix::fcntl::fcntl(&source, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    let mut input = Input::new(Some(source)).unwrap();
    let mut job = File::from(input.connect().unwrap());
    input.open();
    // No input arrives between the letters.
    for letter in b"abc" {
        caller.write_all(&[*letter]).unwrap();
        let mut one = [0];
        job.read_exact(&mut one).unwrap();
        assert_eq!(one[0], *letter);
    }
    drop(caller);
    assert_eq!(job.read(&mut [0]).unwrap(), 0);
}
