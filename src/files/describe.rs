//! Description of the files at given paths, for the set of an image.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::attributes;
use super::file_set::{Content, KeptFile, Kind, Unkept, Writer, born_ns, changed_ns, modified_ns};
use crate::safe_path::Spot;

/// Identifies a file, whatever its names are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct FileId {
    /// Device number; 0 if the file system records creation times, because it may differ after a reboot or mount.
    device: u64,
    inode: u64,
    /// Inode numbers are reused.
    born_ns: i64,
}

impl FileId {
    pub fn new((device, inode): (u64, u64), born_ns: i64) -> Self {
        let device = if born_ns == 0 { device } else { 0 };
        Self {
            device,
            inode,
            born_ns,
        }
    }

    pub fn of(found: &Metadata) -> Self {
        Self::new((found.dev(), found.ino()), born_ns(found))
    }
}

/// Describes one path after the other. The folder of the last path stays open, because the next path is often in it.
#[derive(Debug, Default)]
pub(super) struct Describer {
    last: Option<Spot>,
}

impl Describer {
    /// Describes the file at a path. Its content is not kept yet. Returns `None` for devices, and if there is no file.
    /// `known` is an earlier description: if its change time is the current one, its attributes are reused.
    pub fn describe(&mut self, path: &Path, known: Option<&KeptFile>) -> Option<KeptFile> {
        // `Spot` is safe even if the job's user has put a link in the way.
        let spot = match self.last.take() {
            Some(spot) => spot.turned_to(path),
            None => Spot::of(path),
        };
        self.last = spot.ok();
        let at = self.last.as_ref().map(Spot::path);
        // The root folder has no parent.
        let at = match &at {
            Some(at) => at,
            None if path.parent().is_none() => path,
            None => return None,
        };
        let found = fs::symlink_metadata(at).ok()?;
        let kind = found.file_type();
        let kind = if kind.is_file() {
            Kind::File {
                size: found.size(),
                content: Content::Unkept(Unkept::TooSlow),
            }
        } else if kind.is_dir() {
            Kind::Folder
        } else if kind.is_symlink() {
            let target = fs::read_link(at).ok()?;
            Kind::Link { target }
        } else if kind.is_fifo() {
            Kind::Pipe
        } else if kind.is_socket() {
            Kind::Socket
        } else {
            return None;
        };
        let mut file = KeptFile {
            kind,
            identity: (found.dev(), found.ino()),
            born_ns: born_ns(&found),
            modified_ns: modified_ns(&found),
            changed_ns: changed_ns(&found),
            mode: found.mode() & 0o7777,
            owner: (found.uid(), found.gid()),
            attributes: Vec::new(),
            writer: Writer::Job,
            is_mapped: false,
        };
        let same =
            known.filter(|known| known.is_same_file(&file) && known.changed_ns == file.changed_ns);
        file.attributes = same.map_or_else(|| attributes::of(at), |it| it.attributes.clone());
        Some(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_several_folders_are_described_in_turn() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("b")).unwrap();
        let paths = ["a", "b/a", "b/b", "c"].map(|name| place.path().join(name));
        for (size, path) in paths.iter().enumerate() {
            fs::write(path, "x".repeat(size)).unwrap();
        }
        let missing = place.path().join("none/a");
        let mut describer = Describer::default();
        for (size, path) in paths.iter().enumerate() {
            assert_eq!(describer.describe(&missing, None), None);
            let file = describer.describe(path, None).unwrap();
            assert_eq!(file.size(), size as u64, "{}", path.display());
            assert_eq!(Some(file), KeptFile::of(path));
        }
        let folder = describer.describe(&place.path().join("b"), None).unwrap();
        assert_eq!(folder.kind, Kind::Folder);
        assert!(describer.describe(Path::new("/"), None).is_some());
    }

    #[test]
    fn attributes_of_an_unchanged_file_are_reused() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a");
        fs::write(&path, "x").unwrap();
        let mut known = KeptFile::of(&path).unwrap();
        known.attributes = vec![("user.known".to_owned(), Vec::new())];
        let describe = |known: &_| Describer::default().describe(&path, Some(known)).unwrap();
        assert_eq!(describe(&known).attributes, known.attributes);
        known.changed_ns -= 1;
        assert!(describe(&known).attributes.is_empty());
    }
}
