//! `ckpt-run prune`: removes what no image needs and gives its space back.

use std::process::ExitCode;

use serde::Serialize;

use super::{Failure, Global, output};
use crate::store::{ImageId, Swept};
use crate::supervisor::size;

/// What `prune --json` prints.
#[derive(Serialize)]
struct Report {
    dry_run: bool,
    temporary_files: usize,
    packs: usize,
    /// Disk space given back, all together.
    bytes: u64,
    /// Of it, from inside of packs that stay.
    hole_bytes: u64,
    /// Images that cannot be read: as long as there are any, no pack is touched.
    unreadable: Vec<ImageId>,
}

pub(super) fn run(global: &Global, dry_run: bool) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let lock = store.lock()?;
    let swept = if dry_run {
        store.prunable(&lock)?
    } else {
        store.prune(&lock)?
    };
    for id in &swept.unreadable {
        output::say(&format!(
            "no pack is touched, because image {id} cannot be read; `ckpt-run forget {id}` lets it go"
        ));
    }
    if global.json {
        return output::print_json(&report(dry_run, swept));
    }
    output::print(&text(dry_run, &swept))
}

fn report(dry_run: bool, swept: Swept) -> Report {
    let Swept {
        temporary_files,
        packs,
        bytes,
        hole_bytes,
        unreadable,
    } = swept;
    Report {
        dry_run,
        temporary_files,
        packs,
        bytes,
        hole_bytes,
        unreadable,
    }
}

fn text(dry_run: bool, swept: &Swept) -> String {
    let would = if dry_run { "would be " } else { "" };
    format!(
        "temporary files {would}removed: {}\npacks {would}removed: {}\nspace {would}given back: {}, {} of it inside of packs that stay\n",
        swept.temporary_files,
        swept.packs,
        size(swept.bytes),
        size(swept.hole_bytes),
    )
}
