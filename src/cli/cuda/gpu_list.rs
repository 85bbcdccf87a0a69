//! `ckpt-run cuda gpus`: the driver and the GPUs, with the details needed to write a map.

use std::process::ExitCode;

use serde::Serialize;

use super::refused;
use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::cuda::{self, Driver, Gpu, GpuUuid, UuidError};
use crate::run::size;

/// The output of `cuda gpus --json`.
#[derive(Serialize)]
struct Machine {
    driver: Option<String>,
    cuda: String,
    /// True if the driver can restore onto other GPUs.
    gpu_map: bool,
    gpus: Vec<Device>,
}

#[derive(Serialize)]
struct Device {
    index: u32,
    uuid: String,
    name: String,
    total_bytes: Option<u64>,
    free_bytes: Option<u64>,
    persistence: Option<bool>,
}

impl From<Gpu> for Device {
    fn from(gpu: Gpu) -> Self {
        Self {
            index: gpu.index,
            uuid: gpu.uuid,
            name: gpu.name,
            total_bytes: gpu.memory.map(|memory| memory.total_bytes),
            free_bytes: gpu.memory.map(|memory| memory.free_bytes),
            persistence: gpu.persistent,
        }
    }
}

pub(super) fn run(global: &Global, driver: &Driver) -> Result<ExitCode, Failure> {
    let inventory = cuda::inventory().map_err(|error| refused(&error))?;
    let can = driver.capabilities();
    let machine = Machine {
        driver: can.version.release.clone(),
        cuda: format!("{}.{}", can.version.cuda_major, can.version.cuda_minor),
        gpu_map: can.gpu_map,
        gpus: inventory.gpus.into_iter().map(Device::from).collect(),
    };
    if global.json {
        return print::print_json(&machine);
    }
    let onto = if can.gpu_map {
        "also onto other GPUs of the same model (--gpu-map)"
    } else {
        "onto the same GPUs; driver 580 and newer can restore onto others"
    };
    let head = format!(
        "driver {}: suspends and resumes processes, {onto}\n",
        can.version
    );
    let lines = machine.gpus.iter().map(|gpu| {
        let memory = gpu.free_bytes.zip(gpu.total_bytes);
        let memory =
            memory.map(|(free, total)| format!(", {} of {} free", size(free), size(total)));
        let memory = memory.unwrap_or_default();
        format!("{}  {}  {}{memory}\n", gpu.index, gpu.uuid, gpu.name)
    });
    print::print(&(head + &lines.collect::<String>()))
}

/// Returns the GPUs of this machine, in its order.
pub(super) fn here() -> Result<Vec<GpuUuid>, Failure> {
    let inventory = cuda::inventory().map_err(|error| refused(&error))?;
    let uuids = inventory.gpus.iter().map(|gpu| gpu.uuid.parse());
    uuids
        .collect::<Result<_, UuidError>>()
        .map_err(|error| refused(&error))
}
