//! The identity of a GPU that is the same on every machine and after every reboot.
//!
//! NVML, `nvidia-smi`, the kernel driver's files and CUDA print the same 16 bytes in different spellings; this module
//! reads all of them. It must not know which GPUs exist.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Lengths of the groups between the dashes of the 32 digits: the dashes follow 4, 6, 8 and 10 bytes.
const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
/// Limit on a text that is quoted in a message, slightly longer than any spelling.
const SHOWN_CHARACTERS_MAX: usize = 64;

/// The UUID of a whole GPU, as the driver compares it (`CUuuid`).
///
/// It parses from `GPU-` and 32 hexadecimal digits in either case, with or without the prefix and with or without the
/// dashes; it prints in the form of `nvidia-smi`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid([u8; 16]);

/// The reason why a text is not a [`GpuUuid`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UuidError {
    /// The text names a part of a GPU. The driver's documentation does not specify if it restores onto such a part.
    #[error(
        "cannot map {given:?}: it is a MIG instance, and only whole GPUs (GPU-...) can be mapped"
    )]
    Mig {
        /// The given text.
        given: String,
    },
    /// The text is neither a GPU's UUID nor an instance's. The short forms that `CUDA_VISIBLE_DEVICES` accepts are
    /// refused as well: they have a meaning only on the machine where they were written.
    #[error(
        "{given:?} is not the UUID of a GPU, such as GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b \
         (`ckpt-run cuda gpus` lists them)"
    )]
    Form {
        /// The given text.
        given: String,
    },
}

impl GpuUuid {
    /// Creates a UUID from the bytes of a `CUuuid`, in the order in which they are printed.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of a `CUuuid`.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl FromStr for GpuUuid {
    type Err = UuidError;

    fn from_str(text: &str) -> Result<Self, UuidError> {
        let text = text.trim();
        if has_prefix(text, "MIG-") {
            return Err(UuidError::Mig { given: shown(text) });
        }
        let digits = if has_prefix(text, "GPU-") {
            text.get(4..).unwrap_or_default()
        } else {
            text
        };
        bytes_of(digits)
            .map(Self)
            .ok_or_else(|| UuidError::Form { given: shown(text) })
    }
}

fn has_prefix(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// Parses 32 digits, without dashes or with all four in their places.
fn bytes_of(text: &str) -> Option<[u8; 16]> {
    let dashed = text.contains('-');
    if dashed && !text.split('-').map(str::len).eq(GROUPS) {
        return None;
    }
    let mut digits = text.bytes().filter(|&byte| byte != b'-').map(value_of);
    let mut bytes = [0; 16];
    for byte in &mut bytes {
        let (high, low) = (digits.next()??, digits.next()??);
        *byte = high << 4 | low;
    }
    digits.next().is_none().then_some(bytes)
}

fn value_of(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

/// Returns the text as a message quotes it.
pub(super) fn shown(text: &str) -> String {
    let mut kept: String = text.chars().take(SHOWN_CHARACTERS_MAX).collect();
    if kept.len() < text.len() {
        kept.push('…');
    }
    kept
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        let mut bytes = self.0.iter();
        for group in GROUPS {
            f.write_str("-")?;
            for byte in bytes.by_ref().take(group / 2) {
                write!(f, "{byte:02x}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PRINTED: &str = "GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b";

    #[test]
    fn every_spelling_that_is_printed_is_the_same_gpu() {
        let uuid: GpuUuid = PRINTED.parse().unwrap();
        assert_eq!(uuid.as_bytes()[..4], [0x6d, 0x1c, 0x2d, 0x4e]);
        assert_eq!(uuid.as_bytes()[15], 0x6b);
        for spelling in [
            "gpu-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b",
            "GPU-6D1C2D4E-7D8A-41F3-9D0E-1C2D3E4F5A6B",
            "6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b",
            "6d1c2d4e7d8a41f39d0e1c2d3e4f5a6b",
            "GPU-6d1c2d4e7d8a41f39d0e1c2d3e4f5a6b",
            " GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b\n",
        ] {
            assert_eq!(spelling.parse(), Ok(uuid), "{spelling}");
        }
        assert_eq!(uuid.to_string(), PRINTED);
        assert_eq!(GpuUuid::from_bytes(*uuid.as_bytes()), uuid);
    }

    #[test]
    fn mig_instance_is_refused_as_such() {
        for text in [
            "MIG-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b",
            "mig-GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b/1/0",
        ] {
            let error = text.parse::<GpuUuid>().unwrap_err();
            assert!(matches!(error, UuidError::Mig { .. }), "{error}");
            assert!(error.to_string().contains("MIG instance"), "{error}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "0",
            "GPU-",
            "GPU-6d1c2d4e",
            "GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6",
            "GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b0",
            "GPU-6d1c2d4-e7d8a-41f3-9d0e-1c2d3e4f5a6b",
            "6d1c2d4e7d8a41f39d0e1c2d3e4f5a6b-",
            "GPU-GPU-6d1c2d4e7d8a41f39d0e1c2d3e4f5a6b",
            "GPU-6d1c2d4g-7d8a-41f3-9d0e-1c2d3e4f5a6b",
            "GPÜ-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b",
        ] {
            let error = text.parse::<GpuUuid>().unwrap_err();
            assert!(matches!(error, UuidError::Form { .. }), "{text}: {error}");
        }
        let error = "x".repeat(1 << 20).parse::<GpuUuid>().unwrap_err();
        assert!(error.to_string().len() < 300, "a message stays a message");
    }

    proptest! {
        #[test]
        fn printed_form_parses_to_the_same_value(bytes: [u8; 16]) {
            let uuid = GpuUuid::from_bytes(bytes);
            prop_assert_eq!(uuid.to_string().parse(), Ok(uuid));
        }

        #[test]
        fn no_text_makes_the_parser_fall(text: String) {
            if let Ok(uuid) = text.parse::<GpuUuid>() {
                prop_assert_eq!(uuid.to_string().parse(), Ok(uuid));
            }
        }
    }
}
