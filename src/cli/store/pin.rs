//! `ckpt-run pin` and `ckpt-run unpin`: protection of images from the retention rules.
//!
//! Both work while a supervisor uses the store.

use std::process::ExitCode;

use serde_json::json;

use super::image_names::find;
use crate::cli::global::{Failure, Global};
use crate::cli::print;

pub(crate) fn pin(global: &Global, image: &str, note: &str) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let id = find(&store, image)?;
    store.pin(id, note)?;
    if global.json {
        return print::print_json(&json!({ "id": id, "pinned": true }));
    }
    print::print(&format!("{id} pinned\n"))
}

pub(crate) fn unpin(global: &Global, image: &str) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let id = find(&store, image)?;
    let was_pinned = store.unpin(id)?;
    if global.json {
        return print::print_json(&json!({ "id": id, "pinned": false, "was_pinned": was_pinned }));
    }
    let what = if was_pinned {
        "unpinned"
    } else {
        "was not pinned"
    };
    print::print(&format!("{id} {what}\n"))
}
