//! The map from each GPU of a suspended process to the GPU it is restored onto.
//!
//! This module must not know which GPUs exist, nor what is restored.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::uuid::{GpuUuid, UuidError, shown};

/// Limit on the GPUs of a map, more than any machine has.
const PAIRS_MAX: usize = 256;

/// A GPU that a process had, and the GPU that replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpuPair {
    /// The GPU on which the process was suspended.
    pub old: GpuUuid,
    /// The GPU to restore it onto.
    pub new: GpuUuid,
}

/// A map of GPUs for a restore. If it is empty, each GPU stays the same.
///
/// A map that is not empty must name **every** GPU that was visible to the process when it was suspended,
/// including unchanged GPUs and those hidden by `CUDA_VISIBLE_DEVICES`. If one is missing, the driver returns 1,
/// invalid value, and restores nothing (driver 580.159). The new GPU must be of the same model with as much free
/// memory. The capability for a map is in [`Capabilities::gpu_map`](super::Capabilities::gpu_map).
///
/// The type parses from `OLD=NEW,OLD=NEW` and prints in the same form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuMap(Vec<GpuPair>);

/// The reason why a map of GPUs is not valid.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GpuMapError {
    /// A part of the text is not a pair.
    #[error(
        "cannot read {given:?} as a pair of GPUs: write OLD=NEW,OLD=NEW with the UUIDs of GPUs"
    )]
    Pair {
        /// The part.
        given: String,
    },
    /// A part of a pair is not a GPU.
    #[error(transparent)]
    Uuid(#[from] UuidError),
    /// An old GPU has two new GPUs.
    #[error("cannot map {old} twice: each old GPU has one new GPU")]
    OldTwice {
        /// The GPU that is named more than once.
        old: GpuUuid,
    },
    /// Two old GPUs have the same new GPU.
    #[error("cannot map two GPUs onto {new}: each new GPU replaces one old GPU")]
    NewTwice {
        /// The GPU that is named more than once.
        new: GpuUuid,
    },
    /// More pairs than any machine has GPUs.
    #[error("cannot map more than {most} GPUs")]
    TooMany {
        /// The supported number.
        most: usize,
    },
    /// Too few GPUs to replace the missing ones.
    #[error(
        "cannot find a replacement for {old}: the process had {had} GPUs, this machine has {here}"
    )]
    TooFew {
        /// The first GPU without a replacement.
        old: GpuUuid,
        /// The number of GPUs that the process had.
        had: usize,
        /// The number of GPUs of this machine.
        here: usize,
    },
}

impl GpuMap {
    /// Creates a map of these pairs.
    ///
    /// # Errors
    /// A GPU is named twice on one side.
    pub fn new(pairs: Vec<GpuPair>) -> Result<Self, GpuMapError> {
        if pairs.len() > PAIRS_MAX {
            return Err(GpuMapError::TooMany { most: PAIRS_MAX });
        }
        for (index, pair) in pairs.iter().enumerate() {
            let before = pairs.iter().take(index);
            if before.clone().any(|other| other.old == pair.old) {
                return Err(GpuMapError::OldTwice { old: pair.old });
            }
            if before.clone().any(|other| other.new == pair.new) {
                return Err(GpuMapError::NewTwice { new: pair.new });
            }
        }
        Ok(Self(pairs))
    }

    /// Returns a map onto a machine with the GPUs `here` for a process that had the GPUs `old`, all that its driver
    /// showed it. GPUs that still exist stay the same; each missing GPU is replaced by the next unused GPU, in order.
    /// The map is empty if none is missing. The driver checks that the models agree.
    ///
    /// # Errors
    /// There are fewer GPUs than the process had, or one is named twice.
    pub fn onto(old: &[GpuUuid], here: &[GpuUuid]) -> Result<Self, GpuMapError> {
        let mut left = here.iter().copied().filter(|gpu| !old.contains(gpu));
        let pairs = old.iter().map(|&gpu| {
            let stays = here.contains(&gpu).then_some(gpu);
            let new = stays.or_else(|| left.next()).ok_or(GpuMapError::TooFew {
                old: gpu,
                had: old.len(),
                here: here.len(),
            })?;
            Ok(GpuPair { old: gpu, new })
        });
        let map = Self::new(pairs.collect::<Result<_, GpuMapError>>()?)?;
        let moves = map.0.iter().any(|pair| pair.old != pair.new);
        Ok(if moves { map } else { Self::default() })
    }

    /// Returns the pairs in the given order.
    #[must_use]
    pub fn pairs(&self) -> &[GpuPair] {
        &self.0
    }

    /// Returns true if no GPU is named, so that each GPU stays the same.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for GpuMap {
    type Err = GpuMapError;

    fn from_str(text: &str) -> Result<Self, GpuMapError> {
        let pairs = text.split(',').take(PAIRS_MAX + 1).map(|part| {
            let (old, new) = part
                .split_once('=')
                .ok_or_else(|| GpuMapError::Pair { given: shown(part) })?;
            Ok(GpuPair {
                old: old.parse()?,
                new: new.parse()?,
            })
        });
        Self::new(pairs.collect::<Result<_, GpuMapError>>()?)
    }
}

impl fmt::Display for GpuMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, GpuPair { old, new }) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{old}={new}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(number: u8) -> GpuUuid {
        GpuUuid::from_bytes([number; 16])
    }

    fn pairs(map: &GpuMap) -> Vec<(GpuUuid, GpuUuid)> {
        map.pairs()
            .iter()
            .map(|pair| (pair.old, pair.new))
            .collect()
    }

    fn onto(old: &[u8], here: &[u8]) -> Result<Vec<(GpuUuid, GpuUuid)>, GpuMapError> {
        let gpus = |numbers: &[u8]| numbers.iter().map(|&n| gpu(n)).collect::<Vec<_>>();
        GpuMap::onto(&gpus(old), &gpus(here)).map(|map| pairs(&map))
    }

    #[test]
    fn a_map_parses_and_prints_as_it_is_written() {
        let text = format!("{}={},{}={}", gpu(1), gpu(2), gpu(2), gpu(1));
        let map: GpuMap = text.parse().unwrap();
        assert_eq!(pairs(&map), [(gpu(1), gpu(2)), (gpu(2), gpu(1))]);
        assert_eq!(map.to_string(), text);
        assert!(!map.is_empty() && GpuMap::default().is_empty());
    }

    #[test]
    fn no_gpu_is_mapped_twice_on_either_side() {
        let map = |old: u8, new: u8| format!("{}={},{}={}", gpu(1), gpu(2), gpu(old), gpu(new));
        assert_eq!(
            map(1, 3).parse::<GpuMap>(),
            Err(GpuMapError::OldTwice { old: gpu(1) })
        );
        assert_eq!(
            map(3, 2).parse::<GpuMap>(),
            Err(GpuMapError::NewTwice { new: gpu(2) })
        );
        assert_eq!(
            onto(&[1, 1], &[2, 3]),
            Err(GpuMapError::OldTwice { old: gpu(1) })
        );
    }

    #[test]
    fn invalid_map_is_refused_with_the_wrong_part() {
        for text in ["", ",", "GPU-1", "a,b"] {
            let error = text.parse::<GpuMap>().unwrap_err();
            assert!(matches!(error, GpuMapError::Pair { .. }), "{text}: {error}");
        }
        let text = format!("{}=GPU-12", gpu(1));
        let error = text.parse::<GpuMap>().unwrap_err();
        assert!(error.to_string().contains("\"GPU-12\""), "{error}");
        let text = format!("{}=MIG-{}", gpu(1), gpu(2));
        let error = text.parse::<GpuMap>().unwrap_err();
        assert!(error.to_string().contains("MIG instance"), "{error}");
    }

    #[test]
    fn a_map_longer_than_any_machine_is_refused() {
        let pair = |n: u16| {
            let mut old = [0; 16];
            old[..2].copy_from_slice(&n.to_be_bytes());
            let mut new = old;
            new[15] = 1;
            let (old, new) = (GpuUuid::from_bytes(old), GpuUuid::from_bytes(new));
            GpuPair { old, new }
        };
        let most: Vec<GpuPair> = (0..256).map(pair).collect();
        let text = GpuMap::new(most).unwrap().to_string();
        assert_eq!(text.parse::<GpuMap>().unwrap().pairs().len(), PAIRS_MAX);
        let more = format!("{text},{}={}", gpu(8), gpu(9));
        assert_eq!(
            more.parse::<GpuMap>(),
            Err(GpuMapError::TooMany { most: PAIRS_MAX })
        );
    }

    #[test]
    fn a_process_gets_gpus_in_the_place_of_those_that_are_gone() {
        let [a, b, c, d] = [1, 2, 3, 4].map(gpu);
        assert_eq!(onto(&[1, 2], &[3, 4]), Ok(vec![(a, c), (b, d)]));
        assert_eq!(onto(&[1, 2], &[2, 3]), Ok(vec![(a, c), (b, b)]));
        assert_eq!(onto(&[1], &[3, 4]), Ok(vec![(a, c)]));
        assert_eq!(onto(&[1, 2], &[2, 3, 1]), Ok(vec![]), "none is gone");
        assert_eq!(onto(&[], &[1]), Ok(vec![]));
        let error = onto(&[1, 2], &[3]).unwrap_err();
        assert!(
            matches!(error, GpuMapError::TooFew { old, had: 2, here: 1 } if old == b),
            "{error}"
        );
    }
}
