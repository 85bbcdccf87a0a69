//! Dead space inside packs that stay: data that only removed images needed.
//!
//! A pack stays as long as one chunk in it is used, so images that share some chunks with older ones would keep whole
//! packs. The pages that no manifest refers to are freed by punching holes: the file keeps its length, and used data
//! keeps its place. Holes are punched only after manifests were removed durably. While any manifest cannot be read, the
//! dead ranges are unknown.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::sparse_file::allocated_bytes;
use crate::store::error::{ReadError, WriteError};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Content, Manifest};
use crate::store::format::pack::{HEADER_BYTES, Pack, PackName};
use crate::store::format::store_folder::Store;
use crate::store::fs::{fence, ops};

/// Minimum space that is freed in a pack: a hole costs the file system an extent.
const GAIN_BYTES_MIN: u64 = if cfg!(test) { 64 << 10 } else { 1 << 20 };

/// Manifests read in full to find the holes of one rotation, for all its packs together. Each takes up to 20 MiB for an
/// image of 100 GiB. The packs left out are handled by `prune`.
const MANIFESTS_MAX: usize = 32;

/// Minimum length of a hole: on ext4 with online discard, one hole took 1 ms and 2 ms more per MiB.
const HOLE_BYTES_MIN: u64 = 64 << 10;

/// Maximum number of holes of one rotation, the largest of all its packs: a few seconds for holes of 1 MiB.
const HOLES_MAX: usize = 1024;

/// Granularity of freed space. File systems with larger blocks free less, and never too much.
const PAGE_BYTES: u64 = 4096;

/// Selection of the packs to inspect.
pub(crate) enum Scope {
    /// No pack.
    Nothing,
    /// These packs, as far as it is quick.
    Quick(HashSet<PackName>),
    /// These packs.
    These(HashSet<PackName>),
    /// Every pack.
    Everything,
}

/// The packs that images name, each with those images.
pub(crate) type Users = BTreeMap<PackName, (Pack, Vec<ImageId>)>;

/// The ranges of packs that images refer to: whole pages, sorted, not touching each other.
pub(crate) type Pages = HashMap<PackName, Vec<Range<u64>>>;

/// The ranges of one pack that no image refers to.
#[derive(Debug)]
pub(crate) struct Holes {
    path: PathBuf,
    /// Ranges in bytes, at page borders.
    ranges: Vec<Range<u64>>,
    /// Disk space of the ranges.
    pub(crate) bytes: u64,
}

/// Finds dead space worth freeing. `users` must name every existing image.
pub(crate) fn find(store: &Store, users: &Users, scope: &Scope) -> Result<Vec<Holes>, ReadError> {
    let chosen = choose(users, scope);
    let mut live = Pages::new();
    for image in images_of(users, &chosen) {
        let manifest = store.manifest(image)?;
        add_live(&mut live, &manifest, &chosen);
    }
    let holes = chosen.into_iter().filter_map(|name| {
        let (pack, _) = users.get(&name)?;
        let live = live.remove(&name).unwrap_or_default();
        holes_of(&store.pack_file(name), *pack, &live)
    });
    let mut holes: Vec<Holes> = holes.collect();
    match scope {
        Scope::Quick(_) => keep_largest(&mut holes, HOLES_MAX),
        Scope::Nothing | Scope::These(_) | Scope::Everything => {}
    }
    Ok(holes)
}

/// Drops all but the `count` largest holes.
fn keep_largest(holes: &mut Vec<Holes>, count: usize) {
    let ranges = holes.iter().flat_map(|pack| &pack.ranges);
    let mut lengths: Vec<u64> = ranges.map(length).collect();
    if lengths.len() <= count {
        return;
    }
    lengths.sort_unstable_by(|one, other| other.cmp(one));
    lengths.truncate(count);
    let least = lengths.last().copied().unwrap_or(u64::MAX);
    let mut of_least = lengths.iter().filter(|length| **length == least).count();
    for pack in &mut *holes {
        pack.ranges.retain(|range| {
            let is_least = length(range) == least && of_least > 0;
            of_least -= usize::from(is_least);
            is_least || length(range) > least
        });
        pack.bytes = pack.bytes.min(pack.ranges.iter().map(length).sum());
    }
    holes.retain(|pack| !pack.ranges.is_empty());
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

/// Returns the packs to inspect, oldest first.
pub(crate) fn choose(users: &Users, scope: &Scope) -> Vec<PackName> {
    match scope {
        Scope::Nothing => Vec::new(),
        Scope::Everything => users.keys().copied().collect(),
        Scope::These(names) => users
            .keys()
            .filter(|name| names.contains(name))
            .copied()
            .collect(),
        Scope::Quick(names) => {
            let mut images: HashSet<ImageId> = HashSet::new();
            let mut chosen = Vec::new();
            for (name, (_, of_pack)) in users.iter().filter(|(name, _)| names.contains(*name)) {
                let more = of_pack.iter().filter(|image| !images.contains(*image));
                if images.len() + more.count() <= MANIFESTS_MAX {
                    images.extend(of_pack);
                    chosen.push(*name);
                }
            }
            chosen
        }
    }
}

/// Returns the images that name any of these packs, oldest first.
pub(crate) fn images_of(users: &Users, chosen: &[PackName]) -> Vec<ImageId> {
    let packs = chosen.iter().filter_map(|name| users.get(name));
    let mut images: Vec<ImageId> = packs.flat_map(|(_, images)| images).copied().collect();
    images.sort_unstable();
    images.dedup();
    images
}

/// Adds the pages that contain the image's chunks.
pub(crate) fn add_live(live: &mut Pages, manifest: &Manifest, chosen: &[PackName]) {
    let wanted: HashSet<&PackName> = chosen.iter().collect();
    for chunk in &manifest.chunks {
        match chunk.content {
            Content::Zero => {}
            Content::Stored(stored) => {
                let name = manifest.packs[stored.pack as usize].name;
                if wanted.contains(&name) {
                    let end = stored.offset + u64::from(stored.len);
                    live.entry(name).or_default().push(stored.offset..end);
                }
            }
        }
    }
    // Merged after each image: pages that images share are in memory once.
    for pack in &manifest.packs {
        if let Some(ranges) = live.get_mut(&pack.name) {
            *ranges = pages(std::mem::take(ranges));
        }
    }
}

/// Returns the pages that the ranges touch: sorted, not touching each other.
fn pages(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut pages: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        let end = range.end.next_multiple_of(PAGE_BYTES);
        match pages.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            Some(_) | None => pages.push(start..end),
        }
    }
    pages
}

/// Returns the pages of a pack between the live ones.
fn dead(len: u64, live: &[Range<u64>]) -> Vec<Range<u64>> {
    let header = 0..HEADER_BYTES;
    let live = pages([&[header], live].concat());
    let ends = live.iter().map(|range| range.end);
    let starts = live.iter().skip(1).map(|range| range.start);
    let gaps = ends.zip(starts.chain([len.next_multiple_of(PAGE_BYTES)]));
    gaps.filter(|(end, start)| end < start)
        .map(|(end, start)| end..start)
        .collect()
}

/// Returns the holes of a pack. `None` if too little space would be freed, as after an earlier punch, or if the file is
/// not the pack.
pub(crate) fn holes_of(path: &Path, pack: Pack, live: &[Range<u64>]) -> Option<Holes> {
    let found = fs::symlink_metadata(path).ok()?;
    if !found.is_file() || found.len() != pack.len {
        return None;
    }
    let mut ranges = dead(pack.len, live);
    ranges.retain(|range| length(range) >= HOLE_BYTES_MIN);
    let dead_bytes: u64 = ranges.iter().map(length).sum();
    let rest = pack
        .len
        .next_multiple_of(PAGE_BYTES)
        .saturating_sub(dead_bytes);
    let bytes = allocated_bytes(&found).saturating_sub(rest);
    (bytes >= GAIN_BYTES_MIN).then(|| Holes {
        path: path.to_owned(),
        ranges,
        bytes,
    })
}

/// Frees dead space and returns the number of bytes. Stops at the first pack if the file system cannot punch holes.
pub(crate) fn give_back(holes: &[Holes]) -> Result<u64, WriteError> {
    let mut bytes = 0;
    for pack in holes {
        // A former holder could punch a pack after a later one has begun to rely on it.
        if fence::passage(&pack.path).is_some() {
            break;
        }
        match punch(&pack.path, &pack.ranges) {
            Ok(freed) => bytes += freed,
            Err(error) if is_unsupported(&error) => {
                tracing::debug!(%error, "the file system cannot punch holes");
                break;
            }
            Err(source) => {
                let path = pack.path.clone();
                return Err(WriteError::Pack { path, source });
            }
        }
    }
    Ok(bytes)
}

/// Punches holes; the file keeps its length. The holes need not survive a power failure.
fn punch(path: &Path, ranges: &[Range<u64>]) -> io::Result<u64> {
    let file = ops::open(path)?;
    let before = allocated_bytes(&file.metadata()?);
    for range in ranges {
        ops::punch(&file, range.start, length(range))?;
    }
    Ok(before.saturating_sub(allocated_bytes(&file.metadata()?)))
}

fn is_unsupported(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw);
    matches!(code, Some(Errno::EOPNOTSUPP | Errno::ENOSYS))
}

#[cfg(test)]
mod tests;
