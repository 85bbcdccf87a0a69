//! The machine's GPUs, for `doctor` and for an image's manifest.
//!
//! NVML reports every fact and costs no context. If a container has no NVML, the kernel driver's files report
//! everything except the memory. libcuda is not used: its list would need `cuInit`, whose memory a process cannot
//! release.

use std::fs;
use std::path::Path;

use super::error::GpuError;
use super::loader::available;
use super::nvml::{Nvml, Route};

/// The kernel driver's folder with one folder per GPU.
const PROC_GPUS: &str = "/proc/driver/nvidia/gpus";

/// Limit on a listing, more than any machine has.
pub(super) const GPUS_MAX: u32 = 256;

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The number in `/dev/nvidiaN` or in NVML's order.
    pub index: u32,
    /// The model.
    pub name: String,
    /// The UUID with its prefix `GPU-`.
    pub uuid: String,
    /// Device memory, if NVML reports it.
    pub memory: Option<GpuMemory>,
    /// Persistence mode, if known. Without it, a restore needs CUDA initialized in the supervisor, at the cost of its
    /// memory.
    pub persistent: Option<bool>,
    /// True if the GPU is split up (MIG), if known.
    pub mig: Option<bool>,
    /// The processes that may compute on the GPU, if known.
    pub mode: Option<ComputeMode>,
    /// True if any process computes on the GPU, if known. An MPS server counts as a process.
    pub busy: Option<bool>,
}

/// The processes that may compute on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Shared,
    /// A single process at a time, which may be an MPS server.
    Exclusive,
    /// No process.
    Prohibited,
}

impl From<nvml_wrapper::enum_wrappers::device::ComputeMode> for ComputeMode {
    fn from(mode: nvml_wrapper::enum_wrappers::device::ComputeMode) -> Self {
        use nvml_wrapper::enum_wrappers::device::ComputeMode as Mode;
        match mode {
            Mode::Default => Self::Shared,
            Mode::ExclusiveThread | Mode::ExclusiveProcess => Self::Exclusive,
            Mode::Prohibited => Self::Prohibited,
        }
    }
}

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuUse {
    /// The pid as the driver reports it. If the driver uses another PID namespace than ckpt-run, the number is that of
    /// another process here.
    pub pid: i32,
    /// The GPU's UUID.
    pub uuid: String,
    /// The process's device memory on that GPU in bytes, if the driver reports it.
    pub bytes: Option<u64>,
    /// True if the process computes through an MPS server.
    pub through_mps: bool,
}

/// Device memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// The total memory.
    pub total_bytes: u64,
    /// The memory that no process uses.
    pub free_bytes: u64,
}

/// The GPUs and their driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The driver's release, such as `580.159.04`.
    pub driver: Option<String>,
    /// The GPUs in the driver's order.
    pub gpus: Vec<Gpu>,
}

/// Lists the GPUs. The list is empty on a machine without GPUs, and the driver is `None` if there is none. Free memory
/// is the current value. The call makes no CUDA context. It takes a few milliseconds if persistence mode is on, and a
/// second or more per GPU if it is off, because the driver then wakes the GPUs.
///
/// # Errors
/// GPUs exist, and neither NVML nor the kernel driver describes them.
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
        // One cause is a library of another version than the kernel driver.
        Err(error) => from_proc(Path::new(PROC_GPUS)).map_err(|_| error),
    }
}

/// Returns true if every GPU is known to have persistence mode on.
pub(super) fn all_persistent() -> bool {
    inventory().is_ok_and(|inventory| {
        !inventory.gpus.is_empty()
            && inventory
                .gpus
                .iter()
                .all(|gpu| gpu.persistent == Some(true))
    })
}

/// Returns the kernel module's version.
pub(super) fn driver_release() -> Option<String> {
    let text = fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned()).filter(|release| !release.is_empty())
}

fn from_nvml(nvml: &Nvml) -> Result<Inventory, GpuError> {
    let gpus = (0..nvml.count()?.min(GPUS_MAX))
        .map(|index| {
            let facts = nvml.facts(index)?;
            Ok(Gpu {
                index,
                name: facts.name,
                uuid: facts.uuid,
                memory: facts.memory,
                persistent: facts.persistent,
                mig: facts.mig,
                mode: facts.mode,
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

/// Returns the processes that compute on the GPUs, one entry per GPU and process. Returns `None` if NVML does not exist
/// or does not report them.
#[must_use]
pub fn uses() -> Option<Vec<GpuUse>> {
    let nvml = Nvml::load().ok()??;
    let mut found = Vec::new();
    for index in 0..nvml.count().ok()?.min(GPUS_MAX) {
        let uuid = nvml.facts(index).ok()?.uuid;
        // A library without this function has no such processes.
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

/// Returns the number of GPUs with device files on this machine or in this container. Wakes no GPU.
#[must_use]
pub fn device_count() -> usize {
    let Ok(entries) = fs::read_dir("/dev") else {
        return 0;
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| is_device(name)).count()
}

/// Returns true for `nvidia0` and so on; false for `nvidiactl`, `nvidia-uvm`.
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

/// Parses `/proc/driver/nvidia/gpus/*/information`; returns `None` without a UUID.
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
    fn kernel_driver_files_replace_nvml() {
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
}
