//! The checks of the NVIDIA driver and its GPUs.
//!
//! A machine without a driver is fully suitable for CPU jobs.

use super::checks::{Check, sources_of};
use crate::cuda::{self, Gpu, GpuError, Inventory};
use crate::gpu::mapping::branch;

/// The first driver branch whose libcuda can suspend and resume a process (CUDA 12.8).
const OLDEST_DRIVER: u32 = 570;

const NAME: &str = "nvidia";

/// Checks the driver and its GPUs.
pub(crate) fn gpu_checks() -> Vec<Check> {
    vec![check_of(cuda::inventory())]
}

fn check_of(inventory: Result<Inventory, GpuError>) -> Check {
    let Inventory { driver, gpus } = match inventory {
        Ok(inventory) => inventory,
        Err(error) => {
            let detail = format!("{error}{}", sources_of(&error));
            return Check::note(NAME, detail, "check if nvidia-smi works");
        }
    };
    if driver.is_none() && gpus.is_empty() {
        return Check::ok(NAME, "no NVIDIA driver: CPU jobs only");
    }
    let version = driver.unwrap_or_default();
    let Some(branch) = branch(&version) else {
        let detail = format!("driver of unknown version: {version:?}");
        let remedy = format!("check that it is {OLDEST_DRIVER} or newer");
        return Check::note(NAME, detail, remedy);
    };
    if branch < OLDEST_DRIVER {
        let detail = format!("driver {version} cannot suspend CUDA processes");
        let remedy = format!("install driver {OLDEST_DRIVER} or newer");
        return Check::problem(NAME, detail, remedy);
    }
    if gpus.is_empty() {
        let detail = format!("driver {version}, no GPU visible");
        return Check::note(
            NAME,
            detail,
            "make the GPUs available in this container or machine",
        );
    }
    let found = format!("driver {version}, {}", counted(&gpus));
    if let Some(gpu) = gpus.iter().find(|gpu| gpu.mig == Some(true)) {
        let detail = format!("{found}; {} is in MIG mode", gpu.uuid);
        let remedy = "jobs on it cannot be snapshotted; switch MIG off (nvidia-smi -mig 0)";
        return Check::note(NAME, detail, remedy);
    }
    Check::ok(NAME, found)
}

/// Returns the GPUs by model, as in `2 x NVIDIA H200`.
fn counted(gpus: &[Gpu]) -> String {
    let name = |gpu: &Gpu| match gpu.name.as_str() {
        "" => "GPU of unknown model".to_owned(),
        name => name.to_owned(),
    };
    let mut models: Vec<String> = gpus.iter().map(name).collect();
    models.sort_unstable();
    let groups = models.chunk_by(|a, b| a == b);
    let texts: Vec<String> = groups.map(|g| format!("{} x {}", g.len(), g[0])).collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::checks::Status;

    fn checked(driver: Option<&str>, models: &[&str]) -> Check {
        check_of(Ok(machine(driver, models)))
    }

    fn machine(driver: Option<&str>, models: &[&str]) -> Inventory {
        let gpus = models.iter().map(|model| Gpu {
            index: 0,
            name: (*model).to_owned(),
            uuid: "GPU-1".to_owned(),
            memory: None,
            persistent: None,
            mig: None,
            mode: None,
            busy: None,
        });
        Inventory {
            driver: driver.map(str::to_owned),
            gpus: gpus.collect(),
        }
    }

    #[test]
    fn machine_without_driver_is_fine_for_cpu_jobs() {
        let expected = Check::ok("nvidia", "no NVIDIA driver: CPU jobs only");
        assert_eq!(checked(None, &[]), expected);
    }

    #[test]
    fn driver_and_gpus_are_listed() {
        let models = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200"];
        let detail = "driver 580.159.04, 1 x NVIDIA H100 80GB HBM3, 2 x NVIDIA H200";
        assert_eq!(
            checked(Some("580.159.04"), &models),
            Check::ok("nvidia", detail)
        );
    }

    #[test]
    fn driver_that_cannot_suspend_is_a_problem() {
        let check = checked(Some("550.54.15"), &["NVIDIA L4"]);
        assert_eq!(check.status, Status::Problem);
        assert!(check.detail.contains("550.54.15"), "{check:?}");
    }

    #[test]
    fn missing_or_conflicting_paths_are_noted() {
        let gpu = ["NVIDIA H200"];
        let mut split = machine(Some("580.1"), &gpu);
        split.gpus[0].mig = Some(true);
        let checks = [
            checked(Some("580.1"), &[]),
            checked(Some("garbage"), &gpu),
            checked(None, &gpu),
            check_of(Err(GpuError::NoSource)),
            check_of(Ok(split)),
        ];
        for check in checks {
            assert_eq!(check.status, Status::Note, "{check:?}");
        }
    }
}
