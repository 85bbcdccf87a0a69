//! `ckpt-run show`: all about one image.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde::Serialize;

use super::images::{find, note, timestamp};
use super::{Failure, Global, output};
use crate::store::ImageId;
use crate::supervisor::{GpuFacts, ImageFacts, size};

/// An image as `show --json` prints it.
#[derive(Serialize)]
struct Shown<'a> {
    id: ImageId,
    created: String,
    raw_bytes: u64,
    stored_bytes: u64,
    damaged: Option<&'a str>,
    pinned: bool,
    note: Option<String>,
    #[serde(flatten)]
    facts: &'a ImageFacts,
    streams: Vec<StreamSize<'a>>,
}

#[derive(Serialize)]
struct StreamSize<'a> {
    name: &'a str,
    bytes: u64,
}

pub(super) fn run(global: &Global, image: &str) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let id = find(&store, image)?;
    let manifest = store.manifest(id)?;
    let facts: ImageFacts = serde_json::from_slice(&manifest.meta)?;
    let entry = store.images()?.into_iter().find(|entry| entry.id == id);
    let shown = Shown {
        id,
        created: timestamp(manifest.created_unix_ms).to_string(),
        raw_bytes: manifest.raw_bytes,
        stored_bytes: manifest.stored_bytes,
        damaged: entry.as_ref().and_then(|entry| entry.damaged.as_deref()),
        pinned: entry.as_ref().is_some_and(|entry| entry.pinned.is_some()),
        note: entry.as_ref().and_then(note),
        facts: &facts,
        streams: manifest
            .streams
            .iter()
            .map(|stream| StreamSize {
                name: &stream.name,
                bytes: stream.raw_len,
            })
            .collect(),
    };
    if global.json {
        return output::print_json(&shown);
    }
    output::print(&text(&shown)?)
}

fn text(image: &Shown<'_>) -> Result<String, std::fmt::Error> {
    let facts = image.facts;
    let mut out = String::new();
    writeln!(out, "image      {}", image.id)?;
    if let Some(reason) = image.damaged {
        writeln!(out, "damaged    {reason}")?;
    }
    if image.pinned {
        writeln!(out, "pinned     {}", image.note.as_deref().unwrap_or("yes"))?;
    }
    writeln!(
        out,
        "created    {} on {} ({})",
        image.created,
        facts.host,
        facts.trigger.as_str()
    )?;
    writeln!(out, "command    {}", facts.command.join(" "))?;
    writeln!(out, "directory  {}", facts.directory.display())?;
    writeln!(
        out,
        "size       {}, {} stored",
        size(image.raw_bytes),
        size(image.stored_bytes)
    )?;
    writeln!(out, "freeze     {:.3} s", facts.freeze_seconds)?;
    for phase in &facts.phases {
        writeln!(out, "  {:<8} {:.3} s", phase.name, phase.seconds)?;
    }
    writeln!(out, "processes  {}", facts.processes)?;
    match &facts.cuda {
        Some(cuda) => writeln!(
            out,
            "cuda       {} processes, driver {}, {}",
            cuda.pids.len(),
            cuda.driver,
            cuda.gpus
                .iter()
                .map(described)
                .collect::<Vec<_>>()
                .join(", ")
        )?,
        None => writeln!(out, "cuda       none")?,
    }
    writeln!(
        out,
        "made with  CRIU {}, Linux {}",
        facts.criu, facts.kernel
    )?;
    for file in facts.files.iter().filter(|file| file.written()) {
        let kept = if file.content.is_some() {
            ", content kept"
        } else {
            ""
        };
        writeln!(
            out,
            "writes     {} ({} bytes{kept})",
            file.path.display(),
            file.size
        )?;
    }
    Ok(out)
}

/// `NVIDIA H200 (GPU-…) 1.5 GiB in use`, as far as the image knows.
fn described(gpu: &GpuFacts) -> String {
    let used = gpu
        .used_bytes
        .map(|bytes| format!(" {} in use", size(bytes)));
    let used = used.unwrap_or_default();
    if gpu.name.is_empty() {
        return format!("{}{used}", gpu.uuid);
    }
    format!("{} ({}){used}", gpu.name, gpu.uuid)
}
