//! Content of a folder after a run: type, mode and a hash of each file, without times and owners.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::folder_copy::entries;

/// Maximum number of files that a difference names.
const NAMED_MAX: usize = 5;

/// File in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    /// Type and permissions, as in `st_mode`.
    mode: u32,
    data: Data,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Data {
    Content([u8; 32]),
    Target(PathBuf),
    Device(u64),
    None,
}

/// Content of a folder, by relative path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FolderContent(BTreeMap<PathBuf, Entry>);

impl FolderContent {
    /// Reads the folder.
    pub(super) fn of(folder: &Path) -> io::Result<Self> {
        let mut found = BTreeMap::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(next) = folders.pop() {
            for path in entries(&next, &|_| false)? {
                let entry = entry(&path)?;
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path.clone());
                }
                let name = path.strip_prefix(folder).unwrap_or(&path).to_owned();
                found.insert(name, entry);
            }
        }
        Ok(Self(found))
    }

    /// Reads single files, by full path.
    pub(super) fn of_files(paths: impl IntoIterator<Item = PathBuf>) -> io::Result<Self> {
        let read = |path: PathBuf| entry(&path).map(|entry| (path, entry));
        paths
            .into_iter()
            .map(read)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.keys().map(PathBuf::as_path)
    }

    /// Returns the files that are in `other` as well.
    pub(super) fn common(&self, other: &Self) -> Self {
        let files = self
            .0
            .iter()
            .filter(|(path, _)| other.0.contains_key(*path));
        Self(
            files
                .map(|(path, entry)| (path.clone(), entry.clone()))
                .collect(),
        )
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Describes the files that differ, the first ones by name. `None` if there are none. `here` and `there` name the
    /// two runs.
    pub(super) fn difference(&self, other: &Self, here: &str, there: &str) -> Option<String> {
        let mut found = Vec::new();
        for (path, entry) in &self.0 {
            let name = path.display();
            match other.0.get(path) {
                None => found.push(format!("{name} exists only {here}")),
                Some(same) if same == entry => {}
                Some(another) if another.data == entry.data => found.push(format!(
                    "{name} has mode {:o} {here} and {:o} {there}",
                    entry.mode & 0o7777,
                    another.mode & 0o7777
                )),
                Some(_) => found.push(format!("{name} has different content")),
            }
        }
        let added = other.0.keys().filter(|path| !self.0.contains_key(*path));
        found.extend(added.map(|path| format!("{} exists only {there}", path.display())));
        let more = found.len().saturating_sub(NAMED_MAX);
        found.truncate(NAMED_MAX);
        if more > 0 {
            found.push(format!("{more} more"));
        }
        (!found.is_empty()).then(|| found.join(", "))
    }
}

fn entry(path: &Path) -> io::Result<Entry> {
    let about = fs::symlink_metadata(path)?;
    let kind = about.file_type();
    let data = if kind.is_file() {
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(path)?)?;
        Data::Content(*hasher.finalize().as_bytes())
    } else if kind.is_symlink() {
        Data::Target(fs::read_link(path)?)
    } else if kind.is_dir() {
        Data::None
    } else {
        Data::Device(about.rdev())
    };
    Ok(Entry {
        mode: about.mode(),
        data,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn differences_in_content_mode_and_names_are_named() {
        let place = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| place.path().join(name));
        for folder in [&one, &other] {
            fs::create_dir_all(folder.join("sub")).unwrap();
            for name in ["a", "sub/b", "c"] {
                fs::write(folder.join(name), "text").unwrap();
            }
        }
        let content = |folder: &Path| FolderContent::of(folder).unwrap();
        let told = || content(&one).difference(&content(&other), "here", "there");
        assert_eq!(told(), None);
        fs::write(other.join("sub/b"), "texT").unwrap();
        fs::set_permissions(one.join("a"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::set_permissions(other.join("a"), fs::Permissions::from_mode(0o644)).unwrap();
        fs::remove_file(one.join("c")).unwrap();
        assert_eq!(
            told().unwrap(),
            "a has mode 600 here and 644 there, sub/b has different content, c exists only there"
        );
    }
}
