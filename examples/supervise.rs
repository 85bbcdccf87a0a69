//! A job that a Rust program supervises: `supervise STORE CMD [ARGS]` does what
//! `ckpt-run --store STORE --interval 5m -- CMD` does, with the settings that `ckpt-run` would have here.
//!
//! It needs what `ckpt-run` needs: root and CRIU, which a checkout has in `.criu`:
//!
//! ```text
//! CKPT_RUN_CRIU=.criu cargo run --example supervise -- ./store python3 job.py
//! ```
//!
//! The store is used by both alike: `ckpt-run --store STORE status` and `snapshot` talk to this program.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use ckpt_run::config::{self, ConfigError, Interval, Sources};
use ckpt_run::cuda::GpuMap;
use ckpt_run::run::{OURS, chain};
use ckpt_run::supervisor::{self, RunOptions, What};

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
    })
}

fn failed(error: &dyn std::error::Error, code: u8) -> ExitCode {
    eprintln!("supervise: {}", chain(error));
    ExitCode::from(code)
}
