//! `ckpt-run verify`: reads images again and checks every byte.

use std::process::ExitCode;
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::images::find;
use super::{Failure, Global, output};
use crate::store::{ImageId, ReadError, Store};
use crate::supervisor::{chain, size};

/// Exit code when an image is not what it was.
const DAMAGED: u8 = 1;

#[derive(Serialize)]
struct Verdict {
    id: ImageId,
    good: bool,
    raw_bytes: u64,
    /// What is wrong.
    problem: Option<String>,
}

pub(super) fn run(global: &Global, names: &[String]) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let images = if names.is_empty() {
        store.images()?.into_iter().map(|image| image.id).collect()
    } else {
        names
            .iter()
            .map(|name| find(&store, name))
            .collect::<Result<Vec<_>, _>>()?
    };
    let verdicts = images
        .into_iter()
        .map(|id| verify(&store, id))
        .collect::<Result<Vec<_>, _>>()?;
    let all_good = verdicts.iter().all(|verdict| verdict.good);
    if global.json {
        output::print_json(&verdicts)?;
    } else {
        for verdict in &verdicts {
            output::print(&line(verdict))?;
        }
    }
    Ok(if all_good {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(DAMAGED)
    })
}

/// Only what is wrong with the image itself is a verdict.
fn verify(store: &Store, id: ImageId) -> Result<Verdict, Failure> {
    // Draws on a terminal only.
    let bar = ProgressBar::new(0).with_prefix(id.to_string());
    if let Ok(style) = ProgressStyle::with_template(
        "{prefix} {bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec}",
    ) {
        bar.set_style(style);
    }
    let shown = Mutex::new(&bar);
    let result = store.verify(id, &|done, total| {
        if let Ok(bar) = shown.lock() {
            bar.set_length(total);
            bar.set_position(done);
        }
    });
    bar.finish_and_clear();
    match result {
        Ok(verified) => Ok(Verdict {
            id,
            good: true,
            raw_bytes: verified.raw_bytes,
            problem: None,
        }),
        Err(error) if error.is_damage() && !matches!(error, ReadError::Missing { .. }) => {
            Ok(Verdict {
                id,
                good: false,
                raw_bytes: 0,
                problem: Some(chain(&error)),
            })
        }
        Err(error) => Err(error.into()),
    }
}

fn line(verdict: &Verdict) -> String {
    match &verdict.problem {
        None => format!("{} good ({})\n", verdict.id, size(verdict.raw_bytes)),
        Some(problem) => format!("{} DAMAGED: {problem}\n", verdict.id),
    }
}
