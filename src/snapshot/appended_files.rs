//! Contents of files that the job only appends to, for a restore after the job has removed or shortened them.
//!
//! What such a file holds at the freeze stays there while the job appends. So it is copied while the job computes, without
//! what the newest image has of it. If the job shortens the file meanwhile, the copy differs from the sample of the
//! freeze, and a restore does not use it.

use std::cell::LazyCell;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use super::error::SnapshotError;
use crate::files::{Earlier, KeptFile, KeptFiles};
use crate::job::AppendedFile;
use crate::run::image_facts::{ImageFacts, rest_stream};
use crate::run::run_context::RunContext;
use crate::store::{EarlierStreams, ImageId, ImageWriter, StreamWriter};

/// Size of files from which the newest image is looked at for their beginning.
const LONG_BYTES: u64 = 4 << 20;

/// Copies the files of the set, as far as the limits on contents allow.
pub(super) fn keep(
    context: &RunContext,
    writer: &ImageWriter,
    set: &KeptFiles,
    appended: Vec<AppendedFile>,
    earlier: Option<&Earlier>,
) -> Result<(), SnapshotError> {
    let limits = &context.config.files;
    let kept = set.files.values().filter_map(KeptFile::kept);
    let mut room = limits.keep_total;
    room = kept.fold(room, |room, (_, bytes)| room.saturating_sub(bytes));
    let newest = LazyCell::new(|| Newest::of(context, earlier?));
    for AppendedFile { path, opened } in appended {
        let Some((number, file)) = set.numbered(&path).filter(|(_, file)| file.is_appended())
        else {
            continue;
        };
        let size = file.size();
        if size > limits.keep_content.min(room) || !file.is(&opened) {
            continue;
        }
        room -= size;
        let mut stream = writer.stream(&rest_stream(number))?;
        let read = |stream: &mut StreamWriter, range| copy(&opened, stream, range);
        let newest = (size >= LONG_BYTES).then(|| newest.as_ref()).flatten();
        let beginning = newest.and_then(|newest| newest.beginning_of(&path, file, &opened));
        if let Some((streams, name, len)) = beginning {
            // The last chunk is a part of one that is now longer.
            stream.append_changes((streams, &name), size, |range| range.end < len, read)?;
        } else {
            read(&mut stream, 0..size)?;
        }
        stream.finish()?;
    }
    Ok(())
}

fn copy(
    opened: &File,
    stream: &mut StreamWriter,
    Range { start, end }: Range<u64>,
) -> Result<(), SnapshotError> {
    let mut source = opened;
    let from = source.seek(SeekFrom::Start(start));
    from.map_err(SnapshotError::Prepare)?;
    stream.copy_from(&mut source.take(end - start))?;
    Ok(())
}

/// The newest image.
struct Newest<'a> {
    set: &'a KeptFiles,
    facts: ImageFacts,
    streams: EarlierStreams,
}

impl<'a> Newest<'a> {
    fn of(context: &RunContext, earlier: &'a Earlier) -> Option<Self> {
        let id = ImageId::new(earlier.id)?;
        let manifest = context.store.manifest(id).ok()?;
        Some(Self {
            set: &earlier.set,
            facts: serde_json::from_slice(&manifest.meta).ok()?,
            streams: context.store.earlier_streams(id).ok()?,
        })
    }

    /// Returns the stream with the beginning of a file, and its length.
    fn beginning_of(
        &self,
        path: &Path,
        file: &KeptFile,
        opened: &File,
    ) -> Option<(&EarlierStreams, String, u64)> {
        let (number, before) = self.set.numbered(path)?;
        let known = self.facts.files.iter().find(|known| known.path == path)?;
        let is_same = before.is_appended()
            && before.is_same_file(file)
            && before.size() == known.size
            && known.has_same_bytes(opened);
        is_same.then(|| (&self.streams, rest_stream(number), known.size))
    }
}
