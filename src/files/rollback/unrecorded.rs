//! New files of which no change is on record.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::super::file_comparison::Comparison;
use super::super::file_set::{born_ns, changed_ns};
use super::super::folder_scan::{Scan, folders_of, is_special};
use super::super::lost::{RollbackError, Why};
use super::Rollback;

impl Rollback {
    /// Searches for new files without a record: in the working folder and in all folders of the job's files.
    pub(super) fn add_unrecorded(
        &mut self,
        comparison: Comparison<'_>,
    ) -> Result<(), RollbackError> {
        let Comparison {
            set, since, place, ..
        } = comparison;
        let files = set.files.keys().map(PathBuf::as_path);
        let mut folders = folders_of(files);
        folders.retain(|folder| comparison.is_unsure(folder));
        let tree_is_unsure = comparison.is_unsure(place.folder);
        if folders.is_empty() && !tree_is_unsure {
            return Ok(());
        }
        let scan = Scan {
            tree: tree_is_unsure.then_some(place.folder),
            folders: &folders,
            ours: place.ours,
        };
        let mut found = Vec::new();
        let (mut jobs_folders, jobs_users) = (comparison.jobs_folders(), comparison.jobs_users());
        let mut see = |path: &Path, metadata: &Metadata| {
            // A folder's change time depends on its contents. Its creation time is compared.
            let at = if metadata.is_dir() {
                born_ns(metadata)
            } else {
                changed_ns(metadata)
            };
            let is_new =
                !is_special(metadata) && at > set.frozen_ns && comparison.may_miss(path, Some(at));
            let is_known = set.files.contains_key(path)
                || since.by_job(path)
                || since.by_others(path)
                || place.leaves_out(path);
            if !is_new || is_known {
                return;
            }
            let is_jobs = comparison.is_of_last_seconds(path, at)
                && jobs_users.contains(&metadata.uid())
                && path
                    .parent()
                    .is_some_and(|folder| jobs_folders.contains(folder));
            if is_jobs && metadata.is_dir() {
                jobs_folders.insert(path.to_owned());
            }
            found.push((path.to_owned(), metadata.is_dir(), is_jobs));
        };
        scan.walk(&mut see).map_err(|source| RollbackError::Scan {
            gap: comparison
                .gap
                .unwrap_or("a file system cannot be watched")
                .to_owned(),
            source,
        })?;
        if since.is_stopped() {
            let new = found.into_iter().map(|(path, ..)| (path, true));
            self.by_others.extend(new);
            return Ok(());
        }
        for (path, is_folder, is_jobs) in found {
            let is_included = place.included.matches(&path);
            if is_jobs && !is_included {
                self.presumed.push(path.clone());
            }
            if !is_included && !is_jobs {
                self.lose(&path, Why::Unknown);
            } else if is_folder {
                self.folders.push(path);
            } else {
                self.aside.push(path);
            }
        }
        Ok(())
    }
}
