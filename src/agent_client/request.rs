//! Kinds of requests to an agent.

use super::wire;

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Hello,
    Probe,
    Release,
    Map,
    Remake,
    Origins,
    Holdings,
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
            Self::Holdings => wire::HOLDINGS,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hello => "asking for the agent",
            Self::Probe => "asking the driver",
            Self::Release => "releasing the device memory",
            Self::Map => "mapping the device memory",
            Self::Remake => "creating new device memory",
            Self::Origins => "asking for shared memory",
            Self::Holdings => "asking for the memory on each GPU",
        }
    }

    /// Returns true if the replies carry descriptors.
    pub(super) const fn brings_memory(self) -> bool {
        match self {
            Self::Release | Self::Remake => true,
            Self::Hello | Self::Probe | Self::Map | Self::Origins | Self::Holdings => false,
        }
    }

    /// Returns true if the replies describe memory without descriptors.
    pub(super) const fn describes_memory(self) -> bool {
        match self {
            Self::Origins | Self::Holdings => true,
            Self::Hello | Self::Probe | Self::Map | Self::Release | Self::Remake => false,
        }
    }
}
