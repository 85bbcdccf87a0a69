//! `ckpt-run pin` and `ckpt-run unpin`: protection of images from the retention rules.
//!
//! Both work while a supervisor uses the store.

use std::process::ExitCode;

use serde_json::json;

use super::any_store::AnyStore;
use crate::cli::global::{Failure, Global};
use crate::cli::print;

pub(crate) fn pin(global: &Global, image: &str, note: &str) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let id = store.find(image)?;
    match &store {
        AnyStore::Folder(store) => store.pin(id, note)?,
        AnyStore::Remote(remote) => remote.pin(id, note)?,
    }
    if global.json {
        return print::print_json(&json!({ "id": id, "pinned": true }));
    }
    print::print(&format!("{id} pinned\n"))
}

pub(crate) fn unpin(global: &Global, image: &str) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let id = store.find(image)?;
    let was_pinned = match &store {
        AnyStore::Folder(store) => store.unpin(id)?,
        AnyStore::Remote(remote) => remote.unpin(id)?,
    };
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
