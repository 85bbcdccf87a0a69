//! `ckpt-run prune`: removes data that no image needs and releases its space.

use std::process::ExitCode;

use serde::Serialize;
use serde_json::json;

use super::any_store::AnyStore;
use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::remote_run::{Pruned, RemoteImages, lock_alone};
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
    let store = match global.open()? {
        AnyStore::Folder(store) => store,
        AnyStore::Remote(remote) => return prune_objects(global, &remote, dry_run),
    };
    let (copies, swept) = match lock_alone(&store) {
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

/// Removes objects of a run in object storage.
fn prune_objects(
    global: &Global,
    remote: &RemoteImages,
    dry_run: bool,
) -> Result<ExitCode, Failure> {
    let pruned = if dry_run {
        let (pruned, holder) = remote.prunable()?;
        if let Some(holder) = holder {
            print::say(&format!(
                "the supervisor on {} holds the lease, or has not ended it: objects of its present upload are counted",
                holder.host
            ));
        }
        pruned
    } else {
        remote.prune(|holder, left| {
            print::say(&format!(
                "waiting {} s to see if the supervisor on {}, which has not ended the lease, renews it",
                left.as_secs() + 1,
                holder.host
            ));
        })?
    };
    let Pruned {
        manifests,
        packs,
        bytes,
    } = pruned;
    if global.json {
        return print::print_json(&json!({
            "dry_run": dry_run, "manifests": manifests, "packs": packs, "bytes": bytes,
        }));
    }
    let would = if dry_run { "would be " } else { "" };
    print::print(&format!(
        "manifests {would}removed: {manifests}\npacks {would}removed: {packs}\nspace {would}freed: {}\n",
        size(bytes)
    ))
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
