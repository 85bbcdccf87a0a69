//! Facts of the trial's image: its positions in the output, and the job's files that it does not contain.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::config::Config;
use crate::files::{Kept, REPORTS_ONLY, Unkept};
use crate::path_text;
use crate::run::{ImageFacts, chain, read_key, size};
use crate::store::Store;

/// A file of the job whose content is not in the image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NotKept {
    /// The file.
    #[serde(with = "path_text")]
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// The reason.
    pub reason: String,
    /// Setting or other remedy that would include it.
    pub setting: String,
}

/// The facts of an image that a rehearsal uses.
#[derive(Clone, Debug, Default)]
pub(super) struct TrialImage {
    /// Bytes that the job had written to stdout and stderr at the snapshot.
    pub positions: [u64; 2],
    /// The first files whose content the image does not have.
    pub not_kept: Vec<NotKept>,
    /// Number of further files.
    pub more: usize,
    /// Reason why some files that the job writes may be unknown, if there is one.
    pub gap: Option<String>,
}

impl TrialImage {
    /// Reads the facts of an image; the text is the reason why that is impossible.
    pub(super) fn at(config: &Config, store: &Path, image: &str) -> Result<Self, String> {
        let key = read_key(&config.encryption).map_err(|error| chain(&error))?;
        let store = Store::open_with(store, key.as_ref()).map_err(|error| chain(&error))?;
        let id = image.parse().map_err(|_| format!("no image {image}"))?;
        let manifest = store.manifest(id).map_err(|error| chain(&error))?;
        let facts: ImageFacts =
            serde_json::from_slice(&manifest.meta).map_err(|error| chain(&error))?;
        let streams = &facts.streams;
        let mut look = Self::of(facts.kept.as_ref());
        look.positions = [streams.stdout.position, streams.stderr.position];
        Ok(look)
    }

    /// Adds the files that a later image does not contain either.
    pub(super) fn add(&mut self, later: Self) {
        self.more = self.more.max(later.more);
        self.gap = self.gap.take().or(later.gap);
        let is_new = |file: &NotKept| self.not_kept.iter().all(|known| known.path != file.path);
        let new: Vec<NotKept> = later.not_kept.into_iter().filter(is_new).collect();
        self.not_kept.extend(new);
    }

    fn of(kept: Option<&Kept>) -> Self {
        let Some(kept) = kept else {
            return Self::default();
        };
        let not_kept: Vec<NotKept> = kept.named.iter().map(not_kept).collect();
        Self {
            positions: [0; 2],
            more: kept.unkept.saturating_sub(not_kept.len()),
            not_kept,
            gap: kept.gap.clone(),
        }
    }

    /// Returns true if the image has all known files, and the job's programs report the files that they change, instead of the
    /// kernel: a restore is refused if another file has changed.
    pub(super) fn has_reported_files(&self) -> bool {
        let has_all = self.not_kept.is_empty() && self.more == 0;
        has_all && self.gap.as_deref() == Some(REPORTS_ONLY)
    }

    /// Describes the files that the image does not contain, and a remedy. `None` if it contains all of them.
    pub(super) fn missing(&self) -> Option<(String, String)> {
        let named = self.not_kept.iter().map(|file| {
            let (path, bytes) = (file.path.display(), size(file.bytes));
            format!("{path} ({bytes}: {})", file.reason)
        });
        let mut named: Vec<String> = named.collect();
        if self.more > 0 {
            named.push(format!("{} more", self.more));
        }
        let mut remedies: Vec<&str> = Vec::new();
        for file in &self.not_kept {
            if !remedies.contains(&file.setting.as_str()) {
                remedies.push(&file.setting);
            }
        }
        let mut reasons = Vec::new();
        if !named.is_empty() {
            reasons.push(format!("the image does not contain {}", named.join(", ")));
        }
        if let Some(gap) = &self.gap {
            reasons.push(format!(
                "some files that the job writes may be unknown: {gap}"
            ));
            remedies.push("list the files of such programs in files.include, or rehearse as root");
        }
        (!reasons.is_empty()).then(|| (reasons.join("; "), remedies.join("; ")))
    }
}

fn not_kept((path, bytes, reason): &(PathBuf, u64, Unkept)) -> NotKept {
    let setting = match reason {
        Unkept::TooLarge | Unkept::Linked => {
            format!("set files.keep_content to {} or more", at_least(*bytes))
        }
        Unkept::TooMuch => "set files.keep_total to a larger size".to_owned(),
        Unkept::Unreadable => "run ckpt-run as a user that may read the file".to_owned(),
        Unkept::TooSlow => "set files.freeze to a longer time".to_owned(),
    };
    NotKept {
        path: path.clone(),
        bytes: *bytes,
        reason: reason.to_string(),
        setting,
    }
}

/// Formats a limit above this file size in the form of the settings.
fn at_least(bytes: u64) -> String {
    let mut unit = 1 << 10;
    for name in ["KiB", "MiB", "GiB"] {
        if bytes < unit << 10 {
            return format!("\"{}{name}\"", bytes / unit + 1);
        }
        unit <<= 10;
    }
    format!("\"{}TiB\"", bytes / unit + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_with_the_setting_that_would_keep_them() {
        let kept = Kept {
            unkept: 3,
            named: vec![
                ("/w/a".into(), 5 << 20, Unkept::TooLarge),
                ("/w/b".into(), 1, Unkept::TooMuch),
            ],
            ..Kept::default()
        };
        let (reason, remedy) = TrialImage::of(Some(&kept)).missing().unwrap();
        assert_eq!(
            reason,
            "the image does not contain /w/a (5.0 MiB: larger than files.keep_content), \
             /w/b (1 B: beyond files.keep_total), 1 more"
        );
        assert_eq!(
            remedy,
            "set files.keep_content to \"6MiB\" or more; set files.keep_total to a larger size"
        );
        assert_eq!(TrialImage::of(Some(&Kept::default())).missing(), None);
    }

    #[test]
    fn a_limit_is_larger_than_the_file() {
        for (bytes, text) in [(0, "\"1KiB\""), (1024, "\"2KiB\""), (3 << 30, "\"4GiB\"")] {
            assert_eq!(at_least(bytes), text);
        }
    }
}
