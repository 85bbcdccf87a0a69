//! The arguments of the verbs of `ckpt-run cuda`: processes, timeouts, other GPUs.

use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use super::refused;
use crate::cli::global::Failure;
use crate::config::parse_duration;
use crate::cuda::{GpuMap, GpuMapError, GpuUuid, SuspendOptions};
use crate::run::OURS;

#[derive(Debug, Args)]
pub(in crate::cli) struct Pids {
    /// Pid of a process; may be repeated
    #[arg(short, long = "pid", value_name = "N", required = true,
          value_parser = clap::value_parser!(i32).range(1..))]
    pids: Vec<i32>,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct Patience {
    /// Time to wait for the GPU work of all processes
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    timeout: Duration,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct Onto {
    /// Replacement GPUs: OLD=NEW,OLD=NEW, or `auto` with --from
    #[arg(long, value_name = "MAP")]
    gpu_map: Option<MapArgument>,
    /// GPUs of the processes before they were suspended, for `--gpu-map auto`
    #[arg(
        long,
        value_name = "OLD,OLD",
        value_delimiter = ',',
        requires = "gpu_map"
    )]
    from: Vec<GpuUuid>,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct Stop {
    #[command(flatten)]
    pub(super) pids: Pids,
    #[command(flatten)]
    pub(super) patience: Patience,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct Return {
    #[command(flatten)]
    pub(super) pids: Pids,
    #[command(flatten)]
    pub(super) onto: Onto,
}

#[derive(Debug, Args)]
pub(in crate::cli) struct Toggle {
    #[command(flatten)]
    pub(super) pids: Pids,
    #[command(flatten)]
    pub(super) patience: Patience,
    #[command(flatten)]
    pub(super) onto: Onto,
}

#[derive(Debug, Clone)]
enum MapArgument {
    Auto,
    Given(GpuMap),
}

impl FromStr for MapArgument {
    type Err = GpuMapError;

    fn from_str(text: &str) -> Result<Self, GpuMapError> {
        if text == "auto" {
            Ok(Self::Auto)
        } else {
            text.parse().map(Self::Given)
        }
    }
}

impl Pids {
    /// Returns each pid once, in the given order.
    pub(super) fn once(&self) -> Vec<i32> {
        let mut pids: Vec<i32> = Vec::with_capacity(self.pids.len());
        for pid in &self.pids {
            if !pids.contains(pid) {
                pids.push(*pid);
            }
        }
        pids
    }
}

impl Patience {
    /// Returns the options. A single process waits for no other process, so one attempt takes all the time.
    pub(super) fn options(&self, pids: &[i32]) -> SuspendOptions {
        let attempt = match pids {
            [_] => self.timeout,
            _ => SuspendOptions::default().attempt,
        };
        SuspendOptions {
            attempt,
            total: self.timeout,
        }
    }
}

impl Onto {
    /// Returns the map; `here` lists the GPUs of this machine and is called only for `auto`.
    pub(super) fn map(
        &self,
        here: impl Fn() -> Result<Vec<GpuUuid>, Failure>,
    ) -> Result<GpuMap, Failure> {
        let wrong = |text: &str| Failure {
            text: text.to_owned(),
            code: OURS,
        };
        match (&self.gpu_map, &self.from[..]) {
            (None, _) => Ok(GpuMap::default()),
            (Some(MapArgument::Given(map)), []) => Ok(map.clone()),
            (Some(MapArgument::Given(_)), _) => Err(wrong(
                "--from requires --gpu-map auto; a map OLD=NEW names the old GPUs itself",
            )),
            (Some(MapArgument::Auto), []) => Err(wrong(
                "--gpu-map auto needs --from OLD,OLD: the UUIDs of all GPUs that were visible to the process when it \
                 was suspended (`ckpt-run show` prints those of an image)",
            )),
            (Some(MapArgument::Auto), old) => {
                GpuMap::onto(old, &here()?).map_err(|error| refused(&error))
            }
        }
    }
}
