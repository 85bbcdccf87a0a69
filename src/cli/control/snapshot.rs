//! `ckpt-run snapshot`: requests a snapshot from the supervisor of a store.

use std::process::ExitCode;

use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::supervisor::request_snapshot;

pub(crate) fn run(global: &Global) -> Result<ExitCode, Failure> {
    let store = global.load(Vec::new())?.config.store;
    let id = request_snapshot(&store)?;
    if global.json {
        return print::print_json(&serde_json::json!({ "id": id }));
    }
    print::print(&format!("{id}\n"))
}
