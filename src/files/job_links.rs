//! Links that the job has put in the place of folders (`mv data old; ln -s old data`).
//!
//! Paths of the record and of a set have no links on the way, because the kernel reports them so. If a folder on the way is
//! a link of the job now, the path leads to another file, which has a path of its own there: nothing is left at the path
//! itself.

use std::collections::HashSet;
use std::path::Path;

/// The job's links on the way to its files.
#[derive(Debug)]
pub(super) struct JobLinks<'a>(HashSet<&'a Path>);

impl<'a> JobLinks<'a> {
    /// Finds the links in the place of folders of `paths`, among the paths that the job has changed.
    pub fn find<'b>(
        changed: impl Iterator<Item = &'a Path>,
        paths: impl Iterator<Item = &'b Path>,
    ) -> Self {
        let mut folders = HashSet::new();
        for path in paths {
            for folder in path.ancestors().skip(1) {
                if !folders.insert(folder) {
                    break;
                }
            }
        }
        Self::of(changed.filter(|path| folders.contains(path) && path.is_symlink()))
    }

    /// Lists links that may have gone.
    pub fn of(links: impl Iterator<Item = &'a Path>) -> Self {
        Self(links.collect())
    }

    /// Returns true if a folder on the way to the path is one of the links.
    pub fn lead(&self, path: &Path) -> bool {
        !self.0.is_empty()
            && path
                .ancestors()
                .skip(1)
                .any(|folder| self.0.contains(folder) && folder.is_symlink())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn only_changed_links_in_the_place_of_folders_count() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        fs::create_dir(path("folder")).unwrap();
        for link in ["theirs", "job", "other"] {
            symlink("folder", path(link)).unwrap();
        }
        let changed = ["folder", "job", "other", "job/deep/file"].map(path);
        let set = ["folder/file", "theirs/file"].map(path);
        let changed = || changed.iter().map(PathBuf::as_path);
        let links = JobLinks::find(changed(), changed().chain(set.iter().map(PathBuf::as_path)));
        assert_eq!(links.0, [&*path("job")].into());
        for (name, is_beyond) in [
            ("job/deep/file", true),
            ("job", false),
            ("theirs/file", false),
        ] {
            assert_eq!(links.lead(&path(name)), is_beyond, "{name}");
        }
    }
}
