//! A copier on GPUs that are not there, and known bytes.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ckpt_run::copier::{Copier, CopierError, Lane, SegmentId};
use ckpt_run::cuda::GpuUuid;
use tempfile::TempDir;

use crate::fake_gpu::FakeGpu;
use crate::script::write_script;

pub const MIB: u64 = 1 << 20;

/// Fake GPUs, and a program that is a copier and sees them.
pub struct Machine {
    pub gpus: FakeGpu,
    folder: TempDir,
}

impl Machine {
    /// One GPU.
    pub fn of_mib(mib: u64) -> Self {
        Self::with(1, mib)
    }

    pub fn with(devices: u32, mib: u64) -> Self {
        let machine = Self {
            gpus: FakeGpu::with(devices, mib),
            folder: tempfile::tempdir().unwrap(),
        };
        let variables: String = machine
            .gpus
            .environment()
            .iter()
            .map(|(name, value)| format!("export {name}='{}'\n", value.to_str().unwrap()))
            .collect();
        let script = format!(
            "#!/bin/sh\nenv > \"$0.environment\"\n{variables}exec {} \"$@\"\n",
            env!("CARGO_BIN_EXE_ckpt-run")
        );
        write_script(&machine.program(), &script);
        machine
    }

    pub fn program(&self) -> PathBuf {
        self.folder.path().join("copier")
    }

    pub fn copier(&self) -> Copier {
        Copier::start(&self.program()).unwrap()
    }

    /// One that has opened the first GPU.
    pub fn open(&self) -> Copier {
        let copier = self.copier();
        copier.open(gpu(0)).unwrap();
        copier
    }
}

/// The UUIDs of the fake's GPUs end with their numbers.
pub fn gpu(number: u8) -> GpuUuid {
    format!("GPU-fa4e0000-0000-4000-8000-0000000000{number:02x}")
        .parse()
        .unwrap()
}

/// Bytes that do not repeat, and are others for every seed.
pub fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Puts the content in pieces of changing lengths, as those of chunks are.
pub fn try_fill(
    lane: &mut Lane,
    segment: SegmentId,
    range: Range<u64>,
    mut content: &[u8],
) -> Result<(), CopierError> {
    let mut longest = 1;
    lane.fill(segment, range, |room| {
        longest = (longest * 7) % 5_000_011;
        let len = room.len().min(content.len()).min(longest);
        room[..len].copy_from_slice(&content[..len]);
        content = &content[len..];
        Ok(len)
    })
}

pub fn fill(lane: &mut Lane, segment: SegmentId, range: Range<u64>, content: &[u8]) {
    try_fill(lane, segment, range, content).unwrap();
}

pub fn try_drain(
    lane: &mut Lane,
    segment: SegmentId,
    range: Range<u64>,
) -> Result<Vec<u8>, CopierError> {
    let mut all = Vec::new();
    lane.drain(segment, range, |bytes| {
        all.extend_from_slice(bytes);
        Ok::<_, CopierError>(())
    })?;
    Ok(all)
}

pub fn drain(lane: &mut Lane, segment: SegmentId, range: Range<u64>) -> Vec<u8> {
    try_drain(lane, segment, range).unwrap()
}

/// Without printing megabytes when they differ.
pub fn assert_same(found: &[u8], expected: &[u8]) {
    if found == expected {
        return;
    }
    let mut pairs = found.iter().zip(expected);
    let differ = pairs.position(|(one, other)| one != other);
    panic!(
        "{} bytes instead of {}, the first that differs is {differ:?}",
        found.len(),
        expected.len()
    );
}

/// The environment that the machine's last copier was started with.
pub fn environment(program: &Path) -> String {
    fs::read_to_string(program.with_extension("environment")).unwrap()
}
