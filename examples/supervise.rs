//! Supervision of a job by a Rust program: `supervise STORE CMD [ARGS]` does the same as
//! `ckpt-run --store STORE --interval 5m -- CMD`, with the settings of `ckpt-run` in this folder.
//!
//! Its requirements are those of `ckpt-run`. A checkout has CRIU in `.criu`:
//!
//! ```text
//! CKPT_RUN_CRIU=.criu cargo run --example supervise -- ./store python3 job.py
//! ```
//!
//! The verbs work with this program too: `ckpt-run --store STORE status`, `snapshot` and others.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ckpt_run::config::{self, ConfigError, Interval, Sources};
use ckpt_run::cuda::GpuMap;
use ckpt_run::run::{OURS, chain};
use ckpt_run::supervisor::{self, RunOptions, What};

fn main() -> ExitCode {
    // ckpt-run starts copies of this program for parts of the work.
    if let Some(code) = ckpt_run::helper_main() {
        return code;
    }
    let mut arguments = std::env::args_os().skip(1);
    let Some(store) = arguments.next() else {
        eprintln!("usage: supervise STORE CMD [ARGS]");
        return ExitCode::from(2);
    };
    ckpt_run::telemetry::to_stderr("info");
    let options = match options(store.into(), arguments.collect()) {
        Ok(options) => options,
        Err(error) => return failed(&error, OURS),
    };
    match supervisor::run(options) {
        Ok(code) => ExitCode::from(code),
        Err(error) => failed(&error, error.exit_code()),
    }
}

fn options(store: PathBuf, line: Vec<OsString>) -> Result<RunOptions, ConfigError> {
    // `Config::default()` would be the settings of no file at all.
    let mut config = config::load(&Sources::from_process(None, vec![])?)?.config;
    config.store = store;
    config.snapshot.interval = Interval::Every(Duration::from_secs(5 * 60));
    Ok(RunOptions {
        config,
        what: What::Command { line, fresh: false },
        gpu_map: GpuMap::default(),
        take_over: false,
    })
}

fn failed(error: &dyn std::error::Error, code: u8) -> ExitCode {
    eprintln!("supervise: {}", chain(error));
    ExitCode::from(code)
}
