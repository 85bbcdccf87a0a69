//! The driver's texts for fuzzing.

use super::gpu::parse_information;

/// Parses a GPU's `/proc/driver/nvidia/gpus/*/information`.
pub(crate) fn information(text: &str) -> bool {
    parse_information(text).is_some()
}
