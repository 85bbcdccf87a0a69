//! Segments of GPU memory that a copier fills, drains, imports and shadows.

use std::os::fd::AsFd;
use std::thread;

use ckpt_run::copier::CopierError;

use super::contents::{MIB, assert_same, bytes, drain, fill, try_fill};
use super::copier_machine::{Machine, gpu};

#[test]
fn filled_memory_is_drained() {
    let machine = Machine::of_mib(256);
    let copier = machine.open();
    let len = 40 * MIB;
    let (segment, _memory) = copier.create(gpu(0), len).unwrap();
    let content = bytes(1, len);
    let mut lane = copier.lane().unwrap();
    // The border differs from those of buffers.
    let (first, second) = content.split_at(17_000_001);
    fill(&mut lane, segment, 0..17_000_001, first);
    fill(&mut lane, segment, 17_000_001..len, second);
    assert_same(&drain(&mut lane, segment, 0..len), &content);
    assert_same(&drain(&mut lane, segment, 5..6), &content[5..6]);
    assert_same(&drain(&mut lane, segment, len..len), &[]);
}

#[test]
fn lanes_copy_at_the_same_time_from_several_gpus() {
    let machine = Machine::with(2, 256);
    let copier = machine.open();
    let mut lanes = [copier.lane().unwrap(), copier.lane().unwrap()];
    // Opened after the lanes.
    copier.open(gpu(1)).unwrap();
    let len = 20 * MIB;
    let (copier, segments) = (
        &copier,
        &[0, 1].map(|at| copier.create(gpu(at), len).unwrap().0),
    );
    thread::scope(|scope| {
        for (lane, seed) in lanes.iter_mut().zip([3, 4]) {
            scope.spawn(move || {
                let (own, _memory) = copier.create(gpu(0), len).unwrap();
                fill(lane, own, 0..len, &bytes(seed, len));
                let shared = segments[usize::from(seed == 4)];
                fill(lane, shared, 0..len, &bytes(seed, len));
                assert_same(&drain(lane, own, 0..len), &bytes(seed, len));
            });
        }
    });
    let [_, other] = &mut lanes;
    assert_same(&drain(other, segments[0], 0..len), &bytes(3, len));
    assert_same(&drain(other, segments[1], 0..len), &bytes(4, len));
}

#[test]
fn a_shadow_keeps_the_bytes_of_its_moment() {
    let machine = Machine::with(2, 256);
    let (owner, copier) = (machine.open(), machine.open());
    owner.open(gpu(1)).unwrap();
    copier.open(gpu(1)).unwrap();
    let len = 20 * MIB;
    let mut lane = owner.lane().unwrap();
    let mut segments = Vec::new();
    for at in [0, 1] {
        let (original, memory) = owner.create(gpu(at), len).unwrap();
        fill(&mut lane, original, 0..len, &bytes(1 + u64::from(at), len));
        copier.reserve(gpu(at), len).unwrap();
        let imported = copier.import(gpu(at), memory.as_fd(), len).unwrap();
        segments.push((original, imported));
    }
    let imported: Vec<_> = segments.iter().map(|(_, imported)| *imported).collect();
    let assert_held = |mib: [u64; 2], when| {
        for (at, mib) in (0..).zip(mib) {
            machine.gpus.assert_used(at, mib * MIB, when);
        }
    };
    assert_held(
        [42, 42],
        "two contexts of 1 MiB, the memory and room for its shadow",
    );
    assert_eq!(copier.shadow(&imported).unwrap(), [len, len]);
    for (original, _) in &segments {
        fill(&mut lane, *original, 0..len, &bytes(9, len));
        owner.release(&[*original]).unwrap();
    }
    assert_held([22, 22], "the copier has let go of the originals");
    let mut lane = copier.lane().unwrap();
    assert_same(&drain(&mut lane, imported[0], 0..len), &bytes(1, len));
    copier.release(&imported[..1]).unwrap();
    assert_held([2, 22], "released one by one");
    assert_same(&drain(&mut lane, imported[1], 0..len), &bytes(2, len));
}

#[test]
fn memory_beyond_the_shadow_is_drained_from_the_original() {
    let machine = Machine::of_mib(256);
    let (owner, copier) = (machine.open(), machine.open());
    let len = 16 * MIB;
    let mut lane = owner.lane().unwrap();
    let mut originals = Vec::new();
    let mut imported = Vec::new();
    for seed in 1..=3 {
        let (original, memory) = owner.create(gpu(0), len).unwrap();
        fill(&mut lane, original, 0..len, &bytes(seed, len));
        imported.push(copier.import(gpu(0), memory.as_fd(), len).unwrap());
        originals.push(original);
    }
    copier.reserve(gpu(0), len + 8 * MIB).unwrap();
    assert_eq!(copier.shadow(&imported).unwrap(), [len, 8 * MIB, 0]);
    for original in &originals {
        fill(&mut lane, *original, 0..len, &bytes(9, len));
    }
    let mut lane = copier.lane().unwrap();
    let old = |seed| bytes(seed, len);
    let half = usize::try_from(8 * MIB).unwrap();
    assert_same(&drain(&mut lane, imported[0], 0..len), &old(1));
    let mixed = [&old(2)[..half], &old(9)[half..]].concat();
    assert_same(&drain(&mut lane, imported[1], 0..len), &mixed);
    assert_same(&drain(&mut lane, imported[2], 0..len), &old(9));
    // The unused part was freed, so a second call changes nothing.
    assert_eq!(copier.shadow(&imported).unwrap(), [len, 8 * MIB, 0]);
    let refused = try_fill(&mut lane, imported[1], 0..0, &[]).unwrap_err();
    assert!(matches!(refused, CopierError::Refused { .. }), "{refused}");
    copier.release(&imported).unwrap();
    owner.release(&originals).unwrap();
    machine.gpus.assert_used(0, 2 * MIB, "two contexts");
}

#[test]
fn room_that_no_segment_needed_is_given_back() {
    let machine = Machine::of_mib(64);
    let copier = machine.open();
    let before = copier.open(gpu(0)).unwrap();
    assert_eq!(copier.reserve(gpu(0), 32 * MIB).unwrap(), 32 * MIB);
    assert_eq!(copier.open(gpu(0)).unwrap().free, before.free - 32 * MIB);
    assert_eq!(copier.shadow(&[]).unwrap(), [0; 0]);
    assert_eq!(copier.open(gpu(0)).unwrap(), before);
}
