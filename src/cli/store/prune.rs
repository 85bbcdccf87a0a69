//! `ckpt-run prune`: removes data that no image needs and releases its space.

use std::process::ExitCode;

use serde::Serialize;

use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::run::{Copies, remove_held, size};
use crate::store::{ImageId, LockError, Swept};

/// The output of `prune --json`.
#[derive(Serialize)]
struct Report {
    dry_run: bool,
    temporary_files: usize,
    packs: usize,
    /// Copies of ckpt-run that no image needs.
    programs: usize,
    /// Disk space released, in total.
    bytes: u64,
    /// The part of it from inside packs that are kept.
    hole_bytes: u64,
    /// Images that cannot be read. As long as there are any, all data that they may need is kept.
    unreadable: Vec<ImageId>,
}

pub(crate) fn run(global: &Global, dry_run: bool) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let (copies, swept) = match store.lock() {
        Err(LockError::Held { holder, .. }) if dry_run => {
            print::say(&format!(
                "the store is in use by {holder}: files that it may be writing, and copies of ckpt-run, are not counted"
            ));
            (Copies::default(), store.prunable_beside_writer()?)
        }
        lock => {
            let lock = lock?;
            let copies = Copies::find(&store, &lock, None)?;
            if dry_run {
                (copies, store.prunable(&lock)?)
            } else {
                copies.remove()?;
                remove_held(&store);
                (copies, store.prune(&lock)?)
            }
        }
    };
    let report = report(dry_run, &copies, swept);
    for id in &report.unreadable {
        print::say(&format!(
            "image {id} cannot be read, so all data that it may need is kept; `ckpt-run forget {id}` removes the image"
        ));
    }
    if global.json {
        return print::print_json(&report);
    }
    print::print(&text(&report))
}

fn report(dry_run: bool, copies: &Copies, swept: Swept) -> Report {
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
        programs: copies.count(),
        bytes: bytes + copies.bytes,
        hole_bytes,
        unreadable,
    }
}

fn text(report: &Report) -> String {
    let would = if report.dry_run { "would be " } else { "" };
    let counts = [
        ("temporary files", report.temporary_files),
        ("packs", report.packs),
        ("old copies of ckpt-run", report.programs),
    ];
    let lines = counts.map(|(what, count)| format!("{what} {would}removed: {count}\n"));
    format!(
        "{}space {would}freed: {}, {} of it inside packs that are kept\n",
        lines.concat(),
        size(report.bytes),
        size(report.hole_bytes),
    )
}
