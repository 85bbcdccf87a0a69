//! Rollback of an output to the mark of an image, and its reversal if the restore fails.
//!
//! ```text
//! make_whole: the bytes before the mark exist, or are copied back from aside/, or the image is refused
//! rewind:     the bytes after the mark are moved to aside/
//! keep:       the job runs           undo: the restore failed; the moved bytes are copied back after the last delivery
//! ```

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{FilePosition, Output, OutputMark, Shared, write_out};
use crate::job::file_sample::{sample, sample_by};
use crate::job::output::output_replay::Replay;
use crate::job::rewind::error::{RewindError, system};
use crate::job::rewind::{OtherBytes, discard, keep_end};

/// Bytes copied back in one step.
const COPY_BYTES: usize = 64 << 10;
/// Limit on the saved parts of one file that are searched. The number of folders in `aside/` is limited, too.
const PARTS_MAX: usize = 100;

/// The supervisor that recorded a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// This supervisor, whose later deliveries are known.
    Ours,
    /// An earlier supervisor. Bytes after the mark may belong to another program.
    Earlier,
}

/// The state of an output before a rewind.
#[derive(Debug)]
pub(super) struct Before {
    replay: Replay,
    cut: Option<Part>,
}

/// Bytes that were cut off a file and saved in a separate file.
#[derive(Clone, Debug)]
struct Part {
    kept: PathBuf,
    from: u64,
    len: u64,
}

impl Output {
    /// Ensures that the file contains the bytes before `mark`. They may be missing because a restore was killed, or
    /// differ because another attempt ran since. Then they are copied from the folders beside `aside`. Call it before
    /// any other rollback. `aside` and `name`: as for [`Output::rewind`].
    ///
    /// # Errors
    /// The bytes do not exist any more, and `other_bytes` does not accept that.
    pub fn make_whole(
        &self,
        mark: &OutputMark,
        relation: Relation,
        (aside, name): (&Path, &str),
        other_bytes: OtherBytes,
    ) -> Result<(), RewindError> {
        let Some(there) = mark.file.filter(|_| self.shared.cuttable) else {
            return Ok(());
        };
        let _state = self.shared.lock();
        let (handle, path) = self.shared.sink_path();
        let about = self.shared.sink.metadata();
        let about = about.map_err(system("inspect", &path))?;
        if about.ino() != there.inode {
            return Ok(());
        }
        let (now, then) = (about.size(), there.offset);
        let sampled = || File::open(&handle).and_then(|file| sample(&file, then));
        let is_same = |known| sampled().ok() == Some(known);
        if now >= then && there.sample.is_none_or(is_same) {
            return Ok(());
        }
        if let Some((from, parts)) = find_end(&handle, aside.parent(), there, now) {
            if from < now {
                let mut source = File::open(&handle).map_err(system("open", &path))?;
                keep_end(
                    &path,
                    &mut source,
                    from,
                    &aside.join(part_name(name, there.inode, from)),
                )?;
                let cut = self.shared.sink.set_len(from);
                cut.map_err(system("cut", &path))?;
            }
            let done = self.shared.append(&parts, from..then);
            done.map_err(system("put back the end of", &path))?;
            let bytes = then - from;
            tracing::info!(path = %path.display(), bytes, "restored output that an earlier restore had cut off");
            return Ok(());
        }
        if now == 0 && relation == Relation::Earlier {
            let path = path.display();
            tracing::warn!(%path, "the file of the job's output was truncated after the snapshot (the shell's `>` does that, `>>` does not); output continues at its start");
            return Ok(());
        }
        other_bytes.judge(if now < then {
            RewindError::ShortOutput { path, then, now }
        } else {
            RewindError::OtherBytes { path, bytes: then }
        })
    }

    /// Sets the stream back to `mark`. The function truncates ckpt-run's own file. If that is impossible, for example
    /// because other programs have written to the file, it prepares to suppress the repetition. Bytes that are cut off
    /// are saved in a file in `aside`, whose name begins with `name`. Call it after the wait of [`Output::drain`] and
    /// after [`Output::make_whole`]. [`Output::keep`] or the next [`Output::drain`] ends the rewind.
    ///
    /// # Errors
    /// The file cannot be truncated.
    pub fn rewind(
        &self,
        mark: &OutputMark,
        relation: Relation,
        aside: &Path,
        name: &str,
    ) -> Result<(), RewindError> {
        let mut state = self.shared.lock();
        let replay = state.replay.clone();
        let before = state.before.insert(Before { replay, cut: None });
        if let Some(there) = mark.file.filter(|_| self.shared.cuttable) {
            let mut sink = &self.shared.sink;
            let (handle, path) = self.shared.sink_path();
            let metadata = sink.metadata().map_err(system("inspect", &path))?;
            let beyond = metadata.size().checked_sub(there.offset);
            let ours = relation == Relation::Earlier
                || beyond == before.replay.delivered_since(mark.position);
            if let Some(beyond) = beyond.filter(|_| metadata.ino() == there.inode && ours) {
                if beyond > 0 {
                    let kept = aside.join(part_name(name, there.inode, there.offset));
                    // The sink may be open for writing only.
                    let mut source = File::open(&handle).map_err(system("open", &path))?;
                    let len = keep_end(&path, &mut source, there.offset, &kept)?;
                    if relation == Relation::Earlier {
                        let kept = kept.display();
                        tracing::info!(bytes = len, %kept, "removed the job's output after the snapshot from its file");
                    }
                    let from = there.offset;
                    before.cut = Some(Part { kept, from, len });
                }
                let cut = sink.set_len(there.offset);
                cut.and_then(|()| sink.seek(SeekFrom::Start(there.offset)))
                    .map_err(system("cut", &path))?;
                state.replay.forget(mark.position);
                return Ok(());
            }
        }
        // Deliveries of an earlier supervisor are unknown. Output that this one delivered since it restored the same
        // image is known and is not delivered twice.
        state.replay.rewind(mark.position);
        Ok(())
    }

    /// Ends a rewind: the restored job is running, or may have run.
    pub fn keep(&self) {
        self.shared.lock().before = None;
    }
}

impl Shared {
    /// Reverts a rewind that was not kept. No thread is delivering any more.
    pub(super) fn undo_rewind(&self) {
        let mut state = self.lock();
        let Some(before) = state.before.take() else {
            return;
        };
        if let Some(cut) = &before.cut
            && let Err(error) = self.put_back(cut)
        {
            let kept = cut.kept.display();
            tracing::warn!(%kept, "cannot write back the end of the job's output: {error}");
            return;
        }
        state.replay = before.replay;
    }

    fn put_back(&self, cut: &Part) -> io::Result<()> {
        if self.sink.metadata()?.size() != cut.from {
            return Err(io::Error::other(
                "another program has written to the file since",
            ));
        }
        let end = cut.from + cut.len;
        self.append(std::slice::from_ref(cut), cut.from..end)?;
        discard(&cut.kept)
    }

    /// Appends a range of bytes from these parts to the file, which ends where the range begins.
    fn append(&self, parts: &[Part], range: std::ops::Range<u64>) -> io::Result<()> {
        let mut sink = &self.sink;
        sink.seek(SeekFrom::End(0))?;
        let mut at = range.start;
        for part in parts {
            let mut source = File::open(&part.kept)?;
            source.seek(SeekFrom::Start(at.saturating_sub(part.from)))?;
            let end = range.end.min(part.from + part.len);
            let mut source = source.take(end.saturating_sub(at));
            let mut buffer = vec![0; COPY_BYTES];
            loop {
                let got = source.read(&mut buffer)?;
                if got == 0 {
                    break;
                }
                write_out(sink, &buffer[..got])?;
                at += got as u64;
            }
        }
        if at != range.end {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // A pipe or device needs no sync, and cannot be truncated either.
        sink.sync_all()
    }

    /// Returns a path for opening the sink again, and its name for messages.
    pub(super) fn sink_path(&self) -> (PathBuf, PathBuf) {
        let handle = PathBuf::from(format!("/proc/self/fd/{}", self.sink.as_raw_fd()));
        let path = fs::read_link(&handle).unwrap_or_else(|_| handle.clone());
        (handle, path)
    }
}

fn part_name(name: &str, inode: u64, from: u64) -> String {
    format!("{name}-{inode}-{from}")
}

/// Searches for a valid prefix of the bytes before the mark: returns its length and the saved parts that follow it. The
/// combination has the hash of the mark. A mark of an older version has no hash, and nothing is found.
fn find_end(
    handle: &Path,
    aside: Option<&Path>,
    there: FilePosition,
    now: u64,
) -> Option<(u64, Vec<Part>)> {
    let (known, end) = (there.sample?, there.offset);
    let file = File::open(handle).ok()?;
    let parts = parts_of(aside?, there.inode);
    let short = (now < end).then_some((now, None));
    let cut = parts.iter().map(|part| (part.from, Some(part)));
    let mut starts = short.into_iter().chain(cut);
    starts.find_map(|(from, first)| {
        let chain = chain(&parts, from, first, end).filter(|_| from <= now)?;
        let found = sample_by(end, |bytes, at| read_chain(&file, from, &chain, bytes, at));
        (found.ok()? == known).then_some((from, chain))
    })
}

/// Returns parts that together hold the bytes from `from` to `end`: the first one, then the newest suitable one each
/// time.
fn chain(parts: &[Part], from: u64, first: Option<&Part>, end: u64) -> Option<Vec<Part>> {
    let mut chain = Vec::from_iter(first.cloned());
    let mut at = first.map_or(from, |part| part.from + part.len);
    while at < end {
        let fits = |part: &&Part| part.from <= at && at < part.from + part.len;
        let next = parts.iter().find(fits)?;
        at = next.from + next.len;
        chain.push(next.clone());
    }
    Some(chain)
}

/// Fills a buffer with bytes at an offset: from the file before `from`, and from the parts after it.
fn read_chain(
    file: &File,
    from: u64,
    chain: &[Part],
    mut bytes: &mut [u8],
    mut at: u64,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let part = chain.iter().find(|part| at < part.from + part.len);
        let (end, opened) = match part.filter(|_| at >= from) {
            Some(part) => (part.from + part.len, Some((File::open(&part.kept)?, part))),
            None if at < from => (from, None),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        let most = usize::try_from(end - at).unwrap_or(usize::MAX);
        let (now, rest) = bytes.split_at_mut(most.min(bytes.len()));
        match opened {
            Some((source, part)) => source.read_exact_at(now, at - part.from)?,
            None => file.read_exact_at(now, at)?,
        }
        at += now.len() as u64;
        bytes = rest;
    }
    Ok(())
}

/// Lists the saved parts of outputs with this inode, newest first.
fn parts_of(aside: &Path, inode: u64) -> Vec<Part> {
    let folders = fs::read_dir(aside).into_iter().flatten().flatten();
    let mut folders: Vec<(u64, PathBuf)> = folders
        .filter_map(|folder| {
            let name = folder.file_name();
            let (_, time) = name.to_str()?.split_once('-')?;
            Some((time.parse().ok()?, folder.path()))
        })
        .collect();
    folders.sort_by(|left, right| right.cmp(left));
    let files = folders
        .into_iter()
        .flat_map(|(_, folder)| fs::read_dir(folder).into_iter().flatten().flatten());
    let parts = files.filter_map(|file| {
        let name = file.file_name();
        let mut words = name.to_str()?.rsplitn(3, '-');
        let (from, of, output) = (words.next()?, words.next()?, words.next()?);
        let is_it = of.parse() == Ok(inode) && ["stdout", "stderr"].contains(&output);
        let metadata = file
            .metadata()
            .ok()
            .filter(|found| is_it && found.is_file())?;
        Some(Part {
            kept: file.path(),
            from: from.parse().ok()?,
            len: metadata.size(),
        })
    });
    parts.take(PARTS_MAX).collect()
}
