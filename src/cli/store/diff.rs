//! `ckpt-run diff`: the differences between two images of a store.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use serde::Serialize;

use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::cli::print::plain;
use crate::job::{Access, MemoryUse};
use crate::run::{ImageFacts, StreamKind, size};
use crate::store::compare;
use crate::store::{Comparison, ImageId, Shares};

/// The output of `diff --json`.
#[derive(Debug, Serialize)]
struct Difference {
    from: ImageId,
    to: ImageId,
    raw_bytes: Change,
    /// Bytes that each image added to the store.
    stored_bytes: Change,
    freeze_seconds: (f64, f64),
    gpu_bytes: Change,
    memory: (MemoryUse, MemoryUse),
    chunks: ChunkBytes,
    kinds: Vec<KindChange>,
    streams: Vec<StreamChange>,
    processes: Sets,
    files: Sets,
    /// Open files whose size changed.
    resized: Vec<Resized>,
}

/// A number in the first image and in the second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Change {
    from: u64,
    to: u64,
}

/// Bytes of the second image compared with the first.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct ChunkBytes {
    shared: u64,
    new: u64,
    zero: u64,
    /// Disk space of the new bytes.
    new_stored: u64,
}

#[derive(Debug, Serialize)]
struct KindChange {
    kind: StreamKind,
    bytes: Change,
    chunks: ChunkBytes,
}

#[derive(Debug, Serialize)]
struct StreamChange {
    name: String,
    kind: StreamKind,
    from: Option<u64>,
    to: Option<u64>,
    chunks: ChunkBytes,
}

/// Items in one image only.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct Sets {
    gone: Vec<String>,
    came: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Resized {
    path: String,
    bytes: Change,
}

impl From<Shares> for ChunkBytes {
    fn from(shares: Shares) -> Self {
        Self {
            shared: shares.shared_bytes,
            new: shares.new_bytes,
            zero: shares.zero_bytes,
            new_stored: shares.new_stored_bytes,
        }
    }
}

impl ChunkBytes {
    fn add(&mut self, other: Self) {
        self.shared += other.shared;
        self.new += other.new;
        self.zero += other.zero;
        self.new_stored += other.new_stored;
    }
}

pub(crate) fn run(global: &Global, from: &str, to: &str) -> Result<ExitCode, Failure> {
    let store = global.open()?;
    let [from, to] = [store.find(from)?, store.find(to)?];
    let (older, newer) = (store.manifest(from)?, store.manifest(to)?);
    let [before, after]: [ImageFacts; 2] = [
        serde_json::from_slice(&older.meta)?,
        serde_json::from_slice(&newer.meta)?,
    ];
    let found = compare(&older, &newer);
    let change = |from, to| Change { from, to };
    let difference = Difference {
        from,
        to,
        raw_bytes: change(older.raw_bytes, newer.raw_bytes),
        stored_bytes: change(older.stored_bytes, newer.stored_bytes),
        freeze_seconds: (before.freeze_seconds, after.freeze_seconds),
        gpu_bytes: change(gpu_bytes(&before), gpu_bytes(&after)),
        memory: (memory(&before), memory(&after)),
        chunks: found.total.into(),
        kinds: kinds(&found),
        streams: streams(&found),
        processes: sets(&processes(&before), &processes(&after)),
        files: sets(&names(&files(&before)), &names(&files(&after))),
        resized: resized(&files(&before), &files(&after)),
    };
    if global.json {
        return print::print_json(&difference);
    }
    print::print(&text(&difference))
}

fn gpu_bytes(facts: &ImageFacts) -> u64 {
    let gpus = facts.cuda.iter().flat_map(|cuda| &cuda.gpus);
    gpus.filter_map(|gpu| gpu.used_bytes)
        .fold(0, u64::saturating_add)
}

fn memory(facts: &ImageFacts) -> MemoryUse {
    let processes = facts.process_tree.iter().map(|process| process.memory);
    processes.fold(MemoryUse::default(), MemoryUse::and)
}

/// Returns the processes as texts. A process is the same in both images if its pid and its arguments are.
fn processes(facts: &ImageFacts) -> BTreeSet<String> {
    let described = facts.process_tree.iter().map(|process| {
        let words = match &process.arguments[..] {
            [] => format!("({})", process.name),
            words => words.join(" "),
        };
        format!("{} {words}", process.pid)
    });
    described.collect()
}

/// Returns the job's open files. Files that it only maps (programs and libraries) are left out: they rarely change.
fn files(facts: &ImageFacts) -> BTreeMap<String, u64> {
    let open = facts.files.iter().filter(|file| match file.access {
        Access::Read | Access::Write | Access::Update => true,
        Access::Map => false,
    });
    open.map(|file| (file.path.display().to_string(), file.size))
        .collect()
}

fn names(files: &BTreeMap<String, u64>) -> BTreeSet<String> {
    files.keys().cloned().collect()
}

fn sets(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Sets {
    Sets {
        gone: before.difference(after).cloned().collect(),
        came: after.difference(before).cloned().collect(),
    }
}

fn resized(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> Vec<Resized> {
    let both = after.iter().filter_map(|(path, to)| {
        let bytes = Change {
            from: *before.get(path)?,
            to: *to,
        };
        let path = path.clone();
        (bytes.from != bytes.to).then_some(Resized { path, bytes })
    });
    both.collect()
}

fn kinds(found: &Comparison) -> Vec<KindChange> {
    let of = |kind| {
        let (mut bytes, mut chunks) = (Change::default(), ChunkBytes::default());
        let all = found.streams.iter();
        for stream in all.filter(|stream| StreamKind::of(&stream.name) == kind) {
            bytes.from += stream.before.unwrap_or(0);
            bytes.to += stream.after.unwrap_or(0);
            chunks.add(stream.shares.into());
        }
        let is_there = bytes != Change::default();
        is_there.then_some(KindChange {
            kind,
            bytes,
            chunks,
        })
    };
    StreamKind::ALL.into_iter().filter_map(of).collect()
}

fn streams(found: &Comparison) -> Vec<StreamChange> {
    let all = found.streams.iter().map(|stream| StreamChange {
        name: stream.name.clone(),
        kind: StreamKind::of(&stream.name),
        from: stream.before,
        to: stream.after,
        chunks: stream.shares.into(),
    });
    all.collect()
}

fn text(found: &Difference) -> String {
    let Difference {
        from, to, chunks, ..
    } = found;
    let mut lines = vec![
        format!("images     {from} to {to}"),
        format!("size       {}", sizes(found.raw_bytes)),
        format!("stored     {}", sizes(found.stored_bytes)),
        format!(
            "freeze     {:.3} s to {:.3} s",
            found.freeze_seconds.0, found.freeze_seconds.1
        ),
        format!(
            "of {to}  {} are in {from}, too; {} are new, {} on the disk; {} are zeros",
            size(chunks.shared),
            size(chunks.new),
            size(chunks.new_stored),
            size(chunks.zero)
        ),
    ];
    for kind in &found.kinds {
        let (name, bytes, new) = (kind.kind.as_str(), sizes(kind.bytes), kind.chunks.new);
        lines.push(format!("  {name:<8} {bytes}, {} new", size(new)));
    }
    if found.gpu_bytes != Change::default() {
        lines.push(format!("on GPUs    {}", sizes(found.gpu_bytes)));
    }
    for (what, sets) in [("process", &found.processes), ("file", &found.files)] {
        for (sign, names) in [('-', &sets.gone), ('+', &sets.came)] {
            lines.extend(
                names
                    .iter()
                    .map(|name| format!("{sign} {what:<8} {}", plain(name))),
            );
        }
    }
    for file in &found.resized {
        let (path, bytes) = (plain(&file.path), file.bytes);
        lines.push(format!(
            "~ file     {path} ({} to {} bytes)",
            bytes.from, bytes.to
        ));
    }
    lines.join("\n") + "\n"
}

/// Formats a change as `1.0 GiB to 1.5 GiB (+512.0 MiB)`.
fn sizes(change: Change) -> String {
    let Change { from, to } = change;
    let sign = if to < from { '-' } else { '+' };
    let by = size(from.abs_diff(to));
    format!("{} to {} ({sign}{by})", size(from), size(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_one_image_only_came_or_is_gone() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let found = sets(&set(&["1 a", "2 b"]), &set(&["1 a", "3 c"]));
        let expected = Sets {
            gone: vec!["2 b".to_owned()],
            came: vec!["3 c".to_owned()],
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn a_change_has_its_sign() {
        let text = |from, to| sizes(Change { from, to });
        assert_eq!(text(1024, 3072), "1.0 KiB to 3.0 KiB (+2.0 KiB)");
        assert_eq!(text(3072, 1024), "3.0 KiB to 1.0 KiB (-2.0 KiB)");
    }
}
