//! What became of the job's files since the set of an earlier image.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::kept::{Content, KeptFile, KeptFiles, Kind};
use super::patterns::Patterns;
use super::record::Record;

/// A path whose entry in the set is not the earlier one any more.
#[derive(Debug)]
pub struct Changed {
    /// The path.
    pub path: PathBuf,
    /// What is there; `None` when nothing is that can be kept.
    pub file: Option<KeptFile>,
}

/// Compares the job's files with an earlier set, of the time `earlier_time` of the record. Only what the record says was
/// touched is looked at: the job is frozen meanwhile. `open` are the files that the list of open files has, and
/// `excluded` those that are nobody's business.
#[must_use]
pub fn changed_since(
    record: &Record,
    earlier: &KeptFiles,
    earlier_time: usize,
    open: &HashSet<&Path>,
    excluded: &Patterns,
) -> Vec<Changed> {
    let touched = record.touched();
    let touched = touched.filter(|(_, touch)| touch.last >= earlier_time);
    let mut paths: HashSet<&Path> = touched.map(|(path, _)| path).collect();
    // What was open may be closed by now, and the other way round; neither is a change on record.
    let was_open = earlier.files.iter().filter(|(_, file)| is_open(file));
    paths.extend(was_open.map(|(path, _)| path.as_path()));
    paths.extend(open);
    let look = |path: &Path| {
        let mut file = KeptFile::of(path)?;
        let known = earlier.files.get(path);
        let known = known.filter(|known| known.is_unchanged(&file));
        if let Kind::File { content, .. } = &mut file.kind {
            if open.contains(path) {
                *content = Content::Open;
            } else if let Some(Kind::File {
                content: kept @ Content::Kept { .. },
                ..
            }) = known.map(|known| &known.kind)
            {
                *content = kept.clone();
            }
        }
        Some(file)
    };
    let mut changed: Vec<Changed> = paths
        .into_iter()
        .filter(|path| !excluded.matches(path))
        .map(|path| Changed {
            path: path.to_owned(),
            file: look(path),
        })
        .collect();
    changed.sort_by(|left, right| left.path.cmp(&right.path));
    changed
}

fn is_open(file: &KeptFile) -> bool {
    matches!(
        file.kind,
        Kind::File {
            content: Content::Open,
            ..
        }
    )
}
