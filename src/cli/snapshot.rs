//! `ckpt-run snapshot`: asks the supervisor of a store.

use std::process::ExitCode;

use super::{Failure, Global, output};
use crate::supervisor::request_snapshot;

pub(super) fn run(global: &Global) -> Result<ExitCode, Failure> {
    let store = global.load(Vec::new())?.config.store;
    let id = request_snapshot(&store)?;
    if global.json {
        return output::print_json(&serde_json::json!({ "id": id }));
    }
    output::print(&format!("{id}\n"))
}
