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
    Hold,
    Pass,
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
            Self::Hold => wire::HOLD,
            Self::Pass => wire::PASS,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hello => "reach the agent",
            Self::Probe => "query the driver",
            Self::Release => "unmap the device memory",
            Self::Map => "map the device memory",
            Self::Remake => "create new device memory",
            Self::Origins => "query the shared memory",
            Self::Holdings => "query the memory on each GPU",
            Self::Hold => "hold back CUDA calls",
            Self::Pass => "let CUDA calls pass",
        }
    }

    /// Returns true if the replies carry descriptors.
    pub(super) const fn brings_memory(self) -> bool {
        match self {
            Self::Release | Self::Remake => true,
            Self::Hello
            | Self::Probe
            | Self::Map
            | Self::Origins
            | Self::Holdings
            | Self::Hold
            | Self::Pass => false,
        }
    }

    /// Returns true if the replies describe memory without descriptors.
    pub(super) const fn describes_memory(self) -> bool {
        match self {
            Self::Origins | Self::Holdings => true,
            Self::Hello
            | Self::Probe
            | Self::Map
            | Self::Release
            | Self::Remake
            | Self::Hold
            | Self::Pass => false,
        }
    }
}
