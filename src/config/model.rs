//! The settings as the rest of the program uses them: typed and in range, with no text left to parse.
//!
//! The meaning of each setting is documented once, in `config/default.toml`. `Default` equals that file; a test keeps
//! them consistent.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use super::CronExpression;
use super::operation::{Hang, HangAction, Hooks, Interval, Jitter};
use super::restart_settings::{Restart, RestartLimit, RestartPolicy, WithoutImage};
use super::units::ExitStatus;

/// The complete settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Folder of the images, relative to the working directory unless absolute.
    pub store: PathBuf,
    /// The isolation of the job from the machine.
    pub isolation: Isolation,
    /// Name of the user that the job runs as; `None` for ckpt-run's own.
    pub user: Option<String>,
    /// The choice of a separate terminal for the job.
    pub tty: Tty,
    /// `[sandbox]`: the job's view of the machine.
    pub sandbox: Sandbox,
    /// `[snapshot]`: times and properties of snapshots.
    pub snapshot: Snapshot,
    /// `[retention]`: the images to keep.
    pub retention: Retention,
    /// `[encryption]`: the encryption of images.
    pub encryption: Encryption,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// Namespaces if possible, otherwise none.
    Auto,
    /// Namespaces or an error.
    Namespaces,
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

/// `[sandbox]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sandbox {
    /// The job's view of `io_uring`.
    pub io_uring: IoUring,
}

/// The job's view of `io_uring`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoUring {
    /// The job does not see it, if ckpt-run has `CAP_SYS_ADMIN`.
    Hide,
    /// The job sees it, and cannot be snapshotted while it uses it.
    Allow,
}

/// `[snapshot]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Time between snapshots; has no effect while `cron` is given.
    pub interval: Interval,
    /// Local times of snapshots, instead of the interval.
    pub cron: Option<CronExpression>,
    /// Assumed computing time between two failures.
    pub mtbf: Duration,
    /// Largest share of the job's time, 0 to 1, that its freezes may take.
    pub max_overhead: f64,
    /// Largest delay of a snapshot after its time.
    pub jitter: Jitter,
    /// Host memory for an image that is not yet on the disk.
    pub buffer: Buffer,
    /// Bytes that must stay free on the store's disk; 0 disables the check.
    pub min_free: u64,
    /// Time for the last snapshot after a request to stop.
    pub grace: Duration,
    /// Time for submitted GPU work to finish; fits 32 bits of milliseconds.
    pub lock_timeout: Duration,
    /// Time limit for CRIU's part of a dump or a restore, and for each operation of the CUDA driver.
    pub timeout: Duration,
    /// Compression level of zstd, -7 to 19.
    pub level: i32,
    /// Threads of the store.
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

/// Threads of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cpus {
    /// Thread count equal to the number of CPUs that ckpt-run may use.
    Auto,
    /// A fixed number of threads.
    Count(NonZeroUsize),
}

/// `[retention]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Number of newest images to keep, at least 1.
    pub keep_last: u32,
    /// Age up to which images are kept.
    pub keep_within: Duration,
    /// Number of hours of which the newest image is kept.
    pub keep_hourly: u32,
    /// Number of days of which the newest image is kept.
    pub keep_daily: u32,
}

/// `[encryption]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Encryption {
    /// No encryption.
    Off,
    /// Encryption with the key in a file.
    KeyFile(PathBuf),
    /// Encryption with the key that a shell command prints.
    KeyCommand(String),
}

/// `[restore]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restore {
    /// Host memory for chunks that are read ahead, in bytes.
    pub buffer: u64,
}

/// `[network]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// The treatment of connections to other programs at a restore.
    pub tcp: Tcp,
}

/// The treatment of a TCP connection between the job and other programs at a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tcp {
    /// The job finds the connection closed.
    Close,
    /// The connection is restored unchanged.
    Keep,
}

/// `[files]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Largest file, in bytes, that is saved with its content.
    pub keep_content: u64,
    /// Most bytes of files that an image saves.
    pub keep_total: u64,
    /// Time that the job may be frozen for the contents of its files.
    pub freeze: Duration,
    /// Method that finds the files that the job writes.
    pub watch: Watch,
    /// Files that are the job's, whoever writes them.
    pub include: Vec<String>,
    /// Files that are never saved or put back.
    pub exclude: Vec<String>,
    /// What happens when a file cannot be put back.
    pub on_lost: OnLost,
}

/// The way in which the files that the job writes are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    /// Use fanotify where the kernel and the privileges allow it, else scan.
    Auto,
    /// Scan.
    Off,
}

/// What happens when a file of the job cannot be put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLost {
    /// The image is refused.
    Refuse,
    /// The job is restored with the file as it is, and a warning names it.
    Warn,
}

/// `[cuda]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cuda {
    /// The job's NCCL settings for shared GPU memory.
    pub nccl: Nccl,
    /// The location of device memory while the job is suspended.
    pub memory: Memory,
}

/// The location of device memory while the job is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// `Resident` if possible, otherwise `Driver`.
    Auto,
    /// Large allocations stay on the GPU and are copied into the image from there.
    Resident,
    /// The driver copies all device memory into the job's own host memory.
    Driver,
}

/// The NCCL settings in the job's environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Criu {
    /// The program; searched for if not given.
    pub path: Option<PathBuf>,
    /// CRIU's `-v`, 0 to 4.
    pub log_level: u8,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// The least important level that is still shown.
    pub level: LogLevel,
    /// The display of running snapshots and restores on a terminal.
    pub progress: ShowProgress,
    /// The file that the run's events are written to, in addition to the store.
    pub events: Option<PathBuf>,
}

/// `[metrics]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metrics {
    /// File for the node exporter's textfile collector.
    pub textfile: Option<PathBuf>,
    /// Address of an HTTP endpoint; on this machine alone unless `allow_remote`.
    pub listen: Option<SocketAddr>,
    /// Permission for other machines to read the metrics.
    pub allow_remote: bool,
}

/// The progress display of long operations: the status line of a run, the bar of another command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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

/// Folders whose content any program makes again, and several programs share.
const CACHES: [&str; 3] = ["~/.cache", "~/.nv", "~/.triton"];

impl Default for Config {
    fn default() -> Self {
        Self {
            store: PathBuf::from("./.ckpt-run"),
            isolation: Isolation::Auto,
            user: None,
            tty: Tty::Auto,
            sandbox: Sandbox {
                io_uring: IoUring::Hide,
            },
            snapshot: Snapshot {
                interval: Interval::Every(Duration::from_secs(15 * 60)),
                cron: None,
                mtbf: Duration::from_secs(6 * 3600),
                max_overhead: 0.05,
                jitter: Jitter::Time(Duration::ZERO),
                buffer: Buffer::Auto,
                min_free: 1 << 30,
                grace: Duration::from_secs(60),
                lock_timeout: Duration::from_secs(30),
                timeout: Duration::from_secs(10 * 60),
                level: 1,
                cpus: Cpus::Auto,
            },
            retention: Retention {
                keep_last: 5,
                keep_within: Duration::ZERO,
                keep_hourly: 0,
                keep_daily: 0,
            },
            encryption: Encryption::Off,
            restart: Restart {
                policy: RestartPolicy::OnFailure,
                max: RestartLimit::Auto,
                backoff: Duration::from_secs(1),
                backoff_factor: 2.0,
                backoff_max: Duration::from_secs(60),
                prevent: vec![ExitStatus::Exited(2)],
                without_image: WithoutImage::GiveUp,
            },
            hang: Hang {
                output: None,
                gpu: None,
                cpu: None,
                heartbeat: None,
                heartbeat_timeout: Duration::from_secs(5 * 60),
                action: HangAction::Restore,
            },
            hooks: Hooks {
                before_snapshot: None,
                after_snapshot: None,
                after_restore: None,
                on_give_up: None,
                on_hang: None,
                timeout: Duration::from_secs(30),
            },
            restore: Restore { buffer: 256 << 20 },
            network: Network { tcp: Tcp::Close },
            files: Files {
                keep_content: 1 << 30,
                keep_total: 8 << 30,
                freeze: Duration::from_millis(250),
                watch: Watch::Auto,
                include: Vec::new(),
                exclude: CACHES.map(str::to_owned).to_vec(),
                on_lost: OnLost::Refuse,
            },
            cuda: Cuda {
                nccl: Nccl::Auto,
                memory: Memory::Auto,
            },
            criu: Criu {
                path: None,
                log_level: 2,
            },
            log: Log {
                level: LogLevel::Info,
                progress: ShowProgress::Auto,
                events: None,
            },
            metrics: Metrics::default(),
        }
    }
}
