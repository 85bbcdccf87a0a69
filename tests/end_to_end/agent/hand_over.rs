#![allow(unsafe_code, reason = "stops threads by ptrace")]
//! Release and mapping of memory: results, failures, and threads that block them.

use std::process::Command;
use std::time::Instant;

use ckpt_run::agent_client::{AgentError, Channel};
use nix::libc;

use super::agent_job::{A_MOMENT, CONTEXT_LEN, Job, LIMIT, MIB, SOON, WAYS, Way, own_descriptors};
use crate::harness::fake_gpu::FakeGpu;

#[test]
fn memory_is_restored_for_all_ways_to_find_the_driver() {
    for way in WAYS {
        let gpu = FakeGpu::new();
        let mut job = Job::ready(&gpu, way);
        let sizes = [2 * MIB, 20 * MIB, 8 * MIB - 8];
        let addresses = sizes.map(|len| job.alloc(len));
        for (address, len) in addresses.iter().zip(sizes) {
            assert_eq!(job.ask(&format!("write {address} {len} {address}")), "0");
        }
        assert_eq!(job.segments(), 3, "{way:?}");
        let all = 30 * MIB as u64;
        assert_eq!(job.holdings(), [(0, all, 0)]);
        // From the second round on the memory is imported.
        for round in 0..3 {
            let used = gpu.used_bytes(0);
            let held = job.release();
            assert_eq!(held.len(), 3);
            gpu.assert_used(0, used, "held by the descriptors");
            let hello = job.hello().unwrap();
            assert!(hello.released && hello.bytes == all);
            assert_eq!(
                job.ask("descriptors"),
                own_descriptors(0, 1),
                "none at the checkpoint"
            );
            job.map(&held);
            drop(held);
            let hello = job.hello().unwrap();
            assert!(!hello.released && hello.imported, "{round}");
            assert_eq!(job.holdings(), [(0, all, all)]);
            let own = job.alloc(2 * MIB);
            assert_eq!(job.holdings(), [(0, all + 2 * MIB as u64, all)]);
            assert_eq!(job.ask(&format!("free {own}")), "0");
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
        assert_eq!(job.holdings(), []);
        gpu.assert_used(0, CONTEXT_LEN, &format!("{way:?}"));
    }
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
    // The reply differs until the thread has arrived.
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
fn late_segments_are_kept_for_the_next_request() {
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
fn blocked_driver_is_noticed_and_hello_works() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    job.alloc(4 * MIB);
    let gate = gpu.folder().join("gate");
    assert_eq!(job.ask(&format!("hold {}", gate.display())), "begun");
    let mut channel = Channel::bind().unwrap();
    let mut agent = job.agent(&mut channel);
    // Until the thread is inside the driver, the reply differs. This request is the last that is answered.
    while agent.hello(LIMIT).unwrap().is_some() && agent.probe(SOON).is_ok() {}
    std::fs::write(&gate, "").unwrap();
    agent.probe(LIMIT).unwrap();
    let held = agent.release(LIMIT).unwrap();
    agent.map(&held, LIMIT).unwrap();
}

#[test]
fn calls_that_are_held_back_wait_outside_the_driver() {
    for way in WAYS {
        let gpu = FakeGpu::new();
        let mut job = Job::ready(&gpu, way);
        let address = job.alloc(4 * MIB);
        let begun = Instant::now();
        let mut channel = Channel::bind().unwrap();
        job.agent(&mut channel).hold(LIMIT).unwrap();
        job.tell(&format!("write {address} {} 4", 4 * MIB));
        assert_eq!(job.hear(), "0");
        // Without a word of the supervisor.
        assert!(begun.elapsed() > SOON, "{way:?}");
        job.agent(&mut channel).hold(LIMIT).unwrap();
        let held = job.release();
        job.map(&held);
        job.agent(&mut channel).pass(LIMIT).unwrap();
        assert_eq!(job.ask(&format!("check {address} {} 4", 4 * MIB)), "true");
    }
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
    // A repeated request changes nothing.
    let again = job.agent(&mut Channel::bind().unwrap()).release(LIMIT);
    assert!(matches!(again, Err(AgentError::AlreadyReleased { .. })));
    job.map(&held);
    let mut answers = [job.hear(), job.hear()];
    answers.sort();
    assert_eq!(answers[0], "0");
    assert!(answers[1].starts_with("later 0 "));
    drop(held);
    assert_eq!(job.segments(), 1);
    gpu.assert_used(
        0,
        CONTEXT_LEN + 6 * MIB as u64,
        "what was allocated meanwhile",
    );
}

#[test]
fn failed_release_is_undone() {
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
                // Own memory may stay with the process; imported memory needs no export.
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
    gpu.assert_used(0, CONTEXT_LEN, "all was freed");
}

/// All threads of a process but one, stopped as the supervisor stops them; continued on drop.
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
        // SAFETY: none of these requests reads or writes this process's memory.
        unsafe {
            // A thread that has just exited is skipped.
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
