//! Memory that a program creates and maps itself: the same as without the agent, also after a release.

use proptest::prelude::*;
use proptest::test_runner::Config;

use super::agent_job::{CONTEXT_LEN, Job, MIB, WAYS, Way, own_descriptors};
use crate::harness::fake_gpu::FakeGpu;

const LEN: usize = 2 * MIB;

/// Releases all memory and maps it again; returns the number of pieces.
fn snapshot(job: &Job) -> usize {
    let held = job.release();
    job.map(&held);
    held.len()
}

fn all(job: &mut Job, lines: &[&str]) {
    for line in lines {
        let answer = job.ask(line);
        assert!(
            answer == "0" || answer == "0 true" || answer == "true",
            "{line}: {answer}"
        );
    }
}

#[test]
fn a_program_finds_its_mappings_after_a_release() {
    for way in WAYS {
        let gpu = FakeGpu::new();
        let mut job = Job::ready(&gpu, way);
        let range = format!("reserve range {}", 16 * LEN);
        let lines = [
            &*range,
            "create twice 4194304 0",
            "map range 0 4194304 twice",
            "map range 8388608 4194304 twice",
            "access range 0 4194304 3",
            "access range 8388608 4194304 3",
            "put range 0 4194304 1",
            "create dropped 2097152 1",
            "map range 4194304 2097152 dropped",
            "access range 4194304 2097152 3",
            "drop dropped",
            "put range 4194304 2097152 2",
            "create asleep 2097152 0",
            "map range 6291456 2097152 asleep",
            "access range 6291456 2097152 3",
            "put range 6291456 2097152 3",
            "unmap range 6291456 2097152",
        ];
        all(&mut job, &lines);
        let bytes = 8 * MIB as u64;
        for round in 0..3 {
            let used = gpu.used_bytes(0);
            let held = job.release();
            assert_eq!(held.len(), 3, "{way:?} {round}");
            gpu.assert_used(0, used, "held by the descriptors");
            assert_eq!(job.ask("descriptors"), own_descriptors(0, 1));
            job.map(&held);
            drop(held);
            assert_eq!(job.holdings(), [(0, bytes, bytes)]);
            let lines = [
                "look range 0 4194304 1",
                "look range 8388608 4194304 1",
                "look range 4194304 2097152 2",
                "map range 6291456 2097152 asleep",
                "access range 6291456 2097152 3",
                "look range 6291456 2097152 3",
                "unmap range 6291456 2097152",
            ];
            all(&mut job, &lines);
        }
        let lines = [
            "retain again range 4194304",
            "unmap range 4194304 2097152",
            "map range 12582912 2097152 again",
            "access range 12582912 2097152 3",
            "look range 12582912 2097152 2",
            "drop again",
            "drop asleep",
            "drop twice",
            "unmap range 0 4194304",
            "look range 8388608 4194304 1",
            "unmap range 8388608 6291456",
        ];
        all(&mut job, &lines);
        assert_eq!(job.segments(), 0);
        assert_eq!(job.ask("descriptors"), own_descriptors(0, 1));
        gpu.assert_used(0, CONTEXT_LEN, &format!("{way:?}"));
    }
}

/// The driver documents that a retained handle is the one that the memory was mapped with.
#[test]
fn a_retained_handle_is_the_one_that_mapped() {
    let (gpu, other) = (FakeGpu::new(), FakeGpu::new());
    let (with, without) = (
        Job::ready(&gpu, Way::Looking),
        Job::bare(&other, Way::Looking),
    );
    for mut job in [with, without] {
        job.ask("init");
        let lines = [
            "reserve range 8388608",
            "create first 4194304 0",
            "map range 0 4194304 first",
            "drop first",
        ];
        all(&mut job, &lines);
        assert_eq!(job.ask("types first"), "1 [0, 0, 0, 0]");
        let lines = [
            "retain second range 2097152",
            "map range 4194304 4194304 first",
            "drop first",
        ];
        all(&mut job, &lines);
        assert_eq!(job.ask("drop second"), "1");
    }
}

#[test]
fn shared_handles_are_reported() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    all(
        &mut job,
        &["create private 2097152 0", "create open 2097152 1"],
    );
    assert_eq!(job.ask("share private"), "1 false");
    assert!(!job.hello().unwrap().shares);
    assert_eq!(job.ask("share open"), "0 true");
    assert!(job.hello().unwrap().shares);

    let mut job = Job::ready(&gpu, Way::Looking);
    all(&mut job, &["create open 2097152 1"]);
    snapshot(&job);
    // The driver cannot export imported memory; the agent has a descriptor.
    assert_eq!(job.ask("share open"), "0 true");
    assert!(job.hello().unwrap().shares);
}

#[test]
fn memory_that_the_driver_cannot_resume_is_reported() {
    let gpu = FakeGpu::new();
    let is_opaque = |job: &Job| job.hello().is_some_and(|hello| hello.opaque);
    let mut job = Job::ready(&gpu, Way::Asking);
    job.alloc(LEN);
    // NCCL creates and releases some to find out whether it can be created.
    all(&mut job, &["create-on-host probe 2097152", "drop probe"]);
    assert!(!is_opaque(&job));
    let lines = [
        "create-on-host used 2097152",
        "reserve range 2097152",
        "map range 0 2097152 used",
    ];
    all(&mut job, &lines);
    assert!(is_opaque(&job));

    let mut job = Job::ready(&gpu, Way::Asking);
    all(&mut job, &["create-for-arrays tiles 2097152"]);
    assert!(is_opaque(&job));
}

/// A step of a program; handles and addresses are numbers of slots.
#[derive(Clone, Debug)]
enum Step {
    Ask(String),
    Snapshot,
}

fn step() -> impl Strategy<Value = Step> {
    let (handle, slot, slots) = (0..4u8, 0..8usize, 1..3usize);
    let at = |slot: usize| format!("range {}", slot * LEN);
    prop_oneof![
        3 => (handle.clone(), slots.clone(), 0..2u8).prop_map(|(handle, slots, types)| {
            format!("create {handle} {} {types}", slots * LEN)
        }),
        2 => handle.clone().prop_map(|handle| format!("drop {handle}")),
        4 => (slot.clone(), slots.clone(), handle.clone()).prop_map(move |(slot, slots, handle)| {
            format!("map {} {} {handle}", at(slot), slots * LEN)
        }),
        3 => (slot.clone(), slots.clone()).prop_map(move |(slot, slots)| {
            format!("unmap {} {}", at(slot), slots * LEN)
        }),
        2 => (handle.clone(), slot.clone()).prop_map(move |(handle, slot)| {
            format!("retain {handle} {}", at(slot))
        }),
        1 => handle.prop_map(|handle| format!("types {handle}")),
        4 => (slot.clone(), 0..9u8).prop_map(move |(slot, seed)| format!("put {} 4096 {seed}", at(slot))),
        4 => (slot, 0..9u8).prop_map(move |(slot, seed)| format!("look {} 4096 {seed}", at(slot))),
    ]
    .prop_map(Step::Ask)
    .boxed()
    .prop_union(Just(Step::Snapshot).boxed())
}

proptest! {
    #![proptest_config(Config { cases: 24, ..Config::default() })]

    #[test]
    fn a_program_cannot_tell_that_it_was_suspended(steps in proptest::collection::vec(step(), 1..60)) {
        let (gpu, other) = (FakeGpu::new(), FakeGpu::new());
        let (mut job, mut bare) = (Job::ready(&gpu, Way::Looking), Job::bare(&other, Way::Looking));
        bare.ask("init");
        let range = format!("reserve range {}", 8 * LEN);
        prop_assert_eq!(job.ask(&range), bare.ask(&range));
        let mut pieces = 0;
        for step in &steps {
            let Step::Ask(line) = step else {
                if pieces > 0 {
                    snapshot(&job);
                }
                continue;
            };
            pieces += usize::from(line.starts_with("create"));
            let answer = job.ask(line);
            prop_assert_eq!(&answer, &bare.ask(line), "{}", line);
            // Without access, a copy would end the fake's process.
            if line.starts_with("map") && answer == "0" {
                let access = format!("{} 3", line.replace("map", "access").rsplit_once(' ').unwrap().0);
                prop_assert_eq!(job.ask(&access), bare.ask(&access));
            }
            gpu.assert_used(0, other.used_bytes(0), line);
        }
    }
}
