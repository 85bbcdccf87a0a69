//! Creation of new memory at the old addresses, accessible to the copier; or a complete undo.

use std::os::unix::fs::FileExt;

use ckpt_run::agent_client::{AgentError, Channel, Held};

use super::agent_job::{CONTEXT_LEN, Job, LIMIT, MIB, Way, own_descriptors};
use crate::harness::fake_gpu::FakeGpu;

const SIZES: [usize; 3] = [4 * MIB, 6 * MIB, 8 * MIB];

fn remake(job: &Job) -> Result<Vec<Held>, AgentError> {
    job.agent(&mut Channel::bind().unwrap()).remake(LIMIT)
}

/// Returns true if data were written there.
fn is_written(held: Held) -> bool {
    let mut bytes = [0; 4096];
    let file = std::fs::File::from(held.descriptor);
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes != [0; 4096]
}

#[test]
fn remade_memory_is_owned_and_exportable() {
    let gpu = FakeGpu::with(1, 2048);
    let mut job = Job::ready(&gpu, Way::Looking);
    let mut addresses: Vec<u64> = SIZES.iter().map(|len| job.alloc(*len)).collect();
    // More than fits a datagram.
    addresses.extend((0..100).map(|_| job.alloc(2 * MIB)));
    addresses.sort_unstable();
    // Imported before, as in a restored process.
    job.map(&job.release());
    drop(job.release());
    gpu.assert_used(0, CONTEXT_LEN, "all was freed");
    for round in 0..2 {
        let held = remake(&job).unwrap();
        let places: Vec<u64> = held.iter().map(|held| held.segment.address).collect();
        assert_eq!(places, addresses, "{round}");
        for (number, held) in (1_u8..).zip(held) {
            let (address, len) = (held.segment.address, held.segment.len);
            assert_eq!(held.segment.device[..2], [0xfa, 0x4e]);
            assert_eq!(job.ask(&format!("write {address} {len} {number}")), "0");
            assert!(is_written(held), "{number}");
            assert_eq!(job.ask(&format!("check {address} {len} {number}")), "true");
        }
    }
    let hello = job.hello().unwrap();
    assert!(hello.moved && !hello.imported && !hello.released);
    assert_eq!(job.ask("descriptors"), own_descriptors(0, 1));
    let released = job.agent(&mut Channel::bind().unwrap()).release(LIMIT);
    assert!(
        matches!(released, Err(AgentError::Refused { .. })),
        "{released:?}"
    );
    for address in addresses {
        assert_eq!(job.ask(&format!("free {address}")), "0");
    }
    gpu.assert_used(0, CONTEXT_LEN, "all was freed");
}

#[test]
fn failed_creation_leaves_no_file() {
    // The rules fail the second of three pieces; an export is tried twice.
    for rule in [
        "cuMemCreate:5:2",
        "cuMemMap:5:2",
        "cuMemSetAccess:5:2",
        "cuMemExportToShareableHandle:5:2,cuMemExportToShareableHandle:6:2",
        "cuDeviceGetUuid:6:2",
    ] {
        let gpu = FakeGpu::new();
        let mut job = Job::ready(&gpu, Way::Looking);
        let addresses = SIZES.map(|len| job.alloc(len));
        for address in addresses {
            job.ask(&format!("write {address} {} 7", 4 * MIB));
        }
        let held = job.release();
        let used = gpu.used_bytes(0);
        std::fs::write(gpu.folder().join("fail"), rule).unwrap();
        let made = remake(&job);
        assert!(
            matches!(made, Err(AgentError::Driver { code: 2, .. })),
            "{rule} {made:?}"
        );
        let hello = job.hello().unwrap();
        assert!(hello.released && !hello.moved, "{rule}");
        gpu.assert_used(0, used, rule);
        std::fs::write(gpu.folder().join("fail"), "").unwrap();
        // The old memory can still be mapped.
        job.map(&held);
        drop(held);
        for address in addresses {
            let check = format!("check {address} {} 7", 4 * MIB);
            assert_eq!(job.ask(&check), "true", "{rule}");
        }
    }
}

#[test]
fn process_with_its_memory_remakes_nothing() {
    let gpu = FakeGpu::new();
    let mut job = Job::ready(&gpu, Way::Looking);
    let address = job.alloc(4 * MIB);
    let refused = remake(&job);
    assert!(
        matches!(refused, Err(AgentError::Refused { .. })),
        "{refused:?}"
    );
    job.alloc(6 * MIB);
    let held = job.release();
    // A part of it is mapped already.
    job.agent(&mut Channel::bind().unwrap())
        .map(&held[..1], LIMIT)
        .unwrap();
    assert!(matches!(remake(&job), Err(AgentError::Refused { .. })));
    job.map(&held);
    assert_eq!(job.ask(&format!("write {address} {} 7", 4 * MIB)), "0");
    assert!(!job.hello().unwrap().moved);
}
