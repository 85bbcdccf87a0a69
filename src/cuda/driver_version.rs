//! The driver's version, and the capabilities that follow from it.

use std::fmt;

/// The first CUDA version whose `cuCheckpointProcessRestore` takes pairs of GPUs. In older versions those bytes are
/// reserved; the effect of a pair is not documented.
const GPU_MAP_CUDA: (u32, u32) = (13, 0);

/// The driver's version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverVersion {
    /// The driver's release, such as `580.159.04`, if the kernel module reports it.
    pub release: Option<String>,
    /// The major number of the newest CUDA it supports: 13 for 13.0.
    pub cuda_major: u32,
    /// The minor number: 0 for 13.0.
    pub cuda_minor: u32,
}

impl DriverVersion {
    /// Converts a number of `cuDriverGetVersion`: 1000 × major + 10 × minor.
    pub(super) fn from_raw(raw: i32, release: Option<String>) -> Self {
        let raw = u32::try_from(raw).unwrap_or(0);
        Self {
            release,
            cuda_major: raw / 1000,
            cuda_minor: raw % 1000 / 10,
        }
    }

    /// Returns true if a restore accepts pairs of GPUs.
    pub(super) fn takes_gpu_map(&self) -> bool {
        (self.cuda_major, self.cuda_minor) >= GPU_MAP_CUDA
    }
}

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let release = self.release.as_deref().unwrap_or("of unknown release");
        write!(
            f,
            "{release} (CUDA {}.{})",
            self.cuda_major, self.cuda_minor
        )
    }
}

/// The capabilities of a driver beyond suspending and resuming on the same GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// The driver's version.
    pub version: DriverVersion,
    /// True if a process can be restored onto other GPUs. The version decides, because the function is the same: the
    /// header of CUDA 13.0 (driver 580) is the first with pairs of GPUs.
    pub gpu_map: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_the_driver_writes_them() {
        let version = DriverVersion::from_raw(13000, Some("580.159.04".to_owned()));
        assert_eq!(version.to_string(), "580.159.04 (CUDA 13.0)");
        assert_eq!(
            DriverVersion::from_raw(12080, None).to_string(),
            "of unknown release (CUDA 12.8)"
        );
        assert_eq!(DriverVersion::from_raw(-1, None).cuda_major, 0);
    }
}
