//! Settings: what they are, where each one came from, and why one is refused.
//!
//! [`load`] lays the places that hold settings over each other (the embedded
//! [`DEFAULT_TOML`], files, the environment, flags), checks every value as it
//! comes in, and remembers the place it came from. Whoever holds a [`Config`]
//! may rely on its ranges.
//!
//! ```text
//! Sources ─ files, variables, flags ─→ layers of (key, value, origin)
//!         ─ keys::KEYS checks and sets ─→ Config + origins
//! ```
//!
//! Nothing here knows what a setting does, nor asks for the time.

mod choice;
mod cron;
mod error;
mod file;
mod keys;
mod layer;
mod limits;
mod loaded;
mod model;
mod operation;
mod reading;
mod sources;
mod units;
mod value;

pub use cron::CronExpression;
pub use error::{ConfigError, Distrust, Invalid};
pub use loaded::{DEFAULT_TOML, Loaded, check, load};
pub use model::{
    Buffer, Config, Cpus, Criu, Cuda, Encryption, Files, IoUring, Isolation, Log, LogLevel, Memory,
    Metrics, Nccl, Network, Retention, Sandbox, ShowProgress, Snapshot, Tcp, Tty,
};
pub use operation::{Hang, HangAction, HookCommand, Hooks, Interval, Jitter, Occasion};
pub use restart_settings::{Restart, RestartLimit, RestartPolicy, WithoutImage};
pub use sources::{Origin, Override, ProjectFile, Sources};

pub use units::ExitStatus;
pub(crate) use units::{format_percent, parse_duration};
pub(crate) use value::Choice;

#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_config;
mod restart_settings;
#[cfg(test)]
mod tests;
