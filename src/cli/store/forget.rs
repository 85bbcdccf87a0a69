//! `ckpt-run forget`: removes images, by name or by the retention rules.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::any_store::AnyStore;
use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::clock;
use crate::config::Override;
use crate::remote_run::{Removal, lock_alone};
use crate::run::{RunState, remove_held, size};
use crate::snapshot::policy;
use crate::store::{Effort, Fate, GoesOn, ImageId, Planned};

/// Images to remove, or retention rules. Rules that are not given come from the settings.
#[derive(Debug, Args)]
pub(crate) struct ForgetArguments {
    /// Ids of the images to remove; the rules are ignored
    #[arg(conflicts_with_all = ["keep_last", "keep_within", "keep_hourly", "keep_daily"])]
    images: Vec<String>,
    /// Number of newest images to keep
    #[arg(long, value_name = "N")]
    keep_last: Option<String>,
    /// Age up to which images are kept: "36h"
    #[arg(long, value_name = "TIME")]
    keep_within: Option<String>,
    /// Number of hours of which the newest image is kept
    #[arg(long, value_name = "N")]
    keep_hourly: Option<String>,
    /// Number of days of which the newest image is kept
    #[arg(long, value_name = "N")]
    keep_daily: Option<String>,
    /// Only print what would be removed
    #[arg(long)]
    dry_run: bool,
}

impl ForgetArguments {
    fn overrides(&self) -> Vec<Override> {
        let flags = [
            ("retention.keep_last", "--keep-last", &self.keep_last),
            ("retention.keep_within", "--keep-within", &self.keep_within),
            ("retention.keep_hourly", "--keep-hourly", &self.keep_hourly),
            ("retention.keep_daily", "--keep-daily", &self.keep_daily),
        ];
        let given = flags.into_iter().filter_map(|(key, flag, value)| {
            let value = value.clone()?;
            Some(Override { key, flag, value })
        });
        given.collect()
    }
}

/// The output of `forget --json`.
#[derive(Serialize)]
struct Report {
    dry_run: bool,
    images: Vec<Line>,
    /// Disk space released; for a dry run, the minimum that would be released. `None` in object storage, where the
    /// objects are removed later.
    bytes: Option<u64>,
}

#[derive(Serialize)]
struct Line {
    id: ImageId,
    removed: bool,
    reason: &'static str,
}

pub(crate) fn run(global: &Global, arguments: &ForgetArguments) -> Result<ExitCode, Failure> {
    let config = global.load_for_any_store(arguments.overrides())?.config;
    let place = AnyStore::open(&config)?;
    let ids = arguments.images.iter().map(|name| place.find(name));
    let ids: Vec<ImageId> = ids.collect::<Result<_, _>>()?;
    let store = match place {
        AnyStore::Folder(store) => store,
        AnyStore::Remote(remote) => {
            let rules = policy(&config.retention);
            let removal = match &ids[..] {
                [] => Removal::Rules(&rules),
                ids => Removal::Named(ids),
            };
            let plan = if arguments.dry_run {
                remote.plan(removal)?
            } else {
                remote.forget(removal)?
            };
            return report(global, arguments.dry_run, &plan, None);
        }
    };
    // The lock comes first, so that the plan matches the store.
    let lock = if arguments.dry_run {
        None
    } else {
        Some(lock_alone(&store)?)
    };
    let run = RunState::load(store.path())?;
    // If the store has no run yet, a run may continue from any image.
    let goes_on: GoesOn<'_> = &|id, meta| {
        let run = run.as_ref();
        run.is_none_or(|run| run.goes_on_from_numbered(id, meta))
    };
    let plan = if ids.is_empty() {
        store.plan(&policy(&config.retention), &clock::local(), goes_on)?
    } else {
        store.plan_named(&ids, goes_on)?
    };
    let (plan, bytes) = match lock {
        None => {
            let gains = store.gains(&removed(&plan))?;
            (plan, gains.last().copied().unwrap_or(0))
        }
        Some(lock) => {
            let forgotten = store.forget(&lock, &plan, Effort::Thorough, goes_on)?;
            remove_held(&store);
            for id in &forgotten.spared {
                print::say(&format!(
                    "image {id} is kept: it was pinned meanwhile, or is now the newest good image that the run continues from"
                ));
            }
            let stays = |planned: &Planned| forgotten.spared.contains(&planned.id);
            let done = plan.into_iter().filter(|planned| !stays(planned));
            (done.collect(), forgotten.swept.bytes)
        }
    };
    report(global, arguments.dry_run, &plan, Some(bytes))
}

fn removed(plan: &[Planned]) -> Vec<ImageId> {
    let removed = plan.iter().filter(|planned| planned.fate.is_removed());
    removed.map(|planned| planned.id).collect()
}

fn report(
    global: &Global,
    dry_run: bool,
    plan: &[Planned],
    bytes: Option<u64>,
) -> Result<ExitCode, Failure> {
    let line = |planned: &Planned| Line {
        id: planned.id,
        removed: planned.fate.is_removed(),
        reason: planned.fate.reason(),
    };
    let report = Report {
        dry_run,
        images: plan.iter().map(line).collect(),
        bytes,
    };
    if global.json {
        return print::print_json(&report);
    }
    let (goes, least) = if dry_run {
        ("would be removed", "at least ")
    } else {
        ("removed", "")
    };
    let freed = match bytes {
        Some(bytes) => format!(", {least}{} freed", size(bytes)),
        None => "; the run's next upload, or `ckpt-run prune`, removes their objects".to_owned(),
    };
    let lines = plan.iter().map(|planned| {
        let (id, reason) = (planned.id, planned.fate.reason());
        let what = match planned.fate {
            Fate::Kept(_) => "kept",
            Fate::Removed(_) => goes,
        };
        format!("{id} {what} ({reason})\n")
    });
    print::print(&lines.collect::<String>())?;
    let count = removed(plan).len();
    print::say(&format!("images {goes}: {count}{freed}"));
    Ok(ExitCode::SUCCESS)
}
