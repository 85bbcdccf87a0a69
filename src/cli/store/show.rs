//! `ckpt-run show`: all facts about one image.

use std::process::ExitCode;

use serde::Serialize;

use super::image_names::note;
use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::clock;
use crate::job::MemoryUse;
use crate::run::{ImageFacts, StreamKind};
use crate::store::ImageId;

/// An image in the form that `show --json` prints.
#[derive(Serialize)]
pub(super) struct Shown<'a> {
    pub(super) id: ImageId,
    pub(super) created: String,
    pub(super) raw_bytes: u64,
    pub(super) stored_bytes: u64,
    pub(super) damaged: Option<&'a str>,
    pub(super) pinned: bool,
    pub(super) note: Option<String>,
    #[serde(flatten)]
    pub(super) facts: &'a ImageFacts,
    /// Host memory of all its processes; `None` in images without this fact.
    pub(super) memory: Option<MemoryUse>,
    pub(super) streams: Vec<StreamSize<'a>>,
}

#[derive(Serialize)]
pub(super) struct StreamSize<'a> {
    name: &'a str,
    pub(super) kind: StreamKind,
    pub(super) bytes: u64,
}

pub(crate) fn run(global: &Global, image: &str) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let id = store.find(image)?;
    let manifest = store.manifest(id)?;
    let facts: ImageFacts = serde_json::from_slice(&manifest.meta)?;
    let entry = store.images()?.into_iter().find(|entry| entry.id == id);
    let shown = Shown {
        id,
        created: clock::timestamp_of(manifest.created_unix_ms).to_string(),
        raw_bytes: manifest.raw_bytes,
        stored_bytes: manifest.stored_bytes,
        damaged: entry.as_ref().and_then(|entry| entry.damaged.as_deref()),
        pinned: entry.as_ref().is_some_and(|entry| entry.pinned.is_some()),
        note: entry.as_ref().and_then(note),
        facts: &facts,
        memory: memory(&facts),
        streams: manifest
            .streams
            .iter()
            .map(|stream| StreamSize {
                name: &stream.name,
                kind: StreamKind::of(&stream.name),
                bytes: stream.raw_len,
            })
            .collect(),
    };
    if global.json {
        return print::print_json(&shown);
    }
    print::print(&super::show_text::text(&shown)?)
}

fn memory(facts: &ImageFacts) -> Option<MemoryUse> {
    let processes = facts.process_tree.iter();
    processes
        .map(|process| process.memory)
        .reduce(MemoryUse::and)
}
