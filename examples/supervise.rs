//! A job that a Rust program supervises: `supervise STORE CMD [ARGS]` does what
//! `ckpt-run --store STORE --interval 5m --grace 90s -- CMD` does, without the command line and its settings.
//!
//! It needs what `ckpt-run` needs (root, CRIU). The store is used by both alike: `ckpt-run --store STORE status`
//! and `snapshot` talk to this program.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ckpt_run::config::{Config, Interval};
use ckpt_run::cuda::GpuMap;
use ckpt_run::supervisor::{self, RunOptions, What, chain};

fn main() -> ExitCode {
    // Parts of the work are done by copies of this program.
    if let Some(code) = ckpt_run::helper_main() {
        return code;
    }
    let mut arguments = std::env::args_os().skip(1);
    let Some(store) = arguments.next() else {
        eprintln!("usage: supervise STORE CMD [ARGS]");
        return ExitCode::from(2);
    };
    ckpt_run::telemetry::to_stderr("info");
    match supervisor::run(options(store.into(), arguments.collect())) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("supervise: {}", chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

fn options(store: PathBuf, line: Vec<OsString>) -> RunOptions {
    let mut config = Config {
        store,
        ..Config::default()
    };
    config.snapshot.interval = Interval::Every(Duration::from_secs(5 * 60));
    config.snapshot.grace = Duration::from_secs(90);
    RunOptions {
        config,
        what: What::Command { line, fresh: false },
        gpu_map: GpuMap::default(),
    }
}
