//! Classification of the files in a store's folders by their names.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::image_id::ImageId;
use super::pack::PackName;
use crate::store::fs::durable;

/// Kind of a file in one of the store's folders, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    Manifest(ImageId),
    Damaged(ImageId),
    Pinned(ImageId),
    Pack(PackName),
    Temporary,
    /// File of another program: never read, never removed.
    Foreign,
}

impl FileKind {
    pub(crate) fn of(name: &str) -> Self {
        if name.starts_with(durable::TEMPORARY_PREFIX) {
            return Self::Temporary;
        }
        if let Some(pack) = PackName::from_file_name(name) {
            return Self::Pack(pack);
        }
        let image = |stem: Option<&str>| stem.and_then(ImageId::from_file_name);
        if let Some(id) = image(name.strip_suffix(".manifest")) {
            return Self::Manifest(id);
        }
        if let Some(id) = image(name.strip_suffix(".damaged")) {
            return Self::Damaged(id);
        }
        image(name.strip_suffix(".pinned")).map_or(Self::Foreign, Self::Pinned)
    }
}

/// Error for a store's folder that cannot be listed.
#[derive(Debug, thiserror::Error)]
#[error("cannot list {path}")]
pub struct ListError {
    /// The folder.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

/// Lists the paths in a folder with their kinds; names that are not UTF-8 are foreign.
pub(crate) fn list(folder: &Path) -> Result<Vec<(PathBuf, FileKind)>, ListError> {
    let classify = |entry: io::Result<fs::DirEntry>| {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let kind = name.map_or(FileKind::Foreign, FileKind::of);
        Ok((path, kind))
    };
    fs::read_dir(folder)
        .and_then(|entries| entries.map(classify).collect())
        .map_err(|source| ListError {
            path: folder.to_owned(),
            source,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_names_are_ours() {
        let id = ImageId::new(12).unwrap();
        assert_eq!(FileKind::of("000012.manifest"), FileKind::Manifest(id));
        assert_eq!(FileKind::of("000012.damaged"), FileKind::Damaged(id));
        assert_eq!(FileKind::of("000012.pinned"), FileKind::Pinned(id));
        assert_eq!(FileKind::of(".tmp-abc"), FileKind::Temporary);
        for name in [
            "12.manifest",
            "000012.manifest~",
            "000012",
            ".manifest",
            "../000012.manifest",
        ] {
            assert_eq!(FileKind::of(name), FileKind::Foreign, "{name:?}");
        }
    }
}
