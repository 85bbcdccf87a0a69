//! Rollback of the files that the job writes to their state at the snapshot.
//!
//! A plan checks everything and changes nothing. Then the plan is executed. Data that is truncated or overwritten is
//! saved in a separate folder first.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::file_sample::{IDENTIFYING_BYTES_MIN, sample_at};
use super::files::{Access, OpenFile, modified_ns};
use super::nodes::{self, Node};
use crate::safe_path::{JobUsers, Spot};
use aside::{aside_name, keep_cut, without_links};
use error::{RewindError, system};

pub use aside::{CutAway, undo};
pub(super) use aside::{discard, keep_end};
pub use landed::{Expected, LandedError};

mod aside;
pub(super) mod error;
mod landed;

/// Planned steps, in order.
#[derive(Debug, Default)]
pub struct Plan {
    /// Folders and named pipes to create before the rollback.
    nodes: Vec<Node>,
    /// Files to truncate to their sizes at the snapshot, with their present device and inode.
    cuts: Vec<(OpenFile, (u64, u64))>,
}

/// Checks that a snapshot can have recorded all these nodes.
///
/// # Errors
/// There are too many, or the path of one is not valid.
pub fn check_nodes(nodes: &[Node]) -> Result<(), RewindError> {
    Ok(nodes::check(nodes)?)
}

/// Compares files, folders and named pipes with their state at the snapshot. Changes nothing. `present_path` returns
/// the current path of a file that will be renamed back before the plan is executed.
///
/// # Errors
/// The first file that cannot be rolled back.
pub fn plan<'a>(
    files: impl IntoIterator<Item = &'a OpenFile>,
    nodes: &[Node],
    other_bytes: OtherBytes,
    present_path: impl Fn(&'a Path) -> &'a Path,
) -> Result<Plan, RewindError> {
    let mut plan = Plan {
        nodes: nodes::missing(nodes)?,
        ..Plan::default()
    };
    for file in files {
        if let Some(identity) = is_to_cut(file, other_bytes, present_path(&file.path))? {
            plan.cuts.push((file.clone(), identity));
        }
    }
    Ok(plan)
}

/// Checks a file. Returns its device and inode if it has to be truncated.
fn is_to_cut(
    file: &OpenFile,
    other_bytes: OtherBytes,
    present: &Path,
) -> Result<Option<(u64, u64)>, RewindError> {
    let metadata = match Spot::of(present).and_then(|spot| spot.metadata()) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(RewindError::Vanished(file.path.clone()));
        }
        Err(error) => return Err(system("inspect", &file.path)(error)),
    };
    if file.written() {
        same_owner(file, &metadata)?;
    }
    let (then, now) = (file.size, metadata.size());
    match file.access {
        Access::Read if then != now => Err(RewindError::Changed {
            path: file.path.clone(),
            then,
            now,
        }),
        Access::Map if then != now || file.modified_ns != modified_ns(&metadata) => {
            Err(RewindError::Changed {
                path: file.path.clone(),
                then,
                now,
            })
        }
        Access::Read | Access::Map => Ok(None),
        Access::Write | Access::Update => {
            holds_the_same(file, other_bytes, present, &metadata)?;
            Ok((now > then).then(|| (metadata.dev(), metadata.ino())))
        }
    }
}

/// Checks that a file without saved content is the file of the snapshot, or a copy of it.
fn holds_the_same(
    file: &OpenFile,
    other_bytes: OtherBytes,
    present: &Path,
    metadata: &Metadata,
) -> Result<(), RewindError> {
    let path = file.path.clone();
    let (then, now) = (file.size, metadata.size());
    let is_same = metadata.ino() == file.inode;
    let is_like_it = now >= then && metadata.is_file() && metadata.mode() & 0o7777 == file.mode;
    if !is_same && !is_like_it {
        return Err(RewindError::Replaced(path));
    }
    if now < then {
        return Err(RewindError::Shrank { path, then, now });
    }
    // An unreadable file is treated as a different one.
    let has_other_bytes = file
        .sample
        .is_some_and(|known| sample_at(present, then).ok() != Some(known));
    let is_identified = file.sample.is_some() && then >= IDENTIFYING_BYTES_MIN;
    if !is_same && (!is_identified || has_other_bytes) {
        return Err(RewindError::Replaced(path));
    }
    if has_other_bytes {
        return other_bytes.judge(RewindError::OtherBytes { path, bytes: then });
    }
    Ok(())
}

/// Treatment of a file or output whose bytes differ from those of the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherBytes {
    /// The image is refused.
    Refuse,
    /// A warning names the file.
    Warn,
}

impl OtherBytes {
    pub(super) fn judge(self, error: RewindError) -> Result<(), RewindError> {
        match self {
            Self::Refuse => Err(error),
            Self::Warn => {
                tracing::warn!(
                    "the job continues with a file that differs from the snapshot: {error}"
                );
                Ok(())
            }
        }
    }
}

impl Plan {
    /// Creates missing folders and named pipes.
    ///
    /// # Errors
    /// The first node that cannot be created.
    pub fn make_nodes(&self, users: &JobUsers) -> Result<(), RewindError> {
        Ok(nodes::remake(&self.nodes, users)?)
    }

    /// Rolls the files back, after [`make_nodes`](Self::make_nodes). `aside` is a folder for truncated data, created when it is
    /// needed.
    ///
    /// # Errors
    /// The first step that fails. Data truncated by earlier steps is written back.
    pub fn execute(self, aside: &Path) -> Result<Vec<CutAway>, RewindError> {
        let mut cut = Vec::new();
        for (index, (file, identity)) in self.cuts.iter().enumerate() {
            let kept = aside.join(aside_name(index, &file.path));
            let done = open(file, *identity).and_then(|mut target| {
                cut.extend(keep_cut(file, &mut target, kept)?);
                let shortened = target.set_len(file.size);
                shortened.map_err(system("cut", &file.path))
            });
            if let Err(error) = done {
                undo(&cut);
                return Err(error);
            }
        }
        Ok(cut)
    }
}

fn same_owner(file: &OpenFile, metadata: &Metadata) -> Result<(), RewindError> {
    let (then, now) = (file.owner.0, metadata.uid());
    if then == now {
        return Ok(());
    }
    let path = file.path.clone();
    Err(RewindError::Owner { path, then, now })
}

/// Opens a file to change it. Refuses a file that another user has put in its place.
fn open(file: &OpenFile, identity: (u64, u64)) -> Result<File, RewindError> {
    let opened = without_links(&file.path).map_err(system("open", &file.path))?;
    let metadata = opened.metadata().map_err(system("inspect", &file.path))?;
    same_owner(file, &metadata)?;
    if (metadata.dev(), metadata.ino()) != identity {
        return Err(RewindError::Replaced(file.path.clone()));
    }
    Ok(opened)
}

#[cfg(test)]
mod tests;
