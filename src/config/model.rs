//! The settings as the rest of the program uses them: typed and in range, with no text left to parse.
//!
//! The meaning and the default of each setting are documented once, in `config/default.toml`. serde reads it into these
//! types, so that a setting is a field here and a key there; one without the other is refused by every test.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use serde::Deserialize;

use super::operation::{Hang, Hooks, Interval, Jitter, Sharing};
use super::preemption_settings::Preemption;
use super::reading::{
    address, duration, number, optional, optional_parsed, optional_path, parsed, path, patterns,
    percent, size, size_limit, unless,
};
use super::restart_settings::Restart;
use super::units::{not, parse_size};
use super::{CronExpression, Invalid};

/// The complete settings.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Folder of the images, relative to the working directory unless absolute.
    #[serde(deserialize_with = "path")]
    pub store: PathBuf,
    /// Use of the store by several machines.
    pub store_shared: Sharing,
    /// The isolation of the job from the machine.
    pub isolation: Isolation,
    /// Name of the user that the job runs as; `None` for ckpt-run's own.
    #[serde(deserialize_with = "optional")]
    pub user: Option<String>,
    /// The choice of a separate terminal for the job.
    #[serde(deserialize_with = "parsed")]
    pub tty: Tty,
    /// `[sandbox]`: the job's view of the machine.
    pub sandbox: Sandbox,
    /// `[snapshot]`: times and properties of snapshots.
    pub snapshot: Snapshot,
    /// `[retention]`: the images to keep.
    pub retention: Retention,
    /// `[encryption]`: the encryption of images.
    pub encryption: Encryption,
    /// `[remote]`: the images in object storage.
    pub remote: Remote,
    /// `[preemption]`: the notices of clouds.
    pub preemption: Preemption,
    /// `[restart]`: the reaction to the job's end.
    pub restart: Restart,
    /// `[hang]`: the signs by which a running job is treated as hung.
    pub hang: Hang,
    /// `[hooks]`: commands that run on occasions.
    pub hooks: Hooks,
    /// `[restore]`.
    pub restore: Restore,
    /// `[network]`.
    pub network: Network,
    /// `[files]`: files that the job writes.
    pub files: Files,
    /// `[cuda]`: GPU jobs.
    pub cuda: Cuda,
    /// `[criu]`: the criu program.
    pub criu: Criu,
    /// `[log]`: messages on stderr and the file of events.
    pub log: Log,
    /// `[metrics]`: figures for Prometheus.
    pub metrics: Metrics,
}

/// The isolation of the job from the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// Namespaces if possible, otherwise none.
    Auto,
    /// Namespaces or an error.
    Namespaces,
    /// Namespaces in a user namespace, or an error.
    User,
    /// A plain child.
    None,
}

/// The choice of a separate terminal for the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tty {
    /// A terminal if stdin and stdout of ckpt-run are terminals.
    Auto,
    /// A terminal in any case.
    Always,
    /// No terminal: the job's streams are pipes.
    Never,
}

impl FromStr for Tty {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text {
            "auto" => Ok(Self::Auto),
            "true" => Ok(Self::Always),
            "false" => Ok(Self::Never),
            _ => Err(not(text, "\"auto\", true or false")),
        }
    }
}

/// `[sandbox]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sandbox {
    /// The job's view of `io_uring`, during whose use it cannot be snapshotted.
    pub io_uring: Visibility,
    /// The job's view of Landlock, whose rules are not restored.
    pub landlock: Visibility,
}

/// The job's view of a feature of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Visibility {
    /// The job does not see it, if ckpt-run has `CAP_SYS_ADMIN`.
    Hide,
    /// The job sees it.
    Allow,
}

/// `[snapshot]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// Time between snapshots; has no effect while `cron` is given.
    #[serde(deserialize_with = "parsed")]
    pub interval: Interval,
    /// Local times of snapshots, instead of the interval.
    #[serde(deserialize_with = "optional_parsed")]
    pub cron: Option<CronExpression>,
    /// Assumed computing time between two failures.
    #[serde(deserialize_with = "duration")]
    pub mtbf: Duration,
    /// Largest share of the job's time, 0 to 1, that its freezes may take.
    #[serde(deserialize_with = "percent")]
    pub max_overhead: f64,
    /// Largest delay of a snapshot after its time.
    #[serde(deserialize_with = "parsed")]
    pub jitter: Jitter,
    /// Host memory for an image that is not yet on the disk.
    #[serde(deserialize_with = "parsed")]
    pub buffer: Buffer,
    /// Bytes that must stay free on the store's disk; 0 disables the check.
    #[serde(deserialize_with = "size")]
    pub min_free: u64,
    /// Time for the last snapshot after a request to stop.
    #[serde(deserialize_with = "duration")]
    pub grace: Duration,
    /// Time for submitted GPU work to finish; fits 32 bits of milliseconds.
    #[serde(deserialize_with = "duration")]
    pub lock_timeout: Duration,
    /// Time limit for CRIU's part of a dump or a restore, and for each operation of the CUDA driver.
    #[serde(deserialize_with = "duration")]
    pub timeout: Duration,
    /// Compression level of zstd, -7 to 19.
    #[serde(deserialize_with = "number")]
    pub level: i32,
    /// Threads of the store.
    #[serde(deserialize_with = "parsed")]
    pub cpus: Cpus,
}

/// Host memory for data between the freeze and the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffer {
    /// A size computed from the free memory.
    Auto,
    /// A size of at most this many bytes.
    Bytes(u64),
}

impl FromStr for Buffer {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        Ok(unless("auto", text, parse_size)?.map_or(Self::Auto, Self::Bytes))
    }
}

/// Threads of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cpus {
    /// Thread count equal to the number of CPUs that ckpt-run may use.
    Auto,
    /// A fixed number of threads.
    Count(NonZeroUsize),
}

impl FromStr for Cpus {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let count = unless("auto", text, |text| {
            text.parse().map_err(|_| not(text, "a number of threads"))
        })?;
        Ok(count.map_or(Self::Auto, Self::Count))
    }
}

/// `[retention]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// Number of newest images to keep, at least 1.
    #[serde(deserialize_with = "number")]
    pub keep_last: u32,
    /// Age up to which images are kept.
    #[serde(deserialize_with = "duration")]
    pub keep_within: Duration,
    /// Number of hours of which the newest image is kept.
    #[serde(deserialize_with = "number")]
    pub keep_hourly: u32,
    /// Number of days of which the newest image is kept.
    #[serde(deserialize_with = "number")]
    pub keep_daily: u32,
}

/// `[encryption]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "KeyPlaces")]
pub enum Encryption {
    /// No encryption.
    Off,
    /// Encryption with the key in a file.
    KeyFile(PathBuf),
    /// Encryption with the key that a shell command prints.
    KeyCommand(String),
}

/// The keys of `[encryption]`; at most one of them is given.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyPlaces {
    #[serde(deserialize_with = "optional_path")]
    key_file: Option<PathBuf>,
    #[serde(deserialize_with = "optional")]
    key_command: Option<String>,
}

impl From<KeyPlaces> for Encryption {
    fn from(places: KeyPlaces) -> Self {
        match (places.key_file, places.key_command) {
            (Some(path), _) => Self::KeyFile(path),
            (None, Some(command)) => Self::KeyCommand(command),
            (None, None) => Self::Off,
        }
    }
}

/// `[restore]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// Host memory for chunks that are read ahead, in bytes.
    #[serde(deserialize_with = "size")]
    pub buffer: u64,
}

/// `[remote]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remote {
    /// Address of the folder; `None` if there is none.
    #[serde(deserialize_with = "optional")]
    pub url: Option<String>,
    /// Number of images to keep there.
    #[serde(deserialize_with = "number")]
    pub keep: u32,
    /// True if a snapshot ends with the upload of its image.
    pub sync: bool,
    /// Limit on uploads, in bytes per second.
    #[serde(deserialize_with = "size_limit")]
    pub bandwidth: Option<u64>,
    /// Validity of the lease.
    #[serde(deserialize_with = "duration")]
    pub lease: Duration,
}

/// `[network]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Network of a job in a user namespace.
    pub namespace: NetworkNamespace,
    /// The treatment of connections to other programs at a restore.
    pub tcp: Tcp,
}

/// Network of a job in a user namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetworkNamespace {
    /// A network namespace if pasta can connect it, otherwise the machine's network.
    Auto,
    /// The machine's network.
    Host,
    /// A network namespace, or an error.
    Own,
}

/// The treatment of a TCP connection between the job and other programs at a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tcp {
    /// The job finds the connection closed.
    Close,
    /// The connection is restored unchanged.
    Keep,
}

/// `[files]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// Largest file, in bytes, that is saved with its content.
    #[serde(deserialize_with = "size")]
    pub keep_content: u64,
    /// Most bytes of files that an image saves.
    #[serde(deserialize_with = "size")]
    pub keep_total: u64,
    /// Time that the job may be frozen for the contents of its files.
    #[serde(deserialize_with = "duration")]
    pub freeze: Duration,
    /// Method that finds the files that the job writes.
    pub watch: Watch,
    /// Files that are the job's, whoever writes them.
    #[serde(deserialize_with = "patterns")]
    pub include: Vec<String>,
    /// Files that are never saved or put back.
    #[serde(deserialize_with = "patterns")]
    pub exclude: Vec<String>,
    /// Files that other programs write as well: a restore leaves them as they are.
    #[serde(deserialize_with = "patterns")]
    pub shared: Vec<String>,
    /// Reaction to a file that cannot be put back.
    pub on_lost: OnLost,
}

/// The way in which the files that the job writes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Watch {
    /// Use fanotify where the kernel and the privileges allow it, else scan.
    Auto,
    /// Scan.
    Off,
}

/// Reaction to a file of the job that cannot be put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnLost {
    /// The image is refused.
    Refuse,
    /// The job is restored with the file as it is, and a warning names it.
    Warn,
}

/// `[cuda]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cuda {
    /// The job's NCCL settings for shared GPU memory.
    pub nccl: Nccl,
    /// The location of device memory while the job is suspended.
    pub memory: Memory,
}

/// The location of device memory while the job is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Memory {
    /// `Resident` if possible, otherwise `Driver`.
    Auto,
    /// Large allocations stay on the GPU and are copied into the image from there.
    Resident,
    /// The driver copies all device memory into the job's own host memory.
    Driver,
}

/// The NCCL settings in the job's environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nccl {
    /// `Checkpointable` if there is more than one GPU, otherwise no settings.
    Auto,
    /// Settings that restrict NCCL to features that the driver can restore.
    Checkpointable,
    /// Settings that share memory between GPUs in a way that agents can restore, on the same GPUs.
    Peer,
    /// No settings.
    Off,
}

/// `[criu]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Criu {
    /// The program; searched for if not given.
    #[serde(deserialize_with = "optional_path")]
    pub path: Option<PathBuf>,
    /// CRIU's `-v`, 0 to 4.
    #[serde(deserialize_with = "number")]
    pub log_level: u8,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// The least important level that is still shown.
    pub level: LogLevel,
    /// The display of running snapshots and restores on a terminal.
    pub progress: ShowProgress,
    /// The file that the run's events are written to, in addition to the store.
    #[serde(deserialize_with = "optional_path")]
    pub events: Option<PathBuf>,
}

/// `[metrics]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// File for the node exporter's textfile collector.
    #[serde(deserialize_with = "optional_path")]
    pub textfile: Option<PathBuf>,
    /// Address of an HTTP endpoint; on this machine alone unless `allow_remote`.
    #[serde(deserialize_with = "address")]
    pub listen: Option<SocketAddr>,
    /// Permission for other machines to read the metrics.
    #[serde(deserialize_with = "parsed")]
    pub allow_remote: bool,
}

/// The progress display of long operations: the status line of a run, the bar of another command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ShowProgress {
    /// A display if stderr is a terminal and messages of level "info" are shown.
    Auto,
    /// No display.
    Never,
}

impl ShowProgress {
    /// Returns true if progress is to be shown on a terminal; `info_is_shown` reports that messages of level "info" are
    /// shown.
    #[must_use]
    pub fn is_wanted(self, info_is_shown: bool) -> bool {
        match self {
            Self::Auto => info_is_shown,
            Self::Never => false,
        }
    }
}

/// Importance of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// Returns the level's word, which `tracing`'s filters understand too.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}
