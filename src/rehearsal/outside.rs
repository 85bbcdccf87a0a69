//! Files outside of the working folder that the job writes. All runs share these files, so each run finds the files of
//! the earlier ones.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use super::folder_content::FolderContent;
use crate::files;

/// Record of the job's changes, in the store of a trial.
const RECORD: &str = "files.log";
/// Folder in which Python keeps compiled modules; its content does not affect the job.
const CACHE: &str = "__pycache__";
/// Maximum number of files in a message.
const NAMED_MAX: usize = 3;

/// Reads which files outside of `folders` the job wrote, and what they are now. A file that no longer exists is left
/// out.
pub(super) fn written_outside(store: &Path, folders: [&Path; 2]) -> io::Result<FolderContent> {
    let mut paths = BTreeSet::new();
    for path in files::changed_by_job(&store.join(RECORD))? {
        let is_inside = folders.iter().any(|folder| path.starts_with(folder));
        let is_cache = path.components().any(|part| part.as_os_str() == CACHE);
        let is_file = || path.symlink_metadata().is_ok_and(|found| found.is_file());
        if !is_inside && !is_cache && is_file() {
            paths.insert(path);
        }
    }
    FolderContent::of_files(paths)
}

/// Names the first files.
pub(super) fn named(files: &FolderContent) -> String {
    let mut names: Vec<String> = files
        .paths()
        .take(NAMED_MAX)
        .map(|path| path.display().to_string())
        .collect();
    let more = files.len().saturating_sub(NAMED_MAX);
    if more > 0 {
        names.push(format!("{more} more"));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_existing_files_of_the_job_are_found() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        for folder in ["copy", "store", "out/__pycache__"] {
            fs::create_dir_all(path(folder)).unwrap();
        }
        let line = |kind: &str, path: &Path| {
            format!(
                "{{\"{kind}\":{{\"path\":\"{}\",\"change\":\"created\"}}}}\n",
                path.display()
            )
        };
        let mut record = vec!["{\"begin\":{\"unwatched\":[]}}\n\"end\"\n".to_owned()];
        for name in ["copy/a", "out/b", "out/__pycache__/c", "out/gone", "out"] {
            let full = path(name);
            if !name.ends_with("gone") && name != "out" {
                fs::write(&full, "text").unwrap();
            }
            record.push(line("job", &full));
        }
        let other = path("out/other");
        fs::write(&other, "text").unwrap();
        record.extend([line("other", &other), "{\"jo".to_owned()]);
        fs::write(path("store/files.log"), record.concat()).unwrap();
        let found = written_outside(&path("store"), [&path("copy"), &path("store")]).unwrap();
        assert_eq!(named(&found), path("out/b").display().to_string());
    }
}
