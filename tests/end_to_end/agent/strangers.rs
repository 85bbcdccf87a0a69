//! Programs that the agent leaves alone: without a token, without CUDA, forked children; and senders that it ignores.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Instant;

use ckpt_run::agent_client::{AgentError, Channel, Token, environment};

use super::agent_job::{Job, LIMIT, MIB, WAYS, Way, library, own_descriptors};
use crate::harness::fake_gpu::FakeGpu;

#[test]
fn without_a_token_nothing_is_done() {
    let gpu = FakeGpu::new();
    let token = Token::random().unwrap();
    let preload = environment(library(), &token, None).remove(0);
    let wrong = |value: &str| vec![preload.clone(), ("CKPT_RUN_AGENT".into(), value.into())];
    let environments = [
        vec![preload.clone()],
        wrong("x"),
        wrong(&format!("{token}0")),
        wrong(""),
    ];
    for set in environments {
        for way in WAYS {
            let mut job = Job::with(&gpu, way, token, &set);
            assert_eq!(job.ask("init"), "0 0 0");
            job.alloc(8 * MIB);
            assert_eq!(job.hello(), None);
            assert_eq!(job.ask("descriptors"), own_descriptors(0, 0));
        }
    }
}

#[test]
fn looking_for_the_driver_everywhere_finds_it_only_where_it_is() {
    let gpu = FakeGpu::new();
    let token = Token::random().unwrap();
    let mut set = environment(library(), &token, None);
    for _ in 0..2 {
        let mut job = Job::with(&gpu, Way::Looking, token, &set);
        assert_eq!(job.ask("global cuMemAlloc_v2"), "false");
        assert_eq!(job.ask("global malloc"), "true");
        set.truncate(1);
    }
    let mut job = Job::new(&gpu, Way::Linked);
    assert_eq!(job.ask("global cuMemAlloc_v2"), "true");
    assert_eq!(job.ask("global cuNothing"), "false");
}

#[test]
fn a_forked_child_has_nothing_and_takes_nothing_along() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    let address = job.alloc(4 * MIB);
    job.ask(&format!("write {address} {} 3", 4 * MIB));
    job.map(&job.release());
    assert_eq!(job.ask("descriptors"), own_descriptors(1, 1));
    assert_eq!(
        job.ask(&format!("fork {address}")),
        format!("0 free 3 alloc 3 {}", own_descriptors(0, 0))
    );
    job.map(&job.release());
    assert_eq!(job.ask(&format!("check {address} {} 3", 4 * MIB)), "true");
}

#[test]
fn another_program_in_the_same_process_starts_fresh() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    job.alloc(4 * MIB);
    job.map(&job.release());
    assert_eq!(job.ask("exec"), "executing");
    assert_eq!(job.ask("descriptors"), "memory 0 sockets 0");
    assert_eq!(job.hello(), None);
    assert_eq!(job.ask("init"), "0 0 0");
    job.alloc(4 * MIB);
    assert_eq!(job.segments(), 1);
}

#[test]
fn strangers_and_nonsense_change_nothing() {
    use std::os::linux::net::SocketAddrExt;
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    let address = job.alloc(4 * MIB);
    job.ask(&format!("write {address} {} 9", 4 * MIB));
    let name = format!("ckpt-run-agent/{}/{}", job.token, job.pid());
    let name = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let socket = UnixDatagram::unbound().unwrap();
    let mut runner = proptest::test_runner::TestRunner::new(proptest::test_runner::Config {
        cases: 500,
        failure_persistence: None,
        ..Default::default()
    });
    // Valid values are more likely to be accepted; 3 and 4 would be requests.
    let words = proptest::collection::vec(
        proptest::prop_oneof![
            proptest::prelude::Just(u32::from_ne_bytes(*b"ckpA")),
            0u32..8,
            proptest::prelude::any::<u32>()
        ],
        0..12,
    );
    runner
        .run(&words, |words| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            bytes.truncate(bytes.len().saturating_sub(words.len() % 3));
            // Even a complete request to release is ignored: its socket has no address for a reply.
            socket.send_to_addr(&bytes, &name).unwrap();
            Ok(())
        })
        .unwrap();
    let mut channel = Channel::bind().unwrap();
    let begun = Instant::now();
    let hello = loop {
        // Until the agent has read all datagrams, there is no room for a request.
        match job.agent(&mut channel).hello(LIMIT) {
            Err(AgentError::TimedOut { .. }) if begun.elapsed() < LIMIT => {}
            answered => break answered.unwrap().unwrap(),
        }
    };
    assert_eq!((hello.segments, hello.bytes), (1, 4 * MIB as u64));
    assert_eq!(job.ask(&format!("check {address} {} 9", 4 * MIB)), "true");
}

#[test]
fn other_programs_run_as_ever() {
    let token = Token::random().unwrap();
    for command in [
        &["true"][..],
        &["bash", "-c", "echo $((1+2)); (exit 3); echo $?"],
        &["sh", "-c", "echo hello | cat"],
        &[
            "python3",
            "-c",
            "import ctypes, socket, ssl, json; print(ctypes.CDLL(None).getpid() > 0)",
        ],
    ] {
        let run = |set: Vec<(std::ffi::OsString, std::ffi::OsString)>| {
            let output = Command::new(command[0])
                .args(&command[1..])
                .envs(set)
                .output()
                .unwrap();
            (output.status, output.stdout, output.stderr)
        };
        assert_eq!(
            run(environment(library(), &token, None)),
            run(Vec::new()),
            "{command:?}"
        );
    }
}
