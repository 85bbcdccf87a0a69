//! Copier on a real GPU; skipped with a message without one.

use std::os::fd::AsFd;
use std::path::Path;

use ckpt_run::copier::{Copier, CopierError};
use ckpt_run::cuda::{self, GpuUuid};

use crate::contents::{MIB, assert_same, bytes, drain, fill};

/// Returns the first GPU; `None` after printing the reason for skipping the test.
fn first() -> Option<GpuUuid> {
    if !cuda::available() {
        eprintln!("SKIPPED: no NVIDIA GPU (no /dev/nvidiactl)");
        return None;
    }
    let gpus = cuda::inventory().unwrap().gpus;
    Some(gpus.first()?.uuid.parse().unwrap())
}

fn open(gpu: GpuUuid) -> Copier {
    let copier = Copier::start(Path::new(env!("CARGO_BIN_EXE_ckpt-run"))).unwrap();
    let room = copier.open(gpu).unwrap();
    assert!(room.free > 0 && room.free <= room.total, "{room:?}");
    copier
}

#[test]
fn real_memory_is_filled_drained_and_shadowed() {
    let Some(gpu) = first() else { return };
    let (owner, copier) = (open(gpu), open(gpu));
    let len = 70 * MIB;
    let (original, memory) = owner.create(gpu, len).unwrap();
    let mut owners = owner.lane().unwrap();
    fill(&mut owners, original, 0..len, &bytes(1, len));
    assert_same(&drain(&mut owners, original, 0..len), &bytes(1, len));

    let segment = copier.import(gpu, memory.as_fd(), len).unwrap();
    let part = copier.import(gpu, memory.as_fd(), len).unwrap();
    let mut lane = copier.lane().unwrap();
    assert_same(&drain(&mut lane, segment, 3..len), &bytes(1, len)[3..]);
    copier.reserve(gpu, len + 10 * MIB).unwrap();
    assert_eq!(copier.shadow(&[segment, part]).unwrap(), [len, 10 * MIB]);
    fill(&mut owners, original, 0..len, &bytes(2, len));
    assert_same(&drain(&mut lane, segment, 0..len), &bytes(1, len));
    let border = usize::try_from(10 * MIB).unwrap();
    let mixed = [&bytes(1, len)[..border], &bytes(2, len)[border..]].concat();
    assert_same(&drain(&mut lane, part, 0..len), &mixed);
    copier.release(&[segment, part]).unwrap();
    owner.release(&[original]).unwrap();
}

#[test]
fn memory_of_a_different_length_is_not_imported() {
    let Some(gpu) = first() else { return };
    let (owner, copier) = (open(gpu), open(gpu));
    let (_, memory) = owner.create(gpu, 8 * MIB).unwrap();
    for len in [0, 1, 2 * MIB, 6 * MIB, 8 * MIB - 1, 10 * MIB, 1024 * MIB] {
        let error = copier.import(gpu, memory.as_fd(), len).unwrap_err();
        assert!(
            matches!(error, CopierError::Device { .. }),
            "{len}: {error}"
        );
    }
    let segment = copier.import(gpu, memory.as_fd(), 8 * MIB).unwrap();
    let mut lane = copier.lane().unwrap();
    assert_eq!(drain(&mut lane, segment, 0..8 * MIB).len() as u64, 8 * MIB);
}

#[test]
fn more_than_a_real_gpu_has_is_an_error() {
    let Some(gpu) = first() else { return };
    let copier = open(gpu);
    let total = copier.open(gpu).unwrap().total;
    let error = copier.reserve(gpu, total).unwrap_err();
    assert!(matches!(error, CopierError::OutOfMemory { .. }), "{error}");
    let error = copier
        .create(gpu, total.next_multiple_of(2 * MIB))
        .unwrap_err();
    assert!(matches!(error, CopierError::OutOfMemory { .. }), "{error}");
    let (segment, _memory) = copier.create(gpu, 2 * MIB).unwrap();
    let mut lane = copier.lane().unwrap();
    fill(&mut lane, segment, 0..MIB, &bytes(1, MIB));
    assert_same(&drain(&mut lane, segment, 0..MIB), &bytes(1, MIB));
}
