//! `ckpt-run list`: the images of a store, oldest first.

use std::process::ExitCode;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, TableStyle};

use super::image_names::{Life, Summary};
use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::clock;
use crate::history::time_in_words;
use crate::run::size;

pub(crate) fn run(global: &Global) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let images = store.summaries()?;
    if global.json {
        return print::print_json(&images);
    }
    if images.is_empty() {
        print::say(&format!("no images in {} yet", store.shown()));
        return Ok(ExitCode::SUCCESS);
    }
    print::print(&format!("{}\n", table(&images).trim_fmt()))
}

pub(crate) fn table(images: &[Summary]) -> Table {
    let mut table = Table::new();
    table
        .load_style(TableStyle::new())
        .set_header(["ID", "AGE", "SIZE", "STORED", "FREEZE", "TRIGGER", ""]);
    for image in images {
        table.add_row([
            image.id.to_string(),
            age(image.created_unix_ms),
            size(image.raw_bytes),
            size(image.stored_bytes),
            image
                .freeze_ms
                .map_or_else(|| "?".to_owned(), |ms| format!("{ms} ms")),
            image.trigger.unwrap_or("?").to_owned(),
            remarks(image),
        ]);
    }
    for column in 1..=4 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn remarks(image: &Summary) -> String {
    let pinned = image.pinned.then(|| match &image.note {
        Some(note) => format!("pinned: {note}"),
        None => "pinned".to_owned(),
    });
    let damaged = image.damaged.as_ref();
    let damaged = damaged.map(|reason| format!("damaged: {reason}"));
    let life = match image.life {
        Some(Life::GivenUp) => Some("abandoned: the run continued from an older image"),
        Some(Life::Another) => Some("belongs to another run"),
        Some(Life::Present) | None => None,
    };
    let remarks = pinned.into_iter().chain(damaged);
    let remarks: Vec<String> = remarks.chain(life.map(str::to_owned)).collect();
    remarks.join("; ")
}

/// Returns the time since the image was created.
fn age(created_unix_ms: u64) -> String {
    let past = Duration::from_millis(clock::unix_ms().saturating_sub(created_unix_ms));
    time_in_words(past.as_secs_f64())
}
