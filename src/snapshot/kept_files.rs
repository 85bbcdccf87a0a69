//! Copies of the files that the job writes, on their way into the image.
//!
//! ```text
//! before:            files changed so far → contents
//! job frozen:        changed files → contents, until files.freeze has passed; large files → clones or links
//! the job computes:  the other files, each checked afterwards → contents of earlier images → files that it appends to
//!                    → list
//! ```

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::libc::O_NOATIME;

use super::appended_files::{self, Sets};
use super::contents::{Contents, bytes_to_keep, open};
use super::error::SnapshotError;
use super::job_facts::Opened;
use crate::checked;
use crate::clock;
use crate::config;
use crate::files::{
    Changes, Content, Kept, KeptFile, KeptFiles, Kind, SoFar, Unkept, Writer, is_in_memory,
};
use crate::job::{self, AppendedFile, Descriptors, OpenFile};
use crate::run::image_facts::{KEPT_LIST, kept_stream};
use crate::run::machine;
use crate::run::run_context::RunContext;
use crate::safe_path::{JobUsers, Spot};
use crate::store::{ImageId, ImageWriter};

/// Number of bytes that are copied during the freeze in any case: on a busy machine, the time limit may pass with
/// little work done.
const ALWAYS_BYTES: u64 = 64 << 20;

/// Time since the last change after which a file that is open for writing is copied before the freeze.
const QUIET_NS: i64 = 1_000_000_000;

/// Bytes of files that a fast machine copies in a millisecond.
const COPIED_PER_MS: u128 = 4 << 20;

/// Files of an image under construction.
pub(crate) struct FileCopies {
    changes: Changes,
    image: ImageId,
    contents: Contents,
    /// Number of bytes copied before the freeze.
    beforehand_bytes: u64,
    /// Positions of the changed files that are not copied yet.
    later: Vec<usize>,
    appended: Vec<AppendedFile>,
    unread: usize,
    frozen_ns: i64,
    freeze_seconds: f64,
}

/// Files that the job is writing, which are copied while it is frozen, and the size of all that it could write.
pub(crate) struct Busy {
    paths: HashSet<PathBuf>,
    /// Number of bytes of its open files that may be copied within the time limit, roughly.
    pub bytes: u64,
}

impl Busy {
    /// Looks for them among all that the job has open. Unless the job watches files, the kernel reads their contents.
    pub fn of(open: &[Descriptors], files: &config::Files, watches: bool) -> Self {
        let now_ns = clock::unix_ns();
        let mut all = job::collect(open).unwrap_or_default();
        all.retain(OpenFile::written);
        let most = u64::try_from(files.freeze.as_millis() * COPIED_PER_MS).unwrap_or(u64::MAX);
        let most = most.max(ALWAYS_BYTES).min(machine::available_memory() / 4);
        let mut bytes = 0_u64;
        for file in all.iter().filter(|file| !file.is_appended()) {
            if file.size <= files.keep_content && bytes + file.size <= most {
                bytes += file.size;
                if !watches {
                    read_ahead(&file.path);
                }
            }
        }
        let is_busy = |file: &OpenFile| {
            let is_quiet = now_ns.saturating_sub(file.modified_ns) > QUIET_NS && !file.is_mapped;
            file.is_appended() || !is_quiet
        };
        all.retain(is_busy);
        Self {
            paths: all.into_iter().map(|file| file.path).collect(),
            bytes,
        }
    }
}

/// Has the kernel read a file from the disk: databases write around its cache (`O_DIRECT`).
fn read_ahead(path: &Path) {
    let opened = Spot::of(path).and_then(|spot| spot.open(File::options().read(true), O_NOATIME));
    if let Ok(file) = opened {
        // It only takes longer otherwise.
        let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    }
}

/// Files copied before the freeze.
pub(crate) struct Beforehand {
    contents: Contents,
    so_far: Option<SoFar>,
}

impl Beforehand {
    /// Lists the files changed so far and copies them while the job computes, except those that it is writing: files that
    /// change afterwards are copied again.
    pub fn copy(
        context: &RunContext,
        writer: &ImageWriter,
        busy: &Busy,
        users: JobUsers,
    ) -> Result<Self, SnapshotError> {
        let mut beforehand = Self::nothing(writer, users)?;
        let mut so_far = context.files.changes_so_far(writer.id().number());
        let files = &context.config.files;
        for (path, file) in so_far.iter_mut().flat_map(|it| &mut it.files) {
            let contents = &mut beforehand.contents;
            if let Some(file) = file
                && file.has_no_content()
                && !busy.paths.contains(path)
            {
                let bytes = bytes_to_keep(path, file.size());
                let total = contents.offset.saturating_add(bytes);
                if bytes <= files.keep_content && total <= files.keep_total {
                    contents.copy(path, file)?;
                }
            }
        }
        so_far.iter_mut().for_each(SoFar::complete);
        beforehand.so_far = so_far;
        Ok(beforehand)
    }

    /// Copies nothing.
    pub fn nothing(writer: &ImageWriter, users: JobUsers) -> Result<Self, SnapshotError> {
        let name = kept_stream(writer.id());
        let contents = Contents {
            stream: writer.stream(&name)?,
            name,
            offset: 0,
            users,
        };
        Ok(Self {
            contents,
            so_far: None,
        })
    }
}

impl FileCopies {
    /// Lists the changed files and copies contents within the time limit. The job is frozen meanwhile and has `opened` open.
    pub fn begin(
        context: &RunContext,
        image: ImageId,
        opened: &mut Opened,
        Beforehand { contents, so_far }: Beforehand,
    ) -> Result<Self, SnapshotError> {
        let begun = clock::now();
        let frozen_ns = clock::unix_ns();
        let mut keeping = Self {
            changes: context
                .files
                .changes(image.number(), &opened.written(), so_far),
            image,
            beforehand_bytes: contents.offset,
            contents,
            later: Vec::new(),
            appended: opened.take_appended(),
            unread: 0,
            frozen_ns,
            freeze_seconds: 0.0,
        };
        context.files.held().clear(image.number());
        let files = &context.config.files;
        let wanted = keeping.choose(context, files.keep_content, files.keep_total);
        let deadline = begun + files.freeze;
        for (index, bytes) in wanted {
            keeping.copy_or_wait(index, bytes, deadline)?;
        }
        keeping.freeze_seconds = (clock::now() - begun).as_secs_f64();
        Ok(keeping)
    }

    /// Returns the positions of the files whose content is to be copied, with its bytes. Too large files are held instead.
    fn choose(
        &mut self,
        context: &RunContext,
        keep_content: u64,
        keep_total: u64,
    ) -> Vec<(usize, u64)> {
        let earlier_bytes = self.changes.earlier.as_ref().map_or(0, |it| it.kept_bytes);
        let changed = self.changes.changed.iter();
        let replaced: u64 = changed.map(|it| it.earlier_bytes).sum();
        // Files that are not in the list are kept as they are in the earlier image.
        let mut total = earlier_bytes - replaced;
        let (mut wanted, mut large) = (Vec::new(), Vec::new());
        let mut order: Vec<usize> = (0..self.changes.changed.len()).collect();
        // Files that must be copied while the job is frozen come first.
        order.sort_by_key(|index| !self.changes.changed[*index].is_open());
        for index in order {
            let changed = &mut self.changes.changed[index];
            let Some(file) = &mut changed.file else {
                continue;
            };
            let is_in_memory = file.is_mapped && is_in_memory(&changed.path);
            let Kind::File { size, content } = &mut file.kind else {
                continue;
            };
            let (is_copied, bytes) = match content {
                Content::Appended => continue,
                Content::Kept { stream, place } if *stream != self.contents.name => {
                    total = total.saturating_add(place.bytes(*size));
                    self.unread += 1;
                    continue;
                }
                Content::Kept { place, .. } => (true, place.bytes(*size)),
                Content::Held { .. } | Content::Unkept(_) => {
                    (false, bytes_to_keep(&changed.path, *size))
                }
            };
            // A file in memory does not survive a crash of the machine.
            if is_in_memory {
                wanted.push((index, bytes));
            } else if bytes > keep_content {
                large.push((index, Unkept::TooLarge));
            } else if total.saturating_add(bytes) > keep_total {
                large.push((index, Unkept::TooMuch));
            } else {
                total += bytes;
                if !is_copied {
                    wanted.push((index, bytes));
                }
            }
        }
        for (index, reason) in large {
            self.hold(context, index, reason);
        }
        wanted
    }

    /// Makes the store hold a file whose content is not copied.
    fn hold(&mut self, context: &RunContext, index: usize, reason: Unkept) {
        let changed = &mut self.changes.changed[index];
        let Some(file) = &mut changed.file else {
            return;
        };
        let about = file.clone();
        let Kind::File { content, .. } = &mut file.kind else {
            return;
        };
        let (held, users) = (context.files.held(), &self.contents.users);
        let number = self.image.number();
        let done = match content {
            Content::Held { name, is_clone } => held.hold_again(number, index, (name, *is_clone)),
            _ => open(&changed.path, about.owner.0, users).and_then(|(source, found)| {
                if found == about.identity {
                    held.hold(number, index, &source, &about)
                } else {
                    Err(io::ErrorKind::NotFound.into())
                }
            }),
        };
        *content = done.unwrap_or(Content::Unkept(reason));
    }

    fn copy_or_wait(
        &mut self,
        index: usize,
        bytes: u64,
        deadline: Instant,
    ) -> Result<(), SnapshotError> {
        let changed = &self.changes.changed[index];
        let Some(file) = &changed.file else {
            return Ok(());
        };
        let must_be_now = file.is_mapped && is_in_memory(&changed.path);
        let frozen = self.contents.offset - self.beforehand_bytes;
        let is_small = frozen + bytes <= ALWAYS_BYTES;
        if clock::now() < deadline || must_be_now || is_small {
            self.copy(index)?;
        } else if file.writer != Writer::Open && file.shows_changes(self.frozen_ns) {
            // A change before the copy shows in the file's times.
            self.later.push(index);
        }
        Ok(())
    }

    fn copy(&mut self, index: usize) -> Result<(), SnapshotError> {
        let changed = &mut self.changes.changed[index];
        let file = changed.file.as_mut();
        file.map_or(Ok(()), |file| self.contents.copy(&changed.path, file))
    }

    /// Copies the remaining files while the job computes, and completes the set.
    pub fn finish(
        mut self,
        context: &RunContext,
        writer: &ImageWriter,
    ) -> Result<(Arc<KeptFiles>, Kept), SnapshotError> {
        for index in std::mem::take(&mut self.later) {
            self.copy(index)?;
            let changed = &mut self.changes.changed[index];
            let now = KeptFile::of(&changed.path);
            if let Some(then) = &mut changed.file
                && !now.is_some_and(|now| then.looks_unchanged(&now))
                && let Kind::File { content, .. } = &mut then.kind
            {
                *content = Content::Unkept(Unkept::TooSlow);
            }
        }
        let earlier = self.changes.earlier.take();
        let mut set = earlier
            .as_ref()
            .map_or_else(KeptFiles::default, |it| KeptFiles::clone(&it.set));
        set.frozen_ns = self.frozen_ns;
        let mut number = self.changes.changed.len();
        for changed in std::mem::take(&mut self.changes.changed) {
            match changed.file {
                Some(file) => set.files.insert(changed.path, file),
                None => set.files.remove(&changed.path),
            };
        }
        let own = format!("{}/", self.image.number());
        for file in set.files.values_mut() {
            if let Kind::File { content, .. } = &mut file.kind
                && let Content::Held { name, is_clone } = content
                && !name.starts_with(&own)
            {
                number += 1;
                let held = context.files.held();
                let again = held.hold_again(self.image.number(), number, (name, *is_clone));
                *content = again.unwrap_or(Content::Unkept(Unkept::TooLarge));
            }
        }
        if let Some(id) = earlier.as_ref().and_then(|it| ImageId::new(it.id)) {
            self.contents.take_over(context, id, writer, &mut set)?;
        }
        self.contents.stream.finish()?;
        if let Some(path) = set.files.keys().find(|path| !checked::is_path(path)) {
            return Err(SnapshotError::LongPath(path.clone()));
        }
        let mut list = Vec::new();
        set.write(&mut list).map_err(SnapshotError::Prepare)?;
        let mut stream = writer.stream(KEPT_LIST)?;
        stream.write_all(&list)?;
        stream.finish()?;
        let mut kept = Kept {
            freeze_seconds: self.freeze_seconds,
            gap: self.changes.gap,
            unread: self.unread,
            ..set.summary()
        };
        let sets = Sets {
            set: &set,
            earlier: earlier.as_deref().map(|it| &*it.set),
        };
        appended_files::keep(context, writer, &sets, &self.appended, &mut kept)?;
        Ok((Arc::new(set), kept))
    }
}
