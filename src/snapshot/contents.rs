//! Contents of the job's files in an image's own stream: copied from the files, or taken over from the earlier image.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::libc;

use super::error::SnapshotError;
use crate::files::{Content, KeptFile, KeptFiles, Kind, Unkept};
use crate::run::run_context::RunContext;
use crate::safe_path::{JobUsers, Spot};
use crate::store::{ImageId, ImageReader, ImageWriter, StreamWriter, WriteError};

/// Maximum number of earlier images' streams in a set; if there are more, the contents are merged into one stream.
const STREAMS_MAX: usize = 32;

/// Contents in an image's own stream.
pub(super) struct Contents {
    pub stream: StreamWriter,
    pub name: String,
    /// Bytes in the stream.
    pub offset: u64,
    /// Users as which the job's processes act.
    pub users: JobUsers,
}

impl Contents {
    /// Copies a file's content into the stream. A file that cannot be read, or is not the one that was listed, is left
    /// out.
    pub fn copy(&mut self, path: &Path, file: &mut KeptFile) -> Result<(), SnapshotError> {
        let identity = file.identity;
        let Kind::File { size, content } = &mut file.kind else {
            return Ok(());
        };
        let source = match open(path, file.owner.0, &self.users) {
            Ok((source, found)) if found == identity => source,
            Ok(_) => return Ok(()),
            Err(_) => {
                *content = Content::Unkept(Unkept::Unreadable);
                return Ok(());
            }
        };
        let offset = self.offset;
        let copied = self.stream.copy_from(&mut source.take(*size))?;
        self.offset += copied;
        if copied == *size {
            *content = Content::Kept {
                stream: self.name.clone(),
                offset,
            };
        }
        Ok(())
    }

    /// Takes over unchanged contents from the earlier image, without reading the files.
    pub fn take_over(
        &mut self,
        context: &RunContext,
        earlier: ImageId,
        writer: &ImageWriter,
        set: &mut KeptFiles,
    ) -> Result<(), SnapshotError> {
        let mut streams = BTreeSet::new();
        let mut live = 0;
        for file in set.files.values() {
            if let Some((stream, bytes)) = file.kept().filter(|(it, _)| *it != self.name) {
                streams.insert(stream.to_owned());
                live += bytes;
            }
        }
        if streams.is_empty() {
            return Ok(());
        }
        let Ok(image) = context.store.read(earlier) else {
            // The stream was damaged since: the files are read again for the next image.
            tracing::warn!(image = %earlier, "cannot take over the contents of files from the previous image");
            for file in set.files.values_mut() {
                forget_other(file, &self.name);
            }
            return Ok(());
        };
        let all: u64 = streams.iter().filter_map(|name| image.len_of(name)).sum();
        if streams.len() <= STREAMS_MAX && all / 2 <= live {
            for name in streams {
                if writer.take_over(image.manifest(), &name)? {
                    continue;
                }
                let mut target = writer.stream(&name)?;
                copy(&mut target, |sink| image.copy_to(&name, sink).map(drop))?;
                target.finish()?;
            }
            return Ok(());
        }
        self.put_together(&image, set)
    }

    /// Merges the contents of all earlier streams into this image's own. Each stream is read once.
    fn put_together(
        &mut self,
        image: &ImageReader,
        set: &mut KeptFiles,
    ) -> Result<(), SnapshotError> {
        let mut by_stream: BTreeMap<String, Vec<(u64, u64, &mut u64)>> = BTreeMap::new();
        for file in set.files.values_mut() {
            let Kind::File {
                size,
                content: Content::Kept { stream, offset },
            } = &mut file.kind
            else {
                continue;
            };
            if *stream != self.name {
                let name = std::mem::replace(stream, self.name.clone());
                let parts = by_stream.entry(name).or_default();
                parts.push((*offset, *size, offset));
            }
        }
        for (name, mut parts) in by_stream {
            parts.sort_unstable_by_key(|(from, ..)| *from);
            let ranges = parts.iter().map(|(from, size, _)| (*from, *size));
            copy(&mut self.stream, |sink| {
                image.copy_ranges(&name, ranges, sink)
            })?;
            for (_, size, offset) in parts {
                *offset = self.offset;
                self.offset += size;
            }
        }
        Ok(())
    }
}

fn forget_other(file: &mut KeptFile, name: &str) {
    if let Kind::File { content, .. } = &mut file.kind
        && matches!(content, Content::Kept { stream, .. } if stream != name)
    {
        *content = Content::Unkept(Unkept::TooSlow);
    }
}

/// Opens a file of this owner with the rights of the job; also returns its device and inode.
pub(super) fn open(path: &Path, owner: u32, users: &JobUsers) -> io::Result<(File, (u64, u64))> {
    let file = Spot::of_job(path, owner, users)?.open_to_read(libc::O_NOATIME)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok((file, (found.dev(), found.ino())))
}

fn copy(
    target: &mut StreamWriter,
    read: impl FnOnce(&mut Sink<'_>) -> Result<(), crate::store::ReadError>,
) -> Result<(), SnapshotError> {
    let mut sink = Sink {
        target,
        failure: None,
    };
    match (read(&mut sink), sink.failure) {
        (_, Some(failure)) => Err(failure.into()),
        (Err(error), None) => Err(SnapshotError::Prepare(io::Error::other(error))),
        (Ok(()), None) => Ok(()),
    }
}

/// Stream as the target of a reader; stores the error that `io::Error` cannot carry.
struct Sink<'a> {
    target: &'a mut StreamWriter,
    failure: Option<WriteError>,
}

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(failure) = self.target.write_all(bytes) {
            self.failure = Some(failure);
            return Err(io::ErrorKind::Other.into());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Store, WriteOptions};

    #[test]
    fn contents_of_several_streams_are_merged_into_one() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create_or_open(&folder.path().join("store")).unwrap();
        let lock = store.lock().unwrap();
        let options = WriteOptions {
            buffer: 4 << 20,
            workers: 1,
            level: 1,
        };
        let earlier = store.begin(&lock, options).unwrap();
        for (name, bytes) in [("first", &b"xxaaaxb"[..]), ("second", b"ccx")] {
            let mut stream = earlier.stream(name).unwrap();
            stream.write_all(bytes).unwrap();
            stream.finish().unwrap();
        }
        let earlier = store.read(earlier.commit(b"").unwrap().id).unwrap();
        let path = folder.path().join("file");
        let of = |name: &str, stream: &str, offset, len: usize| {
            std::fs::write(&path, "x".repeat(len)).unwrap();
            let mut file = KeptFile::of(&path).unwrap();
            if let Kind::File { content, .. } = &mut file.kind {
                let stream = stream.to_owned();
                *content = Content::Kept { stream, offset };
            }
            (Path::new("/").join(name), file)
        };
        let mut set = KeptFiles::default();
        set.files.extend([
            of("a", "first", 2, 3),
            of("b", "first", 6, 1),
            of("c", "second", 0, 2),
            of("d", "own", 0, 4),
            of("e", "first", 2, 0),
        ]);
        let writer = store.begin(&lock, options).unwrap();
        let mut contents = Contents {
            stream: writer.stream("own").unwrap(),
            name: "own".to_owned(),
            offset: 4,
            users: JobUsers::default(),
        };
        contents.stream.write_all(b"dddd").unwrap();
        contents.put_together(&earlier, &mut set).unwrap();
        contents.stream.finish().unwrap();
        let image = store.read(writer.commit(b"").unwrap().id).unwrap();
        let read = set.files.values().map(|file| {
            let Kind::File {
                size,
                content: Content::Kept { stream, offset },
            } = &file.kind
            else {
                panic!("a content is missing: {file:?}");
            };
            let mut bytes = Vec::new();
            let copied = image.copy_range(stream, *offset, *size, &mut bytes);
            copied.unwrap();
            String::from_utf8(bytes).unwrap()
        });
        assert_eq!(read.collect::<Vec<_>>(), ["aaa", "b", "cc", "dddd", ""]);
        assert_eq!(image.len_of("own"), Some(10));
    }
}
