//! The content of a notice.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Cloud whose notices are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cloud {
    /// Amazon EC2.
    Aws,
    /// Google Compute Engine.
    Gcp,
    /// Azure virtual machines.
    Azure,
}

impl Cloud {
    /// Every cloud, in the order in which `preemption.watch = "auto"` asks.
    pub(super) const ALL: [Self; 3] = [Self::Aws, Self::Gcp, Self::Azure];

    /// Returns the value of `preemption.watch` for this cloud.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::Gcp => "gcp",
            Self::Azure => "azure",
        }
    }

    /// Returns the name for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Aws => "AWS",
            Self::Gcp => "Google Cloud",
            Self::Azure => "Azure",
        }
    }
}

/// Fate of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// The machine is removed.
    Terminate,
    /// The machine is stopped and may be started again.
    Stop,
    /// The machine is suspended to its disk.
    Hibernate,
    /// The machine is removed or stopped, as it is configured.
    Preempt,
    /// An action of a newer service.
    #[serde(other)]
    Other,
}

impl Action {
    /// Returns the word, as in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Terminate => "terminate",
            Self::Stop => "stop",
            Self::Hibernate => "hibernate",
            Self::Preempt => "preempt",
            Self::Other => "other",
        }
    }
}

/// Announcement of a cloud that it takes this machine back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// The cloud.
    pub cloud: Cloud,
    /// Fate of the machine.
    pub action: Action,
    /// Earliest time of the action, by the cloud's clock.
    pub deadline: Timestamp,
}
