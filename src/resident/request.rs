//! What an agent can be asked.

use super::wire;

/// Requests by their kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Hello,
    Probe,
    Release,
    Map,
    Remake,
    Origins,
}

impl Kind {
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::Hello => wire::HELLO,
            Self::Probe => wire::PROBE,
            Self::Release => wire::RELEASE,
            Self::Map => wire::MAP,
            Self::Remake => wire::REMAKE,
            Self::Origins => wire::ORIGINS,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hello => "asking for the agent",
            Self::Probe => "asking the driver",
            Self::Release => "releasing the device memory",
            Self::Map => "mapping the device memory",
            Self::Remake => "making the device memory anew",
            Self::Origins => "asking for shared memory",
        }
    }

    /// Whether the answers bring descriptors.
    pub(super) const fn brings_memory(self) -> bool {
        match self {
            Self::Release | Self::Remake => true,
            Self::Hello | Self::Probe | Self::Map | Self::Origins => false,
        }
    }
}
