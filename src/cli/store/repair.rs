//! `ckpt-run repair`: repairs damaged images if possible and removes lost ones.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::verify::Findings;
use crate::cli::global::{Failure, Global, open};
use crate::cli::print;
use crate::cli::print::Progress;
use crate::remote_run::lock_alone;
use crate::run::size;
use crate::store::{ImageId, Marks, PackName, Remedy, Repaired, RepairedImage};

/// Options of a repair.
#[derive(Debug, Args)]
pub(crate) struct RepairArguments {
    /// Only print what would be done
    #[arg(long)]
    dry_run: bool,
    /// Accept images again that were set aside but are intact
    #[arg(long)]
    clear_marks: bool,
}

#[derive(Serialize)]
struct Shown {
    /// True if the repair was only planned.
    dry_run: bool,
    images: Vec<ShownImage>,
    mended_packs: Vec<String>,
    removed_packs: Vec<String>,
    freed_bytes: u64,
    /// Images whose packs are not known; because of them, all packs are kept.
    unknown: Vec<ImageId>,
}

#[derive(Serialize)]
struct ShownImage {
    /// The action: keep, heal, drop, leave (the image may be intact) or spare (it is lost, but pinned).
    action: &'static str,
    /// Number of chunks that the image now takes from another place.
    healed_chunks: usize,
    unmarked: bool,
    #[serde(flatten)]
    findings: Findings,
}

pub(crate) fn run(global: &Global, arguments: &RepairArguments) -> Result<ExitCode, Failure> {
    let config = global.load(Vec::new())?.config;
    let store = open(&config)?;
    let lock = lock_alone(&store)?;
    let marks = if arguments.clear_marks {
        Marks::Clear
    } else {
        Marks::Keep
    };
    let progress = Progress::new("verify", global, &config);
    let plan = store.plan_repair(&lock, marks, &|done, total| progress.show(done, total))?;
    drop(progress);
    let shown = shown(plan.outcome(), arguments.dry_run);
    if !global.json {
        print::print(&text(&shown, plan.outcome().is_nothing())?)?;
    }
    if arguments.dry_run {
        return if global.json {
            print::print_json(&shown)
        } else {
            Ok(ExitCode::SUCCESS)
        };
    }
    let done = self::shown(&plan.apply()?, false);
    if global.json {
        return print::print_json(&done);
    }
    for (image, planned) in done.images.iter().zip(&shown.images) {
        if image.action != planned.action {
            let id = image.findings.id;
            print::say(&format!("image {id} is kept: it was pinned meanwhile"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn shown(outcome: &Repaired, dry_run: bool) -> Shown {
    let texts = |packs: &[PackName]| packs.iter().map(ToString::to_string).collect();
    Shown {
        dry_run,
        images: outcome.images.iter().map(ShownImage::from).collect(),
        mended_packs: texts(&outcome.mended_packs),
        removed_packs: texts(&outcome.removed_packs),
        freed_bytes: outcome.freed_bytes,
        unknown: outcome.unknown.clone(),
    }
}

impl From<&RepairedImage> for ShownImage {
    fn from(image: &RepairedImage) -> Self {
        let (action, healed_chunks) = match image.remedy {
            Remedy::Whole => ("keep", 0),
            Remedy::Healed { chunks } => ("heal", chunks),
            Remedy::Dropped => ("drop", 0),
            Remedy::Left => ("leave", 0),
            Remedy::Spared => ("spare", 0),
        };
        Self {
            action,
            healed_chunks,
            unmarked: image.unmarked,
            findings: Findings::from(&image.report),
        }
    }
}

fn text(shown: &Shown, is_nothing: bool) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    for image in &shown.images {
        let Findings { id, set_aside, .. } = &image.findings;
        write!(out, "{id} {}", image.action)?;
        if image.action == "heal" {
            let chunks = image.healed_chunks;
            write!(out, ", {chunks} chunks from intact copies")?;
        }
        if image.action == "spare" {
            write!(out, ", it is pinned")?;
        }
        match set_aside {
            Some(_) if image.unmarked => write!(out, ", no longer set aside")?,
            Some(_) if image.action != "drop" => write!(out, ", still set aside")?,
            Some(_) | None => {}
        }
        writeln!(out)?;
        for problem in image.findings.problems() {
            writeln!(out, "       {problem}")?;
        }
    }
    for pack in &shown.mended_packs {
        writeln!(out, "write the header of {pack} again")?;
    }
    if !shown.removed_packs.is_empty() {
        let (count, size) = (shown.removed_packs.len(), size(shown.freed_bytes));
        writeln!(out, "remove {count} packs that no image needs ({size})")?;
    }
    if !shown.unknown.is_empty() {
        let ids: Vec<String> = shown.unknown.iter().map(ToString::to_string).collect();
        let ids = ids.join(", ");
        writeln!(
            out,
            "keep all packs: the packs that {ids} needs are unknown"
        )?;
    }
    if is_nothing {
        writeln!(out, "nothing to repair")?;
    }
    Ok(out)
}
