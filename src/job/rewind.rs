//! Rollback of the files that the job writes to their state at the snapshot.
//!
//! A plan checks everything and changes nothing. Then the plan is executed. Data that is truncated or overwritten is
//! saved in a separate folder first.

use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

use super::file_sample::{IDENTIFYING_BYTES_MIN, sample_at};
use super::files::{Access, OpenFile, modified_ns};
use super::nodes::{self, Node};
use crate::safe_path::Spot;
use crate::sparse_writer::SparseWriter;
use aside::{aside_name, keep_from, without_links};
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
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    file: OpenFile,
    action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Truncate the file to its size at the snapshot.
    Cut,
    /// Write the saved content back.
    Refill,
    /// Create the file again from the saved content.
    Recreate,
}

/// Removes the files of the job's former sockets that CRIU does not remove before it binds them again.
///
/// # Errors
/// A file cannot be removed.
pub fn clear_sockets(nodes: &[Node]) -> Result<(), RewindError> {
    Ok(nodes::clear_sockets(nodes)?)
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
        if let Some(action) = action_for(file, other_bytes, present_path(&file.path))? {
            plan.steps.push(Step {
                file: file.clone(),
                action,
            });
        }
    }
    Ok(plan)
}

fn action_for(
    file: &OpenFile,
    other_bytes: OtherBytes,
    present: &Path,
) -> Result<Option<Action>, RewindError> {
    let metadata = match Spot::of(present).and_then(|spot| spot.metadata()) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return if file.content.is_some() {
                Ok(Some(Action::Recreate))
            } else {
                Err(RewindError::Vanished(file.path.clone()))
            };
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
        Access::Write | Access::Update if file.content.is_some() => Ok(Some(Action::Refill)),
        Access::Write | Access::Update => {
            holds_the_same(file, other_bytes, present, &metadata)?;
            Ok((now > then).then_some(Action::Cut))
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
    pub fn make_nodes(&self) -> Result<(), RewindError> {
        Ok(nodes::remake(&self.nodes)?)
    }

    /// Rolls the files back, after [`make_nodes`](Self::make_nodes). `content` writes a saved content (by its stream
    /// name) into a file. `aside` is a folder for truncated data, created when it is needed.
    ///
    /// # Errors
    /// The first step that fails. Data truncated by earlier steps is written back.
    pub fn execute(
        self,
        aside: &Path,
        content: impl Fn(&str, &mut dyn Write) -> io::Result<()>,
    ) -> Result<Vec<CutAway>, RewindError> {
        let mut cut = Vec::new();
        match self.take_steps(aside, content, &mut cut) {
            Ok(()) => Ok(cut),
            Err(error) => {
                undo(&cut);
                Err(error)
            }
        }
    }

    fn take_steps(
        self,
        aside: &Path,
        content: impl Fn(&str, &mut dyn Write) -> io::Result<()>,
        cut: &mut Vec<CutAway>,
    ) -> Result<(), RewindError> {
        for (index, Step { file, action }) in self.steps.into_iter().enumerate() {
            let kept = aside.join(aside_name(index, &file.path));
            match action {
                Action::Cut => {
                    let mut target = open(&file)?;
                    cut.extend(keep_from(&file, &mut target, file.size, kept)?);
                    target
                        .set_len(file.size)
                        .map_err(system("cut", &file.path))?;
                }
                Action::Refill => {
                    let mut target = open(&file)?;
                    // Data that other programs wrote to the file since exists nowhere else. A file in memory has no
                    // other writers, and its size is unlimited.
                    let from = if file.in_memory { file.size } else { 0 };
                    if changed(&file, &target)? {
                        cut.extend(keep_from(&file, &mut target, from, kept)?);
                    }
                    refill(&file, &target, &content)?;
                }
                Action::Recreate => {
                    let made = Spot::of(&file.path).and_then(|spot| {
                        spot.allows(file.owner.0)?;
                        let mut options = File::options();
                        spot.open_as_owner(options.write(true).create_new(true).mode(0o600), 0)
                    });
                    let target = made.map_err(system("create again", &file.path))?;
                    refill(&file, &target, &content)?;
                    fchown(&target, Some(file.owner.0), Some(file.owner.1))
                        .map_err(system("set the owner of", &file.path))?;
                    target
                        .set_permissions(fs::Permissions::from_mode(file.mode))
                        .map_err(system("set the mode of", &file.path))?;
                }
            }
        }
        Ok(())
    }
}

/// Writes the saved content of a file into it.
fn refill(
    file: &OpenFile,
    target: &File,
    content: &impl Fn(&str, &mut dyn Write) -> io::Result<()>,
) -> Result<(), RewindError> {
    let Some(stream) = &file.content else {
        return Ok(());
    };
    let system = |operation| system(operation, &file.path);
    if file.in_memory {
        // Unwritten pages occupy no memory.
        target.set_len(0).map_err(system("empty"))?;
    }
    content(stream, &mut SparseWriter::new(target)).map_err(system("put back the content of"))?;
    target.set_len(file.size).map_err(system("cut"))
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
fn open(file: &OpenFile) -> Result<File, RewindError> {
    let opened = without_links(&file.path).map_err(system("open", &file.path))?;
    let metadata = opened.metadata().map_err(system("inspect", &file.path))?;
    same_owner(file, &metadata)?;
    Ok(opened)
}

/// Returns true if the file was written or created again since the snapshot.
fn changed(file: &OpenFile, opened: &File) -> Result<bool, RewindError> {
    let now = opened.metadata().map_err(system("inspect", &file.path))?;
    Ok((now.ino(), now.size(), modified_ns(&now)) != (file.inode, file.size, file.modified_ns))
}

#[cfg(test)]
mod tests;
