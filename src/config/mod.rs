//! Settings: their types, their origins, and the reasons for a refusal.
//!
//! [`load`] combines the places that hold settings (the embedded [`DEFAULT_TOML`], files, the environment, flags),
//! checks every value when it is read, and records its origin. Users of a [`Config`] may rely on its ranges.
//!
//! ```text
//! Sources ─ files, variables, flags ─→ layers of (key, value, origin)
//!         ─ serde reads, limits checks ─→ Config + origins
//! ```
//!
//! This module does not know the effect of a setting and does not read the time.

mod cron;
mod error;
mod file;
mod layer;
mod limits;
mod loaded;
mod model;
mod operation;
mod reading;
mod sources;
mod units;

pub use cron::CronExpression;
pub use error::{ConfigError, Distrust, Invalid};
pub use loaded::{DEFAULT_TOML, Loaded, check, load};
pub use model::{
    Buffer, Config, Cpus, Criu, Cuda, Encryption, Files, Isolation, Log, LogLevel, Memory, Metrics,
    Nccl, Network, NetworkNamespace, OnLost, Retention, Sandbox, ShowProgress, Snapshot, Tcp, Tty,
    Visibility, Watch,
};
pub use operation::{Hang, HangAction, HookCommand, Hooks, Interval, Jitter, Occasion, Sharing};
pub use preemption_settings::{Endpoint, NoticeSource, Preemption};
pub use restart_settings::{Restart, RestartLimit, RestartPolicy, WithoutImage};
pub(crate) use sources::PROJECT_FILE;
pub use sources::{Origin, Override, ProjectFile, Sources};

pub use units::ExitStatus;
pub(crate) use units::{format_percent, parse_duration};

mod preemption_settings;
mod restart_settings;
#[cfg(test)]
mod tests;
