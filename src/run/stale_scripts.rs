//! The warning about scripts in the job's command line that are newer than the image that a run continues from. The job
//! read them before the snapshot, so a bug fixed in a script since then occurs again.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::store::ImageEntry;

/// File extensions of scripts. Other words of the command line may be files that the job writes.
const SCRIPTS: [&str; 8] = ["py", "sh", "bash", "pl", "rb", "lua", "jl", "R"];

/// Logs a warning for each script that is newer than the image.
pub(crate) fn tell(line: &[OsString], directory: &Path, image: &ImageEntry) {
    let made = UNIX_EPOCH + Duration::from_millis(image.created_unix_ms);
    for script in edited(line, directory, made) {
        tracing::warn!(
            image = %image.id,
            "{} was changed after the image was taken: the job continues with the old version, which is in its memory; \
             --fresh starts it from the beginning with the new one",
            script.display()
        );
    }
}

fn edited(line: &[OsString], directory: &Path, since: SystemTime) -> Vec<PathBuf> {
    let is_script = |word: &&Path| {
        let ending = word.extension().and_then(OsStr::to_str);
        ending.is_some_and(|ending| SCRIPTS.contains(&ending))
    };
    let is_newer = |word: &&Path| {
        let changed = fs::metadata(directory.join(word)).and_then(|file| file.modified());
        changed.is_ok_and(|changed| changed > since)
    };
    let words = line.iter().map(Path::new);
    let scripts = words.filter(is_script).filter(is_newer);
    scripts.map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_that_are_newer_are_named_and_no_other_words() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["new.py", "old.py", "out.csv"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let then = SystemTime::now() - Duration::from_secs(60);
        let old = fs::File::open(folder.path().join("old.py")).unwrap();
        old.set_modified(then - Duration::from_secs(60)).unwrap();
        let line = ["python3", "-u", "new.py", "old.py", "gone.py", "out.csv"].map(OsString::from);
        assert_eq!(edited(&line, folder.path(), then), [Path::new("new.py")]);
    }
}
