//! `ckpt-run -- CMD` and `ckpt-run run -- CMD`; `ckpt-run restore`.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use super::global::{Failure, Global};
use crate::config::Override;
use crate::cuda::GpuMap;
use crate::run::{ImageChoice, OURS, chain};
use crate::store::ImageId;
use crate::supervisor::{self, RunOptions, What};
use crate::telemetry;

/// Options of the supervision of a job; all others are in the settings.
#[derive(Debug, Default, PartialEq, Args)]
struct Supervision {
    /// Time between snapshots: "15m", 900 (seconds), "auto", or "never"
    #[arg(short, long, value_name = "TIME")]
    interval: Option<String>,
    /// Snapshot at these local times instead: "0 3 * * *"
    #[arg(long, value_name = "EXPRESSION")]
    cron: Option<String>,
    /// Largest share of the job's time that freezes may take: "1%"
    #[arg(long, value_name = "PERCENT")]
    max_overhead: Option<String>,
    /// Random delay of each scheduled snapshot, up to "10%" of the interval, or "30s"
    #[arg(long, value_name = "HOW FAR")]
    jitter: Option<String>,
    /// Number of newest images to keep
    #[arg(long, value_name = "N")]
    keep_last: Option<String>,
    /// Folder in object storage for copies of the images, such as `s3://BUCKET/FOLDER`
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
    /// Do not wait for another machine that holds the lease of the run: it must not run the job any more
    #[arg(long)]
    take_over: bool,
    /// Ends that are followed by a restart: no, on-failure, on-abnormal, always
    #[arg(long, value_name = "POLICY")]
    restart: Option<String>,
    /// Limit on restarts without progress; -1 for no limit
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    max_restarts: Option<String>,
    /// Time for the last snapshot after SIGTERM
    #[arg(long, value_name = "TIME")]
    grace: Option<String>,
    /// Separation of the job from the machine: auto, namespaces, user or none
    #[arg(long, value_name = "HOW")]
    isolation: Option<String>,
    /// User that the job runs as, with its groups and HOME; only root may set it
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// Run the job in a terminal of its own [default: if stdin and stdout are a terminal]
    #[arg(long, overrides_with = "no_tty")]
    tty: bool,
    /// Run the job with pipes instead of a terminal
    #[arg(long, overrides_with = "tty")]
    no_tty: bool,
    /// Replacement of each GPU that the job could see, for a restore [default: the same GPUs, or as many of the same
    /// model]
    #[arg(long, value_name = "OLD=NEW,…")]
    gpu_map: Option<GpuMap>,
}

/// A run of a command.
#[derive(Debug, Default, PartialEq, Args)]
pub(super) struct RunArguments {
    #[command(flatten)]
    supervision: Supervision,
    /// Start over, regardless of the store's run
    #[arg(long)]
    fresh: bool,
    /// Stop when the parent process ends; for a rehearsal
    #[arg(long, hide = true)]
    end_with_parent: bool,
    /// File for messages, so that stderr has only the job's output; for a rehearsal
    #[arg(long, hide = true, value_name = "FILE")]
    messages: Option<PathBuf>,
    /// Command line of the job
    #[arg(last = true, value_name = "CMD")]
    pub(super) command: Vec<OsString>,
}

/// Run that continues from an image.
#[derive(Debug, Args)]
pub(super) struct RestoreArguments {
    /// Id of the image, or `latest`; if the newest cannot be restored, the next older one is tried
    #[arg(default_value = "latest")]
    image: String,
    #[command(flatten)]
    supervision: Supervision,
}

impl Supervision {
    fn overrides(&self) -> Vec<Override> {
        let switches = [
            ("tty", "--tty", "true", self.tty),
            ("tty", "--no-tty", "false", self.no_tty),
        ];
        let switched = switches.into_iter().filter(|(.., given)| *given);
        let switched = switched.map(|(key, flag, value, _)| Override {
            key,
            flag,
            value: value.to_owned(),
        });
        [
            ("snapshot.interval", "--interval", &self.interval),
            ("snapshot.cron", "--cron", &self.cron),
            (
                "snapshot.max_overhead",
                "--max-overhead",
                &self.max_overhead,
            ),
            ("snapshot.jitter", "--jitter", &self.jitter),
            ("retention.keep_last", "--keep-last", &self.keep_last),
            ("remote.url", "--remote", &self.remote),
            ("restart.policy", "--restart", &self.restart),
            ("restart.max", "--max-restarts", &self.max_restarts),
            ("snapshot.grace", "--grace", &self.grace),
            ("isolation", "--isolation", &self.isolation),
            ("user", "--user", &self.user),
        ]
        .into_iter()
        .filter_map(|(key, flag, value)| {
            Some(Override {
                key,
                flag,
                value: value.clone()?,
            })
        })
        .chain(switched)
        .collect()
    }
}

pub(super) fn run(global: &Global, arguments: RunArguments) -> Result<ExitCode, Failure> {
    if arguments.end_with_parent {
        crate::run::end_with_parent()?;
    }
    if let Some(path) = &arguments.messages {
        telemetry::to_file(messages(path)?);
    }
    let what = What::Command {
        line: arguments.command,
        fresh: arguments.fresh,
    };
    supervise(global, &arguments.supervision, what)
}

fn messages(path: &Path) -> Result<File, Failure> {
    let file = File::options().append(true).open(path);
    file.map_err(|error| Failure {
        text: format!("cannot write messages to {}: {error}", path.display()),
        code: OURS,
    })
}

pub(super) fn restore(global: &Global, arguments: &RestoreArguments) -> Result<ExitCode, Failure> {
    let choice = match arguments.image.as_str() {
        "latest" => ImageChoice::Newest,
        id => ImageChoice::This(id.parse::<ImageId>()?),
    };
    supervise(global, &arguments.supervision, What::Image(choice))
}

fn supervise(global: &Global, supervision: &Supervision, what: What) -> Result<ExitCode, Failure> {
    let config = global.load(supervision.overrides())?.config;
    telemetry::to_stderr(global.log_level(&config).as_str());
    let options = RunOptions {
        config,
        what,
        gpu_map: supervision.gpu_map.clone().unwrap_or_default(),
        take_over: supervision.take_over,
    };
    match supervisor::run(options) {
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error) => Err(Failure {
            text: chain(&error),
            code: error.exit_code(),
        }),
    }
}
