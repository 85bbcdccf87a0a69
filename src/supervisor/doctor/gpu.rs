//! What the NVIDIA driver tells of itself and its GPUs, without loading it.
//!
//! A machine without a driver is as good as any for CPU jobs.

use std::fs;
use std::path::Path;

use super::Check;

/// First driver branch whose libcuda can suspend and resume a process (CUDA 12.8).
const OLDEST_DRIVER: u32 = 570;

const NAME: &str = "nvidia";

/// The driver and its GPUs.
pub(super) fn gpu_checks() -> Vec<Check> {
    checks_in(Path::new("/proc/driver/nvidia"))
}

fn checks_in(driver: &Path) -> Vec<Check> {
    let Ok(text) = fs::read_to_string(driver.join("version")) else {
        return vec![Check::ok(NAME, "no NVIDIA driver: CPU jobs only")];
    };
    let Some((version, branch)) = driver_version(&text) else {
        let detail = format!("driver of unknown version: {:?}", text.lines().next());
        let remedy = format!("make sure that it is {OLDEST_DRIVER} or newer");
        return vec![Check::note(NAME, detail, remedy)];
    };
    if branch < OLDEST_DRIVER {
        let detail = format!("driver {version} cannot suspend CUDA processes");
        return vec![Check::problem(
            NAME,
            detail,
            format!("install driver {OLDEST_DRIVER} or newer"),
        )];
    }
    let models = gpu_models(&driver.join("gpus"));
    if models.is_empty() {
        let detail = format!("driver {version}, no GPU visible");
        return vec![Check::note(
            NAME,
            detail,
            "hand the GPUs to this container or machine",
        )];
    }
    vec![Check::ok(
        NAME,
        format!("driver {version}, {}", counted(&models)),
    )]
}

/// The version and its first number, from the line
/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  ...`.
pub(in crate::supervisor) fn driver_version(text: &str) -> Option<(&str, u32)> {
    let line = text
        .lines()
        .find(|line| line.starts_with("NVRM version:"))?;
    line.split_whitespace().find_map(|word| {
        let (branch, rest) = word.split_once('.')?;
        rest.starts_with(|c: char| c.is_ascii_digit())
            .then_some(())?;
        Some((word, branch.parse().ok()?))
    })
}

fn gpu_models(gpus: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(gpus) else {
        return Vec::new();
    };
    let mut models: Vec<String> = entries
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("information")).ok())
        .map(|text| {
            let model = text.lines().find_map(|line| line.strip_prefix("Model:"));
            model.map_or("GPU of unknown model", str::trim).to_owned()
        })
        .collect();
    models.sort_unstable();
    models
}

/// `2 x NVIDIA H200`, from a sorted list.
fn counted(models: &[String]) -> String {
    let groups = models.chunk_by(|a, b| a == b);
    let texts: Vec<String> = groups.map(|g| format!("{} x {}", g.len(), g[0])).collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervisor::doctor::Status;

    const CLOSED: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Fri Oct 3\n\
                          GCC version:  gcc version 12.2.0\n";
    const OPEN: &str =
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n";

    fn driver(version: &str, models: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("version"), version).unwrap();
        for (i, model) in models.iter().enumerate() {
            let gpu = dir.path().join(format!("gpus/0000:0{i}:00.0"));
            fs::create_dir_all(&gpu).unwrap();
            fs::write(
                gpu.join("information"),
                format!("Model: \t\t {model}\nIRQ: 1\n"),
            )
            .unwrap();
        }
        dir
    }

    #[test]
    fn machine_without_driver_is_fine_for_cpu_jobs() {
        let dir = tempfile::tempdir().unwrap();
        let checks = checks_in(dir.path());
        assert_eq!(
            checks,
            [Check::ok("nvidia", "no NVIDIA driver: CPU jobs only")]
        );
    }

    #[test]
    fn driver_and_gpus_are_listed() {
        let dir = driver(
            CLOSED,
            &["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200"],
        );
        let checks = checks_in(dir.path());
        let detail = "driver 580.159.04, 1 x NVIDIA H100 80GB HBM3, 2 x NVIDIA H200";
        assert_eq!(checks, [Check::ok("nvidia", detail)]);
    }

    #[test]
    fn driver_that_cannot_suspend_is_a_problem() {
        let dir = driver(OPEN, &["NVIDIA L4"]);
        let checks = checks_in(dir.path());
        assert_eq!(checks[0].status, Status::Problem);
        assert!(checks[0].detail.contains("550.54.15"), "{checks:?}");
    }

    #[test]
    fn driver_without_gpu_or_version_is_noted() {
        assert_eq!(
            checks_in(driver(CLOSED, &[]).path())[0].status,
            Status::Note
        );
        assert_eq!(
            checks_in(driver("garbage", &[]).path())[0].status,
            Status::Note
        );
        assert_eq!(checks_in(driver("", &[]).path())[0].status, Status::Note);
    }
}
