//! Copier on fake GPUs.

use std::fs;
use std::path::{Path, PathBuf};

use ckpt_run::copier::Copier;
use ckpt_run::cuda::GpuUuid;
use tempfile::TempDir;

use crate::harness::fake_gpu::FakeGpu;
use crate::harness::{program, write_script};

/// Fake GPUs, and a copier program that sees them.
pub struct Machine {
    pub gpus: FakeGpu,
    folder: TempDir,
}

impl Machine {
    /// Creates a machine with one GPU.
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
            program()
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

    /// Starts a copier that has opened the first GPU.
    pub fn open(&self) -> Copier {
        let copier = self.copier();
        copier.open(gpu(0)).unwrap();
        copier
    }
}

/// Returns a UUID; those of the fake's GPUs end with their numbers.
pub fn gpu(number: u8) -> GpuUuid {
    format!("GPU-fa4e0000-0000-4000-8000-0000000000{number:02x}")
        .parse()
        .unwrap()
}

/// Returns the environment of the machine's last copier.
pub fn environment(program: &Path) -> String {
    fs::read_to_string(program.with_extension("environment")).unwrap()
}
