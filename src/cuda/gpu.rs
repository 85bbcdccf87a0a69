//! The machine's GPUs, for `doctor` and for an image's manifest.
//!
//! NVML tells everything and costs no context. Where a container has none, the
//! kernel driver's files tell all but the memory. libcuda is not asked: its
//! list would need `cuInit`, whose memory a process cannot give back.

use std::fs;
use std::path::Path;

use super::error::GpuError;
use super::loader::available;
use super::nvml::{Nvml, Route};

/// Where the kernel driver describes each GPU, a folder each.
const PROC_GPUS: &str = "/proc/driver/nvidia/gpus";

/// More than any machine has; a bound on what a listing may return.
pub(super) const GPUS_MAX: u32 = 256;

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The number in `/dev/nvidiaN` or in NVML's order.
    pub index: u32,
    /// The model.
    pub name: String,
    /// `GPU-` and the UUID.
    pub uuid: String,
    /// Device memory, where NVML is there to tell.
    pub memory: Option<GpuMemory>,
    /// Whether persistence mode is on, where known. Without it a restore
    /// needs CUDA initialized in the supervisor, at the cost of its memory.
    pub persistent: Option<bool>,
    /// Whether it is split up (MIG), where known.
    pub mig: Option<bool>,
    /// Who may compute on it, where known.
    pub mode: Option<ComputeMode>,
    /// Whether any process computes on it, where known. An MPS server is one.
    pub busy: Option<bool>,
}

/// Who may compute on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Shared,
    /// One process at a time, which may be an MPS server.
    Exclusive,
    /// None.
    Prohibited,
}

impl ComputeMode {
    /// From `nvmlComputeMode_t`; 1 was exclusive to a thread.
    fn from_raw(raw: u32) -> Option<Self> {
        match raw {
            0 => Some(Self::Shared),
            1 | 3 => Some(Self::Exclusive),
            2 => Some(Self::Prohibited),
            _ => None,
        }
    }
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuUse {
    /// The process, as the driver tells it: another one's where its PID namespace is not ours.
    pub pid: i32,
    /// The GPU.
    pub uuid: String,
    /// Its device memory there, bytes, where the driver tells.
    pub bytes: Option<u64>,
    /// Whether it computes through an MPS server.
    pub through_mps: bool,
}

/// Bytes of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// All of it.
    pub total_bytes: u64,
    /// What no process uses.
    pub free_bytes: u64,
}

/// The GPUs and the driver that runs them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The driver's release, such as `580.159.04`.
    pub driver: Option<String>,
    /// In the driver's order.
    pub gpus: Vec<Gpu>,
}

/// Lists the GPUs; none on a machine without any, and no driver on one without that. Reads free memory as of now.
/// Makes no CUDA context; a few milliseconds where persistence mode is on, a
/// second and more a GPU where it is off, because the driver then wakes them.
///
/// # Errors
/// When there are GPUs and neither NVML nor the kernel driver describes them.
pub fn inventory() -> Result<Inventory, GpuError> {
    if !available() {
        return Ok(Inventory {
            driver: driver_release(),
            gpus: Vec::new(),
        });
    }
    match Nvml::load() {
        Ok(Some(nvml)) => from_nvml(&nvml),
        Ok(None) => from_proc(Path::new(PROC_GPUS)),
        // A library of another version than the kernel driver, for one.
        Err(error) => from_proc(Path::new(PROC_GPUS)).map_err(|_| error),
    }
}

/// Whether every GPU is known to have persistence mode on.
pub(super) fn all_persistent() -> bool {
    inventory().is_ok_and(|inventory| {
        !inventory.gpus.is_empty()
            && inventory
                .gpus
                .iter()
                .all(|gpu| gpu.persistent == Some(true))
    })
}

/// The kernel module's version.
pub(super) fn driver_release() -> Option<String> {
    let text = fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned()).filter(|release| !release.is_empty())
}

fn from_nvml(nvml: &Nvml) -> Result<Inventory, GpuError> {
    let gpus = (0..nvml.count()?.min(GPUS_MAX))
        .map(|index| {
            let device = nvml.device(index)?;
            Ok(Gpu {
                index,
                name: device.name,
                uuid: device.uuid,
                memory: device.memory.map(|(total_bytes, free_bytes)| GpuMemory {
                    total_bytes,
                    free_bytes,
                }),
                persistent: device.persistent,
                mig: device.mig,
                mode: device.mode.and_then(ComputeMode::from_raw),
                busy: nvml
                    .processes(index, Route::Own)
                    .ok()
                    .map(|all| !all.is_empty()),
            })
        })
        .collect::<Result<_, GpuError>>()?;
    Ok(Inventory {
        driver: nvml.driver_release().ok().or_else(driver_release),
        gpus,
    })
}

/// Who computes on the GPUs, every GPU and process on its own. `None` where NVML is not there or does not tell.
#[must_use]
pub fn uses() -> Option<Vec<GpuUse>> {
    let nvml = Nvml::load().ok()??;
    let mut found = Vec::new();
    for index in 0..nvml.count().ok()?.min(GPUS_MAX) {
        let uuid = nvml.device(index).ok()?.uuid;
        // A library without this question knows of no such process.
        let through_mps = nvml.processes(index, Route::Mps).unwrap_or_default();
        let own = nvml.processes(index, Route::Own).ok()?;
        let own = own.into_iter().map(|process| (process, false));
        let all = own.chain(through_mps.into_iter().map(|process| (process, true)));
        found.extend(all.map(|((pid, bytes), through_mps)| GpuUse {
            pid,
            uuid: uuid.clone(),
            bytes,
            through_mps,
        }));
    }
    Some(found)
}

/// How many GPUs this machine, or container, has device files of. Wakes none of them.
#[must_use]
pub fn device_count() -> usize {
    let Ok(entries) = fs::read_dir("/dev") else {
        return 0;
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| is_device(name)).count()
}

/// `nvidia0` and so on; not `nvidiactl`, `nvidia-uvm`.
fn is_device(name: &str) -> bool {
    name.strip_prefix("nvidia")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

fn from_proc(folder: &Path) -> Result<Inventory, GpuError> {
    let read = |source| GpuError::Read {
        path: folder.display().to_string(),
        source,
    };
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(GpuError::NoSource);
        }
        Err(error) => return Err(read(error)),
    };
    let mut gpus = Vec::new();
    for entry in entries.take(GPUS_MAX as usize) {
        let path = entry.map_err(read)?.path().join("information");
        let text = fs::read_to_string(&path).map_err(|source| GpuError::Read {
            path: path.display().to_string(),
            source,
        })?;
        gpus.extend(parse_information(&text));
    }
    gpus.sort_by_key(|gpu| gpu.index);
    Ok(Inventory {
        driver: driver_release(),
        gpus,
    })
}

/// Parses `/proc/driver/nvidia/gpus/*/information`; `None` without a UUID.
pub(super) fn parse_information(text: &str) -> Option<Gpu> {
    let field = |name: &str| {
        text.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        })
    };
    Some(Gpu {
        index: field("Device Minor")
            .and_then(|minor| minor.parse().ok())
            .unwrap_or(0),
        name: field("Model").unwrap_or_default(),
        uuid: field("GPU UUID")?,
        memory: None,
        persistent: None,
        mig: None,
        mode: None,
        busy: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFORMATION: &str = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 118\n\
        GPU UUID: \t GPU-6d1c2d4e-0000-0000-0000-000000000001\nVideo BIOS: \t 96.00\n\
        Bus Location: \t 0000:00:05.0\nDevice Minor: \t 3\nGPU Excluded:\t No\n";

    #[test]
    fn the_kernel_drivers_files_stand_in_for_nvml() {
        let folder = tempfile::tempdir().unwrap();
        let gpu = folder.path().join("0000:00:05.0");
        fs::create_dir(&gpu).unwrap();
        fs::write(gpu.join("information"), INFORMATION).unwrap();
        let inventory = from_proc(folder.path()).unwrap();
        assert_eq!(
            inventory.gpus,
            [Gpu {
                index: 3,
                name: "NVIDIA H200".to_owned(),
                uuid: "GPU-6d1c2d4e-0000-0000-0000-000000000001".to_owned(),
                memory: None,
                persistent: None,
                mig: None,
                mode: None,
                busy: None,
            }]
        );
    }

    #[test]
    fn a_gpu_without_a_uuid_is_not_listed() {
        assert_eq!(parse_information("Model: NVIDIA H200\n"), None);
        assert_eq!(parse_information("\u{0}\u{0}garbage"), None);
    }

    #[test]
    fn no_source_of_the_list_is_an_ordinary_error() {
        let error = from_proc(Path::new("/nonexistent/gpus")).unwrap_err();
        assert!(matches!(error, GpuError::NoSource), "{error}");
    }

    #[test]
    fn a_machine_without_a_gpu_has_an_empty_inventory() {
        if available() {
            eprintln!("SKIPPED: this machine has a GPU");
            return;
        }
        assert_eq!(inventory().unwrap().gpus, []);
    }

    #[test]
    fn only_numbered_device_files_are_gpus() {
        let names = [
            "nvidia0",
            "nvidia12",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia",
            "nvidia1x",
            "tty1",
        ];
        assert_eq!(
            names.map(is_device),
            [true, true, false, false, false, false, false]
        );
    }

    #[test]
    fn compute_modes_are_nvml_s() {
        let modes = [0, 1, 2, 3, 4].map(ComputeMode::from_raw);
        let exclusive = Some(ComputeMode::Exclusive);
        let shared = Some(ComputeMode::Shared);
        assert_eq!(
            modes,
            [
                shared,
                exclusive,
                Some(ComputeMode::Prohibited),
                exclusive,
                None
            ]
        );
    }
}
