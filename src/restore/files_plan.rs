//! Rollback of the files that the job writes to the image's list of them.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::bundled_files::companions;
use super::error::RestoreError;
use crate::files::{
    Content, Done, ImageFiles, KeptFiles, Kind, Lost, Rollback, Sources, SpareContents, StreamPlace,
};
use crate::job::{self, Node, OpenFile, OtherBytes};
use crate::run::image_facts::{ImageFacts, KEPT_LIST, rest_stream};
use crate::run::run_context::RunContext;
use crate::safe_path::JobUsers;
use crate::store::{Companion, ImageId, ImageReader};

/// Limit on the size of the list, room for more than a million files.
const LIST_BYTES_MAX: u64 = 1 << 30;
/// Limit on the files that stay different and are named in the log.
const NAMED_MAX: usize = 5;

/// The files of an image, and the plan for their rollback.
#[derive(Debug)]
pub(super) struct Kept {
    id: ImageId,
    pub set: Arc<KeptFiles>,
    pub rollback: Rollback,
    /// Folders and named pipes of the job in whose place is a file that the rollback moves away.
    obstructed: Vec<Node>,
    /// True if the image came from another machine.
    has_come: bool,
}

/// Returns true if an image came from another machine.
pub(super) fn has_come(context: &RunContext, id: ImageId) -> bool {
    let remote = context.remote.as_ref();
    remote.is_some_and(|remote| remote.has_come(id))
}

/// Returns what an image of this store lacks for a restore on another machine: the parts of ckpt-run that it maps, and
/// contents of files. A file that is not there any more is left out; a restore elsewhere is refused by its name.
pub(crate) fn companions_elsewhere(context: &RunContext, id: ImageId) -> Vec<Companion> {
    let manifest = context.store.manifest(id).ok();
    let facts = manifest.and_then(|manifest| serde_json::from_slice(&manifest.meta).ok());
    let Some(facts): Option<ImageFacts> = facts else {
        return Vec::new();
    };
    let mut parts = companions(&context.store, &facts);
    parts.extend(rest_of_files(context, id, &facts.files));
    parts
}

fn rest_of_files(context: &RunContext, id: ImageId, open: &[OpenFile]) -> Vec<Companion> {
    let Some(image) = context
        .store
        .read(id)
        .ok()
        .filter(|it| it.contains(KEPT_LIST))
    else {
        return Vec::new();
    };
    let list = image.read_to_vec(KEPT_LIST, LIST_BYTES_MAX).ok();
    let Some(set) = list.and_then(|list| KeptFiles::read(&list[..]).ok()) else {
        return Vec::new();
    };
    let rest = set
        .files
        .iter()
        .zip(0..)
        .filter_map(|((path, file), number)| {
            let stream = rest_stream(number);
            let Kind::File { size, content } = &file.kind else {
                return None;
            };
            if image.contains(&stream) {
                return None;
            }
            let (path, opened) = match content {
                Content::Appended => {
                    let opened = file.open_same(path).ok()?;
                    let known = open.iter().find(|open| open.path == *path)?;
                    known.has_same_bytes(&opened).then_some(())?;
                    (path.clone(), opened)
                }
                Content::Held { name, .. } => {
                    let held = context.files.held();
                    held.has(name, *size, file.modified_ns).then_some(())?;
                    let path = held.path(name)?;
                    let opened = File::open(&path).ok()?;
                    (path, opened)
                }
                Content::Kept { .. } | Content::Unkept(_) => return None,
            };
            let is_long_enough = opened.metadata().is_ok_and(|found| found.len() >= *size);
            is_long_enough.then(|| Companion {
                stream,
                path,
                opened: Some((Arc::new(opened), *size)),
            })
        });
    rest.collect()
}

/// Returns the contents, in streams of their own, of files that the list has without content. Left out are those of files
/// that are still there with what they had at the snapshot: there is only more to cut off. `has_come` is true if no file
/// here can be one of them.
fn spare_contents(
    image: &ImageReader,
    set: &KeptFiles,
    open: &[OpenFile],
    has_come: bool,
) -> Result<SpareContents, RestoreError> {
    let mut spare = SpareContents::new();
    for ((path, file), number) in set.files.iter().zip(0..) {
        // Others have such a stream only in an uploaded image.
        let stream = (file.is_appended() || has_come).then(|| rest_stream(number));
        let is_whole = |stream: &String| image.len_of(stream) == Some(file.size());
        let Some(stream) = stream.filter(is_whole) else {
            continue;
        };
        if file.is_appended() {
            let known = open.iter().find(|known| known.path == *path);
            let is_there = || match file.open_same(path) {
                Ok(opened) if !has_come => begins_with(&opened, image, &stream),
                Ok(_) | Err(_) => Ok(false),
            };
            if !known.map_or(Ok(false), |known| is_of_freeze(image, &stream, known))? || is_there()?
            {
                continue;
            }
        }
        let place = StreamPlace::Whole(0);
        spare.insert(path.clone(), Content::Kept { stream, place });
    }
    Ok(spare)
}

/// Returns true if a copy that was made after the freeze has the bytes of the freeze, as far as the sample shows.
fn is_of_freeze(image: &ImageReader, stream: &str, known: &OpenFile) -> Result<bool, RestoreError> {
    let mut failure = None;
    let read = |mut bytes: &mut [u8], at| {
        let len = bytes.len() as u64;
        image
            .copy_range(stream, at, len, &mut bytes)
            .map_err(|error| {
                failure = Some(error);
                io::ErrorKind::Other.into()
            })
    };
    let is_same = known.are_same_bytes(read);
    failure.map_or(Ok(is_same), |error| Err(error.into()))
}

/// Returns true if a file begins with the bytes of a stream.
fn begins_with(opened: &File, image: &ImageReader, stream: &str) -> Result<bool, RestoreError> {
    let mut comparison = Comparison {
        opened,
        at: 0,
        is_same: true,
    };
    match image.copy_to(stream, &mut comparison) {
        Err(error) if comparison.is_same => Err(error.into()),
        Ok(_) | Err(_) => Ok(comparison.is_same),
    }
}

/// Compares what is written to it with a file, up to the first difference.
struct Comparison<'a> {
    opened: &'a File,
    at: u64,
    is_same: bool,
}

impl Write for Comparison<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut there = vec![0; bytes.len()];
        let read = self.opened.read_exact_at(&mut there, self.at);
        self.is_same = read.is_ok() && there == bytes;
        self.at += bytes.len() as u64;
        if self.is_same {
            Ok(bytes.len())
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Kept {
    /// Reads the list and makes the plan. Returns `None` for an image without a list. Changes nothing.
    pub fn plan(
        context: &RunContext,
        image: &ImageReader,
        facts: &ImageFacts,
    ) -> Result<Option<Self>, RestoreError> {
        if !image.contains(KEPT_LIST) {
            return Ok(None);
        }
        let list = image.read_to_vec(KEPT_LIST, LIST_BYTES_MAX)?;
        let mut set = KeptFiles::read(&list[..]).map_err(RestoreError::KeptList)?;
        let id = image.manifest().id;
        let has_come = has_come(context, id);
        let mut spare = spare_contents(image, &set, &facts.files, has_come)?;
        if has_come {
            for (path, there) in std::mem::take(&mut spare) {
                let file = set.files.get_mut(&path).map(|file| &mut file.kind);
                if let Some(Kind::File { content, .. }) = file {
                    *content = there;
                }
            }
        }
        let open = facts.files.iter();
        let open = open
            .map(|file| (file.path.as_path(), file.is_locked))
            .collect();
        let rollback = context.files.plan(&ImageFiles {
            id: id.number(),
            has_come,
            set: &set,
            open: &open,
            spare: &spare,
        })?;
        let moved_away = rollback.moved_away();
        let is_obstructed = |node: &&Node| node.path.ancestors().any(|it| moved_away.contains(it));
        let obstructed = facts.nodes.iter().filter(is_obstructed).cloned().collect();
        Ok(Some(Self {
            id,
            set: Arc::new(set),
            rollback,
            obstructed,
            has_come,
        }))
    }

    /// Returns true if [`put_back`](Self::put_back) creates a folder or named pipe.
    pub fn makes(&self, node: &Node) -> bool {
        self.obstructed.iter().any(|it| it.path == node.path)
    }

    /// Returns true if this plan restores an open file, or leaves it as it is.
    pub fn has(&self, file: &OpenFile) -> bool {
        let found = self.set.files.get(&file.path);
        let is_restored = found
            .is_some_and(|it| !it.is_appended() || self.rollback.puts_back(&file.path))
            && !self.rollback.left_out.contains(&file.path);
        is_restored || self.rollback.leaves(&file.path)
    }

    /// Returns the set, with the present files if it came from another machine.
    pub fn into_set(self) -> Arc<KeptFiles> {
        let Self {
            mut set, has_come, ..
        } = self;
        if has_come {
            Arc::make_mut(&mut set).identify();
        }
        set
    }

    /// Rolls the files back.
    pub fn put_back(
        &self,
        context: &RunContext,
        image: &ImageReader,
        aside: &Path,
        users: &JobUsers,
    ) -> Result<Done, RestoreError> {
        for Lost { path, why } in self.rollback.lost.iter().take(NAMED_MAX) {
            tracing::warn!(file = %path.display(), "the job continues with a file that differs from the snapshot: {why}");
        }
        if let [(first, _), rest @ ..] = &self.rollback.by_others[..] {
            tracing::info!(file = %first.display(), more = rest.len(), "left as other programs have changed it since the snapshot");
        }
        let presumed = &self.rollback.presumed;
        if presumed.len() > NAMED_MAX {
            tracing::warn!(
                files = presumed.len(),
                "files from the last seconds count as the job's; these are the first"
            );
        }
        for path in presumed.iter().take(NAMED_MAX) {
            tracing::warn!(file = %path.display(), "set aside as the job's: it is from the last seconds before the job's end or a \
                 power failure, and no record shows which program made it");
        }
        // The first read only verifies the hashes: no file may be partly overwritten with damaged content.
        for (stream, offset, size) in self.rollback.contents() {
            image.copy_range(stream, offset, size, &mut io::sink())?;
        }
        let done = self.rollback.execute(&Sources {
            record: &context.files.record_path(),
            aside,
            held: context.files.held(),
            users,
            before_step: &|| Ok(()),
            content: |stream: &str, offset, size, mut target: &mut dyn io::Write| {
                image
                    .copy_range(stream, offset, size, &mut target)
                    .map_err(io::Error::other)
            },
        })?;
        if self.has_come {
            let id = self.id.number();
            let noted = context.files.begin_from(id, &self.set);
            noted.map_err(RestoreError::Prepare)?;
        }
        let no_files = std::iter::empty::<&OpenFile>();
        job::plan(no_files, &self.obstructed, OtherBytes::Refuse, |path| path)?
            .make_nodes(users)?;
        Ok(done)
    }
}
