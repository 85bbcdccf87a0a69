//! `ckpt-run pause`, `unpause` and `stop`.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::store::ImageId;
use crate::supervisor::{ControlError, request_pause, request_stop, request_unpause};

/// Pause between two queries of the GPUs: the driver sends no notification when memory becomes free.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn pause(global: &Global) -> Result<ExitCode, Failure> {
    let store = global.load(Vec::new())?.config.store;
    print(global, request_pause(&store)?)
}

pub(crate) fn stop(global: &Global) -> Result<ExitCode, Failure> {
    let store = global.load(Vec::new())?.config.store;
    print(global, request_stop(&store)?)
}

fn print(global: &Global, id: ImageId) -> Result<ExitCode, Failure> {
    if global.json {
        return print::print_json(&serde_json::json!({ "id": id }));
    }
    print::print(&format!("{id}\n"))
}

pub(crate) fn unpause(global: &Global, wait: bool) -> Result<ExitCode, Failure> {
    let store = global.load(Vec::new())?.config.store;
    let mut said = false;
    loop {
        match request_unpause(&store) {
            Ok(()) if global.json => {
                return print::print_json(&serde_json::json!({ "unpaused": true }));
            }
            Ok(()) => return Ok(ExitCode::SUCCESS),
            Err(ControlError::NotYet(reason)) if wait => {
                if !said && !global.quiet {
                    print::say(&format!("waiting: {reason}"));
                    said = true;
                }
                thread::sleep(LOOK_INTERVAL);
            }
            Err(error) => return Err(error.into()),
        }
    }
}
