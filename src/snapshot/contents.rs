//! Contents of the job's files in an image's own stream: copied from the files, or taken over from the earlier image.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::libc;

use super::error::SnapshotError;
use crate::files::{Content, KeptFile, KeptFiles, Kind, StreamPlace, Unkept};
use crate::run::run_context::RunContext;
use crate::safe_path::{JobUsers, Spot};
use crate::sparse_file::{allocated_bytes, data_ranges};
use crate::store::{ImageId, ImageReader, ImageWriter, StreamWriter, WriteError};

/// Maximum number of earlier images' streams in a set; if there are more, the contents are merged into one stream.
const STREAMS_MAX: usize = 32;

/// Smallest hole that is left out, in bytes: zeros cost little, and a list of many ranges costs more.
const HOLE_MIN: u64 = 1 << 20;

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
        let Some(parts) = parts_to_keep(&source, *size).map_err(SnapshotError::Prepare)? else {
            return Ok(());
        };
        let place = match parts.as_slice() {
            [all] if *all == (0..*size) => StreamPlace::Whole(self.offset),
            _ => StreamPlace::Sparse {
                first: self.offset,
                ranges: parts.iter().map(|part| (part.start, part.end)).collect(),
            },
        };
        let mut copied = 0;
        for part in parts {
            (&source)
                .seek(SeekFrom::Start(part.start))
                .map_err(SnapshotError::Prepare)?;
            let mut data = (&source).take(part.end - part.start);
            copied += self.stream.copy_from(&mut data)?;
        }
        self.offset += copied;
        if copied == place.bytes(*size) {
            let stream = self.name.clone();
            *content = Content::Kept { stream, place };
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
            if let Some((stream, _, bytes)) = file.kept().filter(|(it, ..)| *it != self.name) {
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
        let mut by_stream: BTreeMap<String, Vec<(u64, u64, &mut StreamPlace)>> = BTreeMap::new();
        for file in set.files.values_mut() {
            let Kind::File {
                size,
                content: Content::Kept { stream, place },
            } = &mut file.kind
            else {
                continue;
            };
            if *stream != self.name {
                let name = std::mem::replace(stream, self.name.clone());
                let parts = by_stream.entry(name).or_default();
                parts.push((place.offset(), place.bytes(*size), place));
            }
        }
        for (name, mut parts) in by_stream {
            parts.sort_unstable_by_key(|(from, ..)| *from);
            let ranges = parts.iter().map(|(from, bytes, _)| (*from, *bytes));
            copy(&mut self.stream, |sink| {
                image.copy_ranges(&name, ranges, sink)
            })?;
            for (_, bytes, place) in parts {
                place.move_to(self.offset);
                self.offset += bytes;
            }
        }
        Ok(())
    }
}

/// Returns the number of bytes that an image has of a file of this size, roughly: holes do not count.
pub(super) fn bytes_to_keep(path: &Path, size: u64) -> u64 {
    if size < HOLE_MIN {
        return size;
    }
    let found = Spot::of(path).and_then(|spot| spot.path().symlink_metadata());
    found.map_or(size, |found| size.min(allocated_bytes(&found)))
}

/// Returns the parts of a file that an image keeps: all but large holes. `None` if the file has become shorter.
fn parts_to_keep(file: &File, size: u64) -> io::Result<Option<Vec<Range<u64>>>> {
    if size < HOLE_MIN {
        return Ok(Some(vec![0..size]));
    }
    let data = data_ranges(file, 0..size)?;
    if file.metadata()?.len() < size {
        return Ok(None);
    }
    let mut parts = Vec::new();
    let mut part = 0..0;
    let end = std::iter::once(size..size);
    for data in data.into_iter().chain(end) {
        if data.start - part.end >= HOLE_MIN {
            parts.push(std::mem::replace(&mut part, data));
        } else {
            part.end = data.end;
        }
    }
    parts.push(part);
    parts.retain(|part| !part.is_empty());
    Ok(Some(parts))
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
        let of = |name: &str, stream: &str, place, len: usize| {
            std::fs::write(&path, "x".repeat(len)).unwrap();
            let mut file = KeptFile::of(&path).unwrap();
            if let Kind::File { content, .. } = &mut file.kind {
                let stream = stream.to_owned();
                *content = Content::Kept { stream, place };
            }
            (Path::new("/").join(name), file)
        };
        let with_holes = StreamPlace::Sparse {
            first: 4,
            ranges: vec![(1, 2), (5, 7)],
        };
        let mut set = KeptFiles::default();
        set.files.extend([
            of("a", "first", StreamPlace::Whole(2), 3),
            of("b", "first", StreamPlace::Whole(6), 1),
            of("c", "second", StreamPlace::Whole(0), 2),
            of("d", "own", StreamPlace::Whole(0), 4),
            of("e", "first", StreamPlace::Whole(2), 0),
            of("f", "first", with_holes, 9),
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
            let (stream, place, count) = file.kept().expect("a content");
            let mut bytes = Vec::new();
            let copied = image.copy_range(stream, place.offset(), count, &mut bytes);
            copied.unwrap();
            String::from_utf8(bytes).unwrap()
        });
        assert_eq!(
            read.collect::<Vec<_>>(),
            ["aaa", "b", "cc", "dddd", "", "axb"]
        );
        assert_eq!(image.len_of("own"), Some(13));
    }

    #[test]
    fn large_holes_are_left_out_and_small_ones_kept() {
        let file = tempfile::tempfile().unwrap();
        let write = |at| std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], at).unwrap();
        let parts = |size| parts_to_keep(&file, size).unwrap();
        file.set_len(4 << 30).unwrap();
        assert_eq!(parts(4 << 30), Some(vec![]));
        assert_eq!(parts((4 << 30) + 1), None, "it has become shorter");
        assert_eq!(parts(7), Some(vec![0..7]));
        for at in [8192, 1 << 19, 3 << 30, (4 << 30) - 8192] {
            write(at);
        }
        let expected = [
            0..(1 << 19) + 4096,
            3 << 30..(3 << 30) + 4096,
            (4 << 30) - 8192..4 << 30,
        ];
        assert_eq!(parts(4 << 30).unwrap(), expected);
    }
}
