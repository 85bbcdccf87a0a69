//! Device memory as a program sees it: the same as without the agent.

use super::agent_job::{CONTEXT_LEN, Job, MIB, Way};
use crate::harness::fake_gpu::FakeGpu;

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
fn address_range_has_the_requested_length() {
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
        // The driver itself answers a free in the middle of a piece, or a second free.
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
    gpu.assert_used(0, CONTEXT_LEN, "nothing is left of what failed");
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
        gpu.assert_used(0, CONTEXT_LEN + 4 * MIB as u64, "the driver's own alone");
        assert_eq!(job.ask(&format!("free {address}")), "0");
        std::fs::write(gpu.folder().join("fail"), "").unwrap();
        job.alloc(4 * MIB);
        assert_eq!(job.segments(), 1, "{call}");
    }
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
    let mib = |count: usize| (count * MIB) as u64;
    assert_eq!(job.holdings(), [(0, mib(4), 0), (1, mib(14), 0)]);
    assert_eq!(job.ask("destroy 1"), "0");
    assert_eq!(job.segments(), 1);
    gpu.assert_used(1, 0, "the other GPU");
    assert_eq!(job.ask("enter 0"), "0");
    assert_eq!(job.ask(&format!("write {kept} {} 1", 4 * MIB)), "0");
    assert_eq!(job.ask("reset 0"), "0");
    assert_eq!(job.segments(), 0);
    gpu.assert_used(0, 0, "after the reset");
}
