//! The settings as the rest of the program sees them: typed, in range, no text
//! left to parse.
//!
//! What each one means is said once, in `config/default.toml`. `Default` is the
//! same as that file; a test holds them together.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use super::CronExpression;
use super::operation::{Hang, HangAction, Hooks, Interval, Jitter};
use super::restart_settings::{Restart, RestartLimit, RestartPolicy, WithoutImage};
use super::units::ExitStatus;

/// All settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Folder of the images, relative to the working directory unless absolute.
    pub store: PathBuf,
    /// How the job is kept apart from the machine.
    pub isolation: Isolation,
    /// Whether the job runs in a terminal of its own.
    pub tty: Tty,
    /// `[sandbox]`: what the job sees of the machine.
    pub sandbox: Sandbox,
    /// `[snapshot]`: when and how snapshots are taken.
    pub snapshot: Snapshot,
    /// `[retention]`: which images are kept.
    pub retention: Retention,
    /// `[encryption]`: whether images are encrypted.
    pub encryption: Encryption,
    /// `[restart]`: what happens when the job ends.
    pub restart: Restart,
    /// `[hang]`: when a job that has not ended is taken for hung.
    pub hang: Hang,
    /// `[hooks]`: commands that are run on occasions.
    pub hooks: Hooks,
    /// `[restore]`.
    pub restore: Restore,
    /// `[network]`.
    pub network: Network,
    /// `[files]`: files the job writes.
    pub files: Files,
    /// `[cuda]`: GPU jobs.
    pub cuda: Cuda,
    /// `[criu]`: the criu program.
    pub criu: Criu,
    /// `[log]`: what is said on stderr, and where events are written to.
    pub log: Log,
    /// `[metrics]`: figures for Prometheus.
    pub metrics: Metrics,
}

/// How the job is kept apart from the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// Namespaces where possible, else none.
    Auto,
    /// Namespaces or an error.
    Namespaces,
    /// A plain child.
    None,
}

/// Whether the job runs in a terminal of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tty {
    /// When our stdin and stdout are terminals.
    Auto,
    /// Whatever they are.
    Always,
    /// Never: its streams are pipes.
    Never,
}

/// `[sandbox]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sandbox {
    /// Whether the job sees `io_uring`.
    pub io_uring: IoUring,
}

/// Whether the job sees `io_uring`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoUring {
    /// It does not, where we have `CAP_SYS_ADMIN`.
    Hide,
    /// It does, and cannot be snapshotted while it uses it.
    Allow,
}

/// `[snapshot]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Time between snapshots; has no effect while `cron` is given.
    pub interval: Interval,
    /// Local times to snapshot at, instead of the interval.
    pub cron: Option<CronExpression>,
    /// Assumed computing time between two failures.
    pub mtbf: Duration,
    /// Most of the job's time, 0 to 1, that its freezes are to take.
    pub max_overhead: f64,
    /// How far a snapshot may come after its time.
    pub jitter: Jitter,
    /// Host memory for an image on its way to the disk.
    pub buffer: Buffer,
    /// Bytes that stay free where the store is; 0 is no check.
    pub min_free: u64,
    /// Time for the last snapshot after a request to stop.
    pub grace: Duration,
    /// Time for submitted GPU work to finish; fits 32 bits of milliseconds.
    pub lock_timeout: Duration,
    /// Time for CRIU's part of a dump or a restore, and for each work of the CUDA driver's.
    pub timeout: Duration,
    /// Level of zstd, -7 to 19.
    pub level: i32,
    /// Threads of the store.
    pub cpus: Cpus,
}

/// Host memory between the freeze and the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffer {
    /// From the memory that is free.
    Auto,
    /// At most this many bytes.
    Bytes(u64),
}

/// Threads of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cpus {
    /// One for each CPU that we may use.
    Auto,
    /// This many.
    Count(NonZeroUsize),
}

/// `[retention]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Newest images to keep, at least 1.
    pub keep_last: u32,
    /// Images that are not older are kept.
    pub keep_within: Duration,
    /// Hours of which the newest image is kept.
    pub keep_hourly: u32,
    /// Days of which the newest image is kept.
    pub keep_daily: u32,
}

/// `[encryption]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Encryption {
    /// None.
    Off,
    /// With the key in a file.
    KeyFile(PathBuf),
    /// With the key that a shell command prints.
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
    /// What becomes of connections to others at a restore.
    pub tcp: Tcp,
}

/// What becomes of a TCP connection between the job and others at a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tcp {
    /// The job finds it closed.
    Close,
    /// It is restored as it was.
    Keep,
}

/// `[files]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Files {
    /// Largest file, in bytes, that is saved with its content.
    pub keep_content: u64,
}

/// `[cuda]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cuda {
    /// Whether NCCL is told to share no GPU memory.
    pub nccl: Nccl,
    /// Where device memory is while the job is suspended.
    pub memory: Memory,
}

/// Where device memory is while the job is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// As `Resident` where that is possible, else as `Driver`.
    Auto,
    /// Large allocations stay on the GPU and are copied into the image from there.
    Resident,
    /// The driver copies all of it into the job's own host memory.
    Driver,
}

/// What the job's environment tells NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nccl {
    /// As `Checkpointable` where there is more than one GPU, else nothing.
    Auto,
    /// To use what the driver can bring back.
    Checkpointable,
    /// To share memory between GPUs in a way that agents can bring back, on the same GPUs.
    Peer,
    /// Nothing.
    Off,
}

/// `[criu]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Criu {
    /// The program; searched for when not given.
    pub path: Option<PathBuf>,
    /// `-v` of CRIU, 0 to 4.
    pub log_level: u8,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// The least important messages that are still shown.
    pub level: LogLevel,
    /// Whether snapshots and restores under way are shown on a terminal.
    pub progress: ShowProgress,
    /// Where the run's events are written to, besides the store.
    pub events: Option<PathBuf>,
}

/// `[metrics]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metrics {
    /// File for the node exporter's textfile collector.
    pub textfile: Option<PathBuf>,
    /// Address of an HTTP endpoint; of this machine alone unless `allow_remote`.
    pub listen: Option<SocketAddr>,
    /// Whether other machines may ask.
    pub allow_remote: bool,
}

/// Whether what takes its time shows how far it is: a status line of a run's, a bar of a verb's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShowProgress {
    /// Where stderr is a terminal and messages of the level "info" are shown.
    Auto,
    /// Nowhere.
    Never,
}

impl ShowProgress {
    /// Whether it is to be seen on a terminal, where messages of the level "info" are shown, or are not.
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
    /// The level's word, which `tracing`'s filters understand too.
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

impl Default for Config {
    fn default() -> Self {
        Self {
            store: PathBuf::from("./.ckpt-run"),
            isolation: Isolation::Auto,
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
                max: RestartLimit::Times(3),
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
                keep_content: 16 << 20,
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
