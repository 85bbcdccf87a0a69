//! CUDA IPC between processes of a run.

use std::collections::BTreeSet;

use ckpt_run::agent_client::Origin;

use super::agent_job::{CONTEXT_LEN, Job, MIB, SOON, WAYS, Way, own_descriptors};
use crate::harness::fake_gpu::FakeGpu;

#[test]
fn memory_is_shared_between_processes_of_a_run() {
    for way in WAYS {
        let gpu = FakeGpu::new();
        let mut owner = Job::ready(&gpu, way);
        let mut user = Job::beside(&gpu, &owner, way);
        let len = 8 * MIB - 4096;
        let address = owner.alloc(len);
        assert!(!owner.hello().unwrap().lends && owner.origins().is_empty());
        let answer = owner.ask(&format!("export {}", address + 4096));
        let (code, handle) = answer.split_once(' ').unwrap();
        assert_eq!(code, "0");
        assert!(owner.hello().unwrap().lends);
        let origins = owner.origins();
        assert_eq!(origins.len(), 1);
        assert_eq!(
            (origins[0].address, origins[0].owner),
            (address, owner.pid())
        );
        owner.ask(&format!("write {address} {len} 1"));
        // Covers memory that the supervisor has returned, and memory that it holds.
        for round in 0..2 {
            let (open, held) = (format!("open {handle}"), owner.release());
            assert_eq!(owner.origins(), origins, "also of what is released");
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
            assert!(hello.lends && !hello.shares && hello.imported && hello.segments == 1);
            let same = Origin {
                address: there.parse().unwrap(),
                ..origins[0]
            };
            assert_eq!(user.origins(), [same]);
            assert_eq!(user.holdings(), [], "it is the owner's");
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
        gpu.assert_used(0, 2 * CONTEXT_LEN, "all was freed");
    }
}

#[test]
fn all_of_a_hundred_shared_pieces_are_reported() {
    let gpu = FakeGpu::new();
    let mut owner = Job::ready(&gpu, Way::Asking);
    let mut addresses: Vec<u64> = (0..130).map(|_| owner.alloc(2 * MIB)).collect();
    let unshared = addresses.split_off(128);
    for address in &addresses {
        assert!(owner.ask(&format!("export {address}")).starts_with("0 "));
    }
    addresses.sort_unstable();
    let origins = owner.origins();
    assert!(origins.iter().map(|one| one.address).eq(addresses));
    let ids: BTreeSet<u64> = origins.iter().map(|one| one.id).collect();
    assert_eq!(ids.len(), 128);
    for address in unshared {
        assert_eq!(owner.ask(&format!("free {address}")), "0");
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
    gpu.assert_used(0, 2 * CONTEXT_LEN, "all was freed");
}
