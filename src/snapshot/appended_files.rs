//! Contents of files that the job only appends to, for a restore after the job has removed, shortened or changed them.
//!
//! The bytes of the freeze stay in such a file while the job appends. They are copied while the job computes. If the job
//! shortens the file meanwhile, the copy differs from the sample of the freeze, and a restore does not use it. Without a
//! copy, a restore needs the file itself.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::disk_space;
use super::error::SnapshotError;
use crate::files::{Kept, KeptFile, KeptFiles};
use crate::job::AppendedFile;
use crate::run::image_facts::rest_stream;
use crate::run::run_context::RunContext;
use crate::store::ImageWriter;

/// The set of an image in the making, and that of the newest one.
pub(super) struct Sets<'a> {
    pub set: &'a KeptFiles,
    /// Bytes of a file that this set has take no room on the disk.
    pub earlier: Option<&'a KeptFiles>,
}

/// Copies files of the set, as far as the limits on contents and the disk allow, and counts them in `kept`.
pub(super) fn keep(
    context: &RunContext,
    writer: &ImageWriter,
    sets: &Sets<'_>,
    appended: &[AppendedFile],
    kept: &mut Kept,
) -> Result<(), SnapshotError> {
    let limits = &context.config.files;
    let mut room = limits.keep_total.saturating_sub(kept.bytes);
    let opened = |path: &PathBuf| appended.iter().find(|it| it.path == *path);
    let files = sets.set.files.iter().zip(0..);
    for ((path, file), number) in files.filter(|((_, file), _)| file.is_appended()) {
        let Some(AppendedFile { opened, .. }) = opened(path).filter(|it| file.is(&it.opened))
        else {
            continue;
        };
        let size = file.size();
        let before = sets.earlier.and_then(|earlier| earlier.files.get(path));
        let before = before.filter(|before| before.is_same_file(file));
        let new = size.saturating_sub(before.map_or(0, KeptFile::size));
        if size > limits.keep_content.min(room) || !disk_space::has_room(context, new) {
            continue;
        }
        room -= size;
        kept.files += 1;
        kept.bytes = kept.bytes.saturating_add(size);
        let mut stream = writer.stream(&rest_stream(number))?;
        stream.copy_from(&mut Readable { opened, at: 0 }.take(size))?;
        stream.finish()?;
    }
    Ok(())
}

/// A file from its beginning to the first place that cannot be read.
struct Readable<'a> {
    opened: &'a File,
    at: u64,
}

impl Read for Readable<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let read = self.opened.read_at(room, self.at).unwrap_or(0);
        self.at += read as u64;
        Ok(read)
    }
}
