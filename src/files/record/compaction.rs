//! Compaction of a record, because the log grows with every change. A watcher may append to the log at any moment.
//!
//! The lines up to some offset of the log are summarized in a separate file, the base, which contains that offset.
//! Later, the log is read from the offset on, and the blocks before it are freed.
//!
//! ```text
//! new base written │ renamed to the base │ hole in the log
//! ```
//! A crash at any step leaves an equivalent record.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use nix::libc::O_NOFOLLOW;
use rustix::fs::{FallocateFlags, fallocate};

use super::super::record_line::{JobChange, Line};
use super::Record;

/// Smallest number of lines for which a log is compacted.
const LINES_MIN: usize = 10_000;
/// Ratio of lines in the log to lines in the compacted form from which on the log is compacted.
const LINES_FOR_ONE: usize = 3;

impl Record {
    /// Compacts the record if the log is much longer than the compacted form.
    ///
    /// # Errors
    /// The base cannot be written; the record is unchanged.
    pub fn compact_if_due(&mut self) -> io::Result<()> {
        let files = self.touched.len() + self.changed_files.len();
        let short = files + self.others.len() + self.names.len();
        if self.lines < LINES_MIN.max(LINES_FOR_ONE * short) {
            return Ok(());
        }
        self.write_base()?;
        self.publish_base()?;
        self.lines = 0;
        // A file system without holes keeps the blocks. They are not read any more.
        let _ = self.punch();
        Ok(())
    }

    /// Returns the path of the base.
    pub(super) fn base(&self) -> PathBuf {
        self.path.with_extension("base")
    }

    fn new_base(&self) -> PathBuf {
        self.path.with_extension("base-new")
    }

    fn write_base(&self) -> io::Result<()> {
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let file = options.custom_flags(O_NOFOLLOW).open(self.new_base())?;
        let mut sink = BufWriter::new(file);
        for line in self.short_lines() {
            serde_json::to_writer(&mut sink, &line)?;
            sink.write_all(b"\n")?;
        }
        sink.into_inner()?.sync_all()
    }

    fn publish_base(&self) -> io::Result<()> {
        fs::rename(self.new_base(), self.base())?;
        let folder = self.path.parent().ok_or(io::ErrorKind::InvalidInput)?;
        File::open(folder)?.sync_all()
    }

    fn punch(&self) -> io::Result<()> {
        let log = File::options().write(true).open(&self.path)?;
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&log, how, 0, self.read)?)
    }

    /// Returns the lines of the compacted form. Times are counts of images.
    fn short_lines(&self) -> Vec<Line> {
        let mut images: Vec<_> = self.images.iter().map(|(id, time)| (*time, *id)).collect();
        images.sort_unstable();
        let count_at = |time: usize| images.partition_point(|(image, _)| *image <= time);
        let mut parts = vec![Vec::new(); images.len() + 1];
        for (folder, names) in &self.names {
            let names: Vec<OsString> = names.iter().cloned().collect();
            let folder = folder.clone();
            parts[0].push(Line::Names { folder, names });
        }
        // Before the changes by the job: a name that the job has changed first is not created by others.
        for (times, created) in [(&self.created_by_others, true), (&self.others, false)] {
            for (path, time) in times {
                let path = path.clone();
                parts[count_at(*time)].push(Line::Other { path, created });
            }
        }
        for (path, touch) in &self.touched {
            let (first, last) = (count_at(touch.first), count_at(touch.last));
            let line = Line::Touched {
                path: path.clone(),
                is_jobs_own: touch.is_jobs_own,
            };
            if last > first {
                parts[last].push(line.clone());
            }
            parts[first].push(line);
            if let Some(changed) = touch.changed {
                let (path, change) = (path.clone(), JobChange::Changed);
                parts[count_at(changed)].push(Line::Job { path, change });
            }
        }
        for (id, time) in &self.changed_files {
            parts[count_at(*time)].push(Line::File { id: *id });
        }
        for (time, reason) in &self.gaps {
            let part = &mut parts[count_at(*time)];
            // One gap is as significant as several.
            if !part.iter().any(|line| matches!(line, Line::Gap { .. })) {
                let reason = reason.clone();
                part.push(Line::Gap { reason });
            }
        }
        for (time, (from_ns, until_ns), is_jobs) in &self.cuts {
            parts[count_at(*time)].push(Line::Cut {
                from_ns: *from_ns,
                until_ns: *until_ns,
                is_jobs: *is_jobs,
            });
        }
        let mut lines = vec![Line::Base { read: self.read }];
        let mut ids = images.into_iter().map(|(_, id)| id);
        for part in parts {
            lines.extend(part);
            let mark = self.mark;
            lines.extend(ids.next().map(|id| Line::Image { id, mark }));
        }
        lines.push(Line::Begin {
            boot: self.boot.clone(),
        });
        let mounts = |wanted: bool| {
            let mounts = self.mounts.iter();
            let mounts = mounts.filter(move |(_, is_watched)| **is_watched == wanted);
            mounts.map(|(path, _)| path.clone()).collect()
        };
        lines.push(Line::Mounts {
            watched: mounts(true),
            unwatched: mounts(false),
        });
        if !self.watching {
            lines.push(Line::End);
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::super::describe::FileId;
    use super::super::super::record_line::append;
    use super::super::Touch;
    use super::*;

    fn job(path: &str, change: JobChange) -> Line {
        let path = path.into();
        Line::Job { path, change }
    }

    fn other(path: &str, created: bool) -> Line {
        let path = path.into();
        Line::Other { path, created }
    }

    fn lines() -> Vec<Line> {
        let gap = |reason: &str| Line::Gap {
            reason: reason.to_owned(),
        };
        vec![
            Line::Begin {
                boot: "boot".to_owned(),
            },
            Line::Mounts {
                watched: vec!["/".into()],
                unwatched: vec!["/nfs".into()],
            },
            Line::Names {
                folder: "/w".into(),
                names: vec!["old".into()],
            },
            gap("first"),
            gap("second"),
            job("/w/a", JobChange::Created),
            job("/w/old", JobChange::MovedTo),
            other("/w/theirs", true),
            Line::image(1),
            job("/w/b", JobChange::Created),
            Line::Cut {
                from_ns: 1,
                until_ns: 9,
                is_jobs: true,
            },
            Line::image(2),
            // A failed image, and the next attempt at it.
            Line::image(3),
            job("/w/a", JobChange::Changed),
            Line::File {
                id: FileId::new((1, 2), 3),
            },
            other("/w/theirs", false),
            Line::image(3),
            job("/w/c", JobChange::MovedTo),
        ]
    }

    /// Returns the record's answers for each image.
    fn answers(record: &Record) -> Vec<impl PartialEq + std::fmt::Debug> {
        let paths = ["/w/a", "/w/b", "/w/c", "/w/d", "/w/old", "/w/theirs"].map(Path::new);
        let of = |id| {
            let since = record.since(id);
            let known = |(path, touch): (&Path, Touch)| {
                let path = path.to_owned();
                let facts = [
                    since.is_first(&touch),
                    since.was_not_jobs(&touch),
                    since.has_changed(&touch),
                ];
                (path, facts)
            };
            let touched: Vec<_> = since.touched().map(known).collect();
            let by = paths.map(|it| {
                (
                    since.by_job(it),
                    since.by_others(it),
                    since.is_of_others(it),
                )
            });
            let nfs = since.unwatched_mount(Path::new("/nfs/a")).is_some();
            let files: Vec<_> = since.changed_files().collect();
            (since.gap(), touched, by, since.may_miss(5), nfs, files)
        };
        let all = [1, 2, 3, 4, 5].map(of).into_iter();
        all.map(|it| (it, record.watching, record.boot.clone()))
            .collect()
    }

    #[test]
    fn a_record_has_the_same_answers_after_a_crash_at_any_step() {
        let later = [
            other("/w/d", true),
            job("/w/old", JobChange::Gone),
            Line::image(4),
            job("/w/b", JobChange::Gone),
            Line::End,
        ];
        let steps: [fn(&Record) -> io::Result<()>; 3] =
            [Record::write_base, Record::publish_base, Record::punch];
        for done in 0..=steps.len() {
            let place = tempfile::tempdir_in("/var/tmp").unwrap();
            let [path, plain] = ["files.log", "plain.log"].map(|name| place.path().join(name));
            for path in [&path, &plain] {
                append(path, &lines()).unwrap();
            }
            let mut record = Record::open(&path).unwrap();
            for step in &steps[..done] {
                step(&record).unwrap();
            }
            let mut expected = Record::open(&plain).unwrap();
            assert_eq!(
                answers(&Record::open(&path).unwrap()),
                answers(&expected),
                "{done}"
            );
            for path in [&path, &plain] {
                append(path, &later).unwrap();
            }
            expected.catch_up().unwrap();
            record.catch_up().unwrap();
            assert_eq!(answers(&record), answers(&expected), "{done}");
            let again = Record::open(&path).unwrap();
            assert_eq!(answers(&again), answers(&expected), "{done}");
            record.clear().unwrap();
            assert!(Record::open(&path).unwrap().touched.is_empty(), "{done}");
        }
    }

    #[test]
    fn a_long_log_of_few_files_is_compacted_and_a_lost_log_is_a_gap() {
        let place = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = place.path().join("files.log");
        let many = vec![job("/w/a", JobChange::Changed); LINES_MIN];
        let image = |mark| Line::Image { id: 1, mark };
        append(&path, &[&[image(5)], &many[1..]].concat()).unwrap();
        let mut record = Record::open(&path).unwrap();
        assert_eq!(record.lines, LINES_MIN);
        record.compact_if_due().unwrap();
        let mut again = Record::open(&path).unwrap();
        assert_eq!((again.lines, again.since(1).gap()), (0, None));
        // A mark of before the compaction that comes too late.
        again.add(image(4));
        assert!(again.since(1).by_job(Path::new("/w/a")));
        fs::remove_file(&path).unwrap();
        append(&path, &[job("/w/b", JobChange::Changed)]).unwrap();
        let cut = Record::open(&path).unwrap();
        assert!(cut.since(1).gap().is_some() && cut.touch_of(Path::new("/w/b")).is_some());
    }
}
