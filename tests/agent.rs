//! The agent in real processes, on the fake GPU: what a program sees of it, and what the supervisor gets from it.
#![allow(unsafe_code, reason = "stops threads by ptrace")]

#[path = "common/fake_gpu.rs"]
mod fake_gpu;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ckpt_run::resident::{Agent, AgentError, Channel, Held, Hello, Token, environment, install};
use fake_gpu::FakeGpu;
use nix::libc;

/// Longest wait for anything.
const LIMIT: Duration = Duration::from_secs(20);
/// Long for a driver that nobody holds.
const A_MOMENT: Duration = Duration::from_millis(40);
/// Shortest that shows that nothing comes.
const SOON: Duration = Duration::from_millis(300);
const MIB: usize = 1 << 20;
/// What a context takes on the fake GPU.
const CONTEXT_LEN: u64 = 1 << 20;

/// How a program finds the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Looking,
    Asking,
    Linked,
}

const WAYS: [Way; 3] = [Way::Looking, Way::Asking, Way::Linked];

/// `tests/agent/program.rs`, built once for each of the two kinds.
fn program(way: Way) -> &'static Path {
    static PROGRAMS: OnceLock<[PathBuf; 2]> = OnceLock::new();
    let programs = PROGRAMS.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent/program.rs");
        let folder = fake_gpu::library();
        // The linker wants a name without a version.
        let linked = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(
            folder.join("libcuda.so.1"),
            linked.path().join("libcuda.so"),
        )
        .unwrap();
        let search = format!("-L{}", linked.path().display());
        let build = |name: &str, options: &[&str]| {
            let file = tempfile::NamedTempFile::new_in(fake_gpu::build_folder()).unwrap();
            let path = file.into_temp_path();
            let unexpected = ["--check-cfg=cfg(linked)"];
            fake_gpu::rustc(&source, &path, &[options, &unexpected].concat());
            let program = fake_gpu::build_folder().join(format!("agent-program-{name}"));
            path.persist(&program).unwrap();
            program
        };
        [
            build("plain", &[]),
            build("linked", &["--cfg", "linked", &search]),
        ]
    });
    &programs[usize::from(way == Way::Linked)]
}

/// Sockets of a program that uses the driver, without the agent: the fake has one.
const SOCKETS: usize = 1;

fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = fake_gpu::build_folder().join("agent-library");
        std::fs::create_dir_all(&folder).unwrap();
        install(&folder).unwrap()
    })
}

/// A program under the agent.
struct Job {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    token: Token,
}

impl Job {
    fn new(gpu: &FakeGpu, way: Way) -> Self {
        let token = Token::random().unwrap();
        Self::with(gpu, way, token, &environment(library(), &token, None))
    }

    /// Of the same run as another.
    fn beside(gpu: &FakeGpu, other: &Self, way: Way) -> Self {
        let set = environment(library(), &other.token, None);
        let mut job = Self::with(gpu, way, other.token, &set);
        assert_eq!(job.ask("init"), "0 0 0");
        job
    }

    /// Without the agent.
    fn bare(gpu: &FakeGpu, way: Way) -> Self {
        Self::with(gpu, way, Token::random().unwrap(), &[])
    }

    fn with(
        gpu: &FakeGpu,
        way: Way,
        token: Token,
        set: &[(std::ffi::OsString, std::ffi::OsString)],
    ) -> Self {
        let mut command = Command::new(program(way));
        if way == Way::Asking {
            command.arg("asking");
        }
        command.envs(gpu.environment()).envs(set.iter().cloned());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let input = child.stdin.take().unwrap();
        Self {
            child,
            input,
            lines,
            token,
        }
    }

    /// Started, with CUDA in use.
    fn ready(gpu: &FakeGpu, way: Way) -> Self {
        let mut job = Self::new(gpu, way);
        assert_eq!(job.ask("init"), "0 0 0");
        job
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    fn hear(&self) -> String {
        self.lines
            .recv_timeout(LIMIT)
            .expect("an answer of the program")
    }

    fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }

    fn alloc(&mut self, len: usize) -> u64 {
        let answer = self.ask(&format!("alloc {len}"));
        let (code, address) = answer.split_once(' ').unwrap();
        assert_eq!(code, "0");
        address.parse().unwrap()
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn agent<'a>(&self, channel: &'a mut Channel) -> Agent<'a> {
        channel.agent(&self.token, self.pid())
    }

    fn hello(&self) -> Option<Hello> {
        self.agent(&mut Channel::bind().unwrap())
            .hello(LIMIT)
            .unwrap()
    }

    fn segments(&self) -> u32 {
        self.hello().map_or(0, |hello| hello.segments)
    }

    fn release(&self) -> Vec<Held> {
        self.agent(&mut Channel::bind().unwrap())
            .release(LIMIT)
            .unwrap()
    }

    fn map(&self, held: &[Held]) {
        self.agent(&mut Channel::bind().unwrap())
            .map(held, LIMIT)
            .unwrap();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn own_descriptors(memory: usize, sockets: usize) -> String {
    format!("memory {memory} sockets {}", sockets + SOCKETS)
}

#[test]
fn memory_comes_back_as_it_was_whichever_way_the_driver_was_found() {
    for way in WAYS {
        let gpu = FakeGpu::new();
        let mut job = Job::ready(&gpu, way);
        let sizes = [2 * MIB, 20 * MIB, 8 * MIB - 8];
        let addresses = sizes.map(|len| job.alloc(len));
        for (address, len) in addresses.iter().zip(sizes) {
            assert_eq!(job.ask(&format!("write {address} {len} {address}")), "0");
        }
        assert_eq!(job.segments(), 3, "{way:?}");
        // The second time the memory is imported.
        for round in 0..3 {
            let used = gpu.used_bytes(0);
            let held = job.release();
            assert_eq!(held.len(), 3);
            assert_eq!(gpu.used_bytes(0), used, "held by the descriptors");
            let hello = job.hello().unwrap();
            assert!(hello.released && hello.bytes == 30 * MIB as u64);
            assert_eq!(
                job.ask("descriptors"),
                own_descriptors(0, 1),
                "none at the checkpoint"
            );
            job.map(&held);
            drop(held);
            let hello = job.hello().unwrap();
            assert!(!hello.released && hello.imported, "{round}");
            for (address, len) in addresses.iter().zip(sizes) {
                assert_eq!(job.ask(&format!("check {address} {len} {address}")), "true");
            }
        }
        for address in addresses {
            assert_eq!(job.ask(&format!("free {address}")), "0");
        }
        assert_eq!(job.ask("descriptors"), own_descriptors(0, 1));
        let hello = job.hello().unwrap();
        assert_eq!((hello.segments, hello.bytes, hello.imported), (0, 0, false));
        assert_eq!(gpu.used_bytes(0), CONTEXT_LEN, "{way:?}");
    }
}

#[test]
fn small_and_badly_rounded_pieces_stay_the_drivers() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    for len in [1, 4096, 2 * MIB - 1, 2 * MIB + 1, 5 * MIB, 7 * MIB] {
        let address = job.alloc(len);
        assert_eq!(job.segments(), 0, "{len}");
        assert_eq!(job.ask(&format!("free {address}")), "0");
    }
    let address = job.alloc(18 * MIB + MIB - MIB / 8);
    assert_eq!(job.segments(), 1);
    assert_eq!(job.ask(&format!("free {address}")), "0");
}

#[test]
fn a_range_is_what_was_asked_for() {
    let gpu = FakeGpu::new();
    let (mut job, mut bare) = (Job::ready(&gpu, Way::Asking), Job::bare(&gpu, Way::Asking));
    bare.ask("init");
    for job in [&mut job, &mut bare] {
        let len = 20 * MIB - 4096;
        let address = job.alloc(len);
        for inside in [address, address + 1, address + len as u64 - 1] {
            assert_eq!(
                job.ask(&format!("range {inside}")),
                format!("0 {address} {len}")
            );
        }
        assert_ne!(
            job.ask(&format!("range {}", address + (20 * MIB) as u64))
                .split(' ')
                .next(),
            Some("0")
        );
        // Freed in its middle, or twice, it is the driver's answer.
        assert_eq!(job.ask(&format!("free {}", address + 8)), "1");
        assert_eq!(job.ask(&format!("free {address}")), "0");
        assert_eq!(job.ask(&format!("free {address}")), "1");
    }
}

#[test]
fn a_full_gpu_answers_as_without_the_agent() {
    let gpu = FakeGpu::with(1, 64);
    let mut job = Job::ready(&gpu, Way::Looking);
    let first = job.alloc(40 * MIB);
    assert_eq!(job.ask(&format!("alloc {}", 40 * MIB)), "2 0");
    assert_eq!(job.segments(), 1);
    assert_eq!(job.ask(&format!("free {first}")), "0");
    assert_eq!(job.ask("enter 9"), "0");
    assert_eq!(
        job.ask(&format!("alloc {}", 4 * MIB)),
        "201 0",
        "no context"
    );
    assert_eq!(
        gpu.used_bytes(0),
        CONTEXT_LEN,
        "nothing is left of what failed"
    );
}

#[test]
fn each_failing_call_of_an_allocation_leaves_nothing_behind() {
    for call in [
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
    ] {
        let gpu = FakeGpu::new();
        let mut job = Job::ready(&gpu, Way::Looking);
        std::fs::write(gpu.folder().join("fail"), format!("{call}:0:2")).unwrap();
        let address = job.alloc(4 * MIB);
        assert_eq!(job.segments(), 0, "{call}");
        assert_eq!(
            gpu.used_bytes(0),
            CONTEXT_LEN + 4 * MIB as u64,
            "the driver's own alone"
        );
        assert_eq!(job.ask(&format!("free {address}")), "0");
        std::fs::write(gpu.folder().join("fail"), "").unwrap();
        job.alloc(4 * MIB);
        assert_eq!(job.segments(), 1, "{call}");
    }
}

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
fn memory_goes_with_its_context() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    let kept = job.alloc(4 * MIB);
    assert_eq!(job.ask("context 1 1"), "0");
    job.alloc(6 * MIB);
    job.alloc(8 * MIB);
    assert_eq!(job.segments(), 3);
    assert_eq!(job.ask("destroy 1"), "0");
    assert_eq!(job.segments(), 1);
    assert_eq!(gpu.used_bytes(1), 0);
    assert_eq!(job.ask("enter 0"), "0");
    assert_eq!(job.ask(&format!("write {kept} {} 1", 4 * MIB)), "0");
    assert_eq!(job.ask("reset 0"), "0");
    assert_eq!(job.segments(), 0);
    assert_eq!(gpu.used_bytes(0), 0);
}

#[test]
fn a_thread_inside_the_agent_makes_it_busy_and_loses_nothing() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    job.alloc(4 * MIB);
    let gate = gpu.folder().join("gate");
    let rule = format!("cuMemCreate:2:{}", gate.display());
    std::fs::write(gpu.folder().join("hang"), rule).unwrap();
    assert_eq!(job.ask(&format!("later-alloc {}", 6 * MIB)), "begun");
    // Until the thread has arrived the answer is another.
    let busy = loop {
        let mut channel = Channel::bind().unwrap();
        match job.agent(&mut channel).release(LIMIT) {
            Ok(held) => job.map(&held),
            Err(error) => break error,
        }
    };
    assert!(matches!(busy, AgentError::Busy { .. }), "{busy}");
    let probed = job.agent(&mut Channel::bind().unwrap()).probe(LIMIT);
    assert!(matches!(probed, Err(AgentError::Busy { .. })), "{probed:?}");
    std::fs::write(&gate, "").unwrap();
    let later = job.hear();
    assert!(later.starts_with("later 0 "), "{later}");
    let held = job.release();
    assert_eq!(held.len(), 2);
    job.map(&held);
}

#[test]
fn what_came_too_late_is_kept_for_the_next_to_ask() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    let address = job.alloc(4 * MIB);
    job.alloc(6 * MIB);
    job.ask(&format!("write {address} {} 4", 4 * MIB));
    let gate = gpu.folder().join("gate");
    let rule = format!("cuMemUnmap:0:{}", gate.display());
    std::fs::write(gpu.folder().join("hang"), rule).unwrap();
    let mut channel = Channel::bind().unwrap();
    let mut agent = job.agent(&mut channel);
    for _ in 0..2 {
        let late = agent.release(SOON);
        assert!(matches!(late, Err(AgentError::TimedOut { .. })), "{late:?}");
    }
    std::fs::write(&gate, "").unwrap();
    assert!(agent.hello(LIMIT).unwrap().unwrap().released);
    let held = agent.release(LIMIT).unwrap();
    assert_eq!(held.len(), 2);
    agent.map(&held, LIMIT).unwrap();
    assert_eq!(job.ask(&format!("check {address} {} 4", 4 * MIB)), "true");
}

#[test]
fn a_driver_that_lets_nobody_in_is_noticed_and_hinders_no_greeting() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    job.alloc(4 * MIB);
    let gate = gpu.folder().join("gate");
    assert_eq!(job.ask(&format!("hold {}", gate.display())), "begun");
    let mut channel = Channel::bind().unwrap();
    let mut agent = job.agent(&mut channel);
    // Until the thread is inside, the answer is another. While it is, this is the last that is answered.
    while agent.hello(LIMIT).unwrap().is_some() && agent.probe(SOON).is_ok() {}
    std::fs::write(&gate, "").unwrap();
    agent.probe(LIMIT).unwrap();
    let held = agent.release(LIMIT).unwrap();
    agent.map(&held, LIMIT).unwrap();
}

#[test]
fn memory_is_shared_between_processes_of_a_run() {
    for way in WAYS {
        let gpu = FakeGpu::new();
        let mut owner = Job::ready(&gpu, way);
        let mut user = Job::beside(&gpu, &owner, way);
        let len = 8 * MIB - 4096;
        let address = owner.alloc(len);
        assert!(!owner.hello().unwrap().shares);
        let answer = owner.ask(&format!("export {}", address + 4096));
        let (code, handle) = answer.split_once(' ').unwrap();
        assert_eq!(code, "0");
        assert!(owner.hello().unwrap().shares);
        owner.ask(&format!("write {address} {len} 1"));
        // Also memory that the supervisor has given back, and while it has it.
        for round in 0..2 {
            let (open, held) = (format!("open {handle}"), owner.release());
            user.tell(&open);
            assert!(user.lines.recv_timeout(SOON).is_err());
            owner.map(&held);
            let answer = user.hear();
            let there = answer.strip_prefix("0 ").unwrap();
            assert_eq!(user.ask(&open), answer, "the same again");
            assert_eq!(
                user.ask(&format!("range {there}")),
                format!("0 {there} {len}")
            );
            assert_eq!(
                user.ask(&format!("check {there} {len} {}", 1 + round)),
                "true"
            );
            assert_eq!(user.ask(&format!("write {there} {len} {}", 2 + round)), "0");
            assert_eq!(
                owner.ask(&format!("check {address} {len} {}", 2 + round)),
                "true"
            );
            let hello = user.hello().unwrap();
            assert!(hello.shares && hello.imported && hello.segments == 1);
            assert_eq!(user.ask(&format!("free {there}")), "1", "as the driver");
            assert_ne!(
                user.ask(&format!("export {there}")).split(' ').next(),
                Some("0")
            );
            assert_eq!(user.ask(&format!("close {there}")), "0");
            assert_eq!(
                user.ask(&format!("check {there} {len} {}", 2 + round)),
                "true"
            );
            assert_eq!(user.ask(&format!("close {there}")), "0");
            assert_eq!(
                user.ask(&format!("close {there}")),
                "1",
                "the driver's answer"
            );
            assert_eq!(user.hello().unwrap().segments, 0);
            assert_eq!(user.ask("descriptors"), own_descriptors(0, 1));
        }
        assert_eq!(owner.ask(&format!("close {address}")), "1");
        assert_eq!(owner.ask(&format!("free {address}")), "0");
        assert_eq!(gpu.used_bytes(0), 2 * CONTEXT_LEN);
    }
}

#[test]
fn a_handle_that_leads_nowhere_is_an_error() {
    let gpu = FakeGpu::new();
    let mut owner = Job::ready(&gpu, Way::Looking);
    let mut user = Job::beside(&gpu, &owner, Way::Looking);
    let mut stranger = Job::ready(&gpu, Way::Looking);
    let address = owner.alloc(4 * MIB);
    let answer = owner.ask(&format!("export {address}"));
    let handle = answer.strip_prefix("0 ").unwrap().to_owned();
    assert_eq!(owner.ask(&format!("open {handle}")), "201 0", "its own");
    assert_eq!(
        stranger.ask(&format!("open {handle}")),
        "1 0",
        "the driver's answer"
    );
    assert_eq!(
        user.ask(&format!("open {}", "00".repeat(64))),
        "1 0",
        "the driver's answer"
    );
    let other_number = format!("{}ff{}", &handle[..80], &handle[82..]);
    assert_eq!(user.ask(&format!("open {other_number}")), "1 0");
    for call in [
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ] {
        std::fs::write(gpu.folder().join("fail"), format!("{call}:0:2")).unwrap();
        assert_eq!(user.ask(&format!("open {handle}")), "2 0", "{call}");
        std::fs::write(gpu.folder().join("fail"), "").unwrap();
        assert_eq!(user.ask("descriptors").split(' ').nth(1), Some("0"));
    }
    let answer = user.ask(&format!("open {handle}"));
    let there = answer.strip_prefix("0 ").unwrap();
    assert_eq!(user.ask(&format!("close {there}")), "0");
    assert_eq!(owner.ask(&format!("free {address}")), "0");
    assert_eq!(user.ask(&format!("open {handle}")), "1 0", "freed");
    drop(owner);
    assert_eq!(user.ask(&format!("open {handle}")), "1 0", "gone");
    assert_eq!(gpu.used_bytes(0), 2 * CONTEXT_LEN);
}

#[test]
fn who_wants_memory_while_it_is_released_waits() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Asking);
    let address = job.alloc(4 * MIB);
    let held = job.release();
    assert_eq!(job.ask(&format!("later-alloc {}", 6 * MIB)), "begun");
    job.tell(&format!("free {address}"));
    assert!(job.lines.recv_timeout(SOON).is_err());
    // What is repeated changes nothing.
    let again = job.agent(&mut Channel::bind().unwrap()).release(LIMIT);
    assert!(matches!(again, Err(AgentError::AlreadyReleased { .. })));
    job.map(&held);
    let mut answers = [job.hear(), job.hear()];
    answers.sort();
    assert_eq!(answers[0], "0");
    assert!(answers[1].starts_with("later 0 "));
    drop(held);
    assert_eq!(job.segments(), 1);
    assert_eq!(gpu.used_bytes(0), CONTEXT_LEN + 6 * MIB as u64);
}

#[test]
fn what_fails_in_a_release_is_undone() {
    for imported in [false, true] {
        for rule in [
            "cuMemExportToShareableHandle:0:2",
            "cuMemUnmap:0:999",
            "cuDeviceGetUuid:0:999",
            "cuMemRelease:0:999",
        ] {
            let gpu = FakeGpu::new();
            let mut job = Job::ready(&gpu, Way::Looking);
            let addresses = [4, 6, 8].map(|mib| job.alloc(mib * MIB));
            for address in addresses {
                job.ask(&format!("write {address} {} 5", 4 * MIB));
            }
            if imported {
                job.map(&job.release());
            }
            std::fs::write(gpu.folder().join("fail"), rule).unwrap();
            let released = job.agent(&mut Channel::bind().unwrap()).release(LIMIT);
            std::fs::write(gpu.folder().join("fail"), "").unwrap();
            match released {
                Err(AgentError::Driver { code, .. }) => assert!([2, 999].contains(&code)),
                // Own memory may stay with the process, imported needs no export.
                Ok(held) => {
                    assert_eq!(imported, rule.contains("Export"), "{rule}");
                    job.map(&held);
                }
                Err(other) => panic!("{rule}: {other}"),
            }
            let hello = job.hello().unwrap();
            assert!(!hello.released && hello.segments == 3);
            for address in addresses {
                assert_eq!(
                    job.ask(&format!("check {address} {} 5", 4 * MIB)),
                    "true",
                    "{rule}"
                );
            }
            job.map(&job.release());
            for address in addresses {
                assert_eq!(
                    job.ask(&format!("check {address} {} 5", 4 * MIB)),
                    "true",
                    "{rule}"
                );
                assert_eq!(job.ask(&format!("free {address}")), "0");
            }
        }
    }
}

#[test]
fn a_mapping_that_fails_can_be_repeated() {
    for call in [
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemSetAccess",
    ] {
        let gpu = FakeGpu::new();
        let mut job = Job::ready(&gpu, Way::Looking);
        let addresses = [4, 6, 8].map(|mib| job.alloc(mib * MIB));
        for address in addresses {
            job.ask(&format!("write {address} {} 7", 4 * MIB));
        }
        let held = job.release();
        std::fs::write(gpu.folder().join("fail"), format!("{call}:0:2")).unwrap();
        let mapped = job.agent(&mut Channel::bind().unwrap()).map(&held, LIMIT);
        assert!(
            matches!(mapped, Err(AgentError::Driver { code: 2, .. })),
            "{mapped:?}"
        );
        assert!(job.hello().unwrap().released);
        std::fs::write(gpu.folder().join("fail"), "").unwrap();
        job.map(&held);
        job.map(&held);
        drop(held);
        for address in addresses {
            assert_eq!(
                job.ask(&format!("check {address} {} 7", 4 * MIB)),
                "true",
                "{call}"
            );
        }
    }
}

#[test]
fn more_pieces_than_a_datagram_takes_come_in_order() {
    let gpu = FakeGpu::with(1, 2048);
    let mut job = Job::ready(&gpu, Way::Looking);
    let addresses: Vec<u64> = (0..150).map(|_| job.alloc(2 * MIB)).collect();
    for address in &addresses {
        assert_eq!(job.ask(&format!("write {address} 4096 {address}")), "0");
    }
    for _ in 0..2 {
        let held = job.release();
        assert_eq!(held.len(), 150);
        assert!(held.is_sorted_by_key(|held| held.segment.address));
        job.map(&held);
    }
    for address in &addresses {
        assert_eq!(job.ask(&format!("check {address} 4096 {address}")), "true");
    }
}

#[test]
fn a_job_with_few_descriptors_gets_more() {
    let gpu = FakeGpu::with(1, 2048);
    let mut job = Job::ready(&gpu, Way::Looking);
    let addresses: Vec<u64> = (0..150).map(|_| job.alloc(2 * MIB)).collect();
    let limit = |soft: &str| {
        let mut command = Command::new("prlimit");
        command.args([
            &format!("--pid={}", job.pid()),
            &format!("--nofile={soft}:4096"),
        ]);
        assert!(command.status().unwrap().success());
    };
    limit("40");
    let held = job.release();
    limit("40");
    job.map(&held);
    drop(held);
    for address in &addresses {
        assert_eq!(job.ask(&format!("free {address}")), "0");
    }
    assert_eq!(gpu.used_bytes(0), CONTEXT_LEN);
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
fn another_program_in_the_same_process_begins_anew() {
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

/// All threads of a process but one, stopped as the supervisor stops them; let go on drop.
struct Stopped(Vec<i32>);

impl Stopped {
    fn all_but(pid: i32, thread: i32) -> Self {
        let mut stopped = Self(Vec::new());
        // A thread may start another until it is stopped itself.
        loop {
            let known = stopped.0.len();
            for entry in std::fs::read_dir(format!("/proc/{pid}/task"))
                .unwrap()
                .flatten()
            {
                let found: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
                if found != thread && !stopped.0.contains(&found) {
                    stopped.stop(found);
                }
            }
            if stopped.0.len() == known {
                return stopped;
            }
        }
    }

    fn stop(&mut self, thread: i32) {
        // SAFETY: none of these requests reads or writes memory of ours.
        unsafe {
            // One that has just ended is no matter.
            if libc::ptrace(libc::PTRACE_SEIZE, thread, 0, 0) == 0 {
                libc::ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0);
                let mut status = 0;
                libc::waitpid(thread, &raw mut status, libc::__WALL);
                if libc::WIFSTOPPED(status) {
                    self.0.push(thread);
                }
            }
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for thread in &self.0 {
            // SAFETY: as above.
            unsafe { libc::ptrace(libc::PTRACE_DETACH, *thread, 0, 0) };
        }
    }
}

#[test]
fn many_threads_keep_their_memory_through_many_releases() {
    let gpu = FakeGpu::with(1, 4096);
    let mut job = Job::ready(&gpu, Way::Asking);
    job.alloc(2 * MIB);
    let thread = job.hello().unwrap().thread;
    job.tell("churn 6 30");
    let (mut released, mut refused) = (0, 0);
    let answer = loop {
        if let Ok(answer) = job.lines.try_recv() {
            break answer;
        }
        let mut channel = Channel::bind().unwrap();
        let mut agent = job.agent(&mut channel);
        let stopped = Stopped::all_but(job.pid(), thread);
        match agent.probe(A_MOMENT) {
            Ok(()) => {
                let held = agent.release(LIMIT).unwrap();
                agent.map(&held, LIMIT).unwrap();
                released += 1;
            }
            Err(AgentError::Busy { .. } | AgentError::TimedOut { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        drop(stopped);
        agent.hello(LIMIT).unwrap();
    };
    eprintln!("{released} releases, {refused} times a thread was inside");
    assert_eq!(answer, "0");
    assert!(released > 0);
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
    // Words that mean something are more likely to be understood; 3 and 4 would be requests.
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
            // A whole request to release is none of these: it comes from a socket that cannot be answered.
            socket.send_to_addr(&bytes, &name).unwrap();
            Ok(())
        })
        .unwrap();
    let hello = job.hello().unwrap();
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
