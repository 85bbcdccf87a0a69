//! Checks of numbers and paths in an image's metadata, applied while the metadata is parsed.
//!
//! An image may come from an untrusted place. A value that no snapshot records is refused before it is used. Fields
//! refer to these functions by `#[serde(deserialize_with = "checked::pid")]`, so no reader can skip a check.

use std::fmt::Display;
use std::path::{Component, Path, PathBuf};

use serde::de::{Deserialize, Deserializer, Error};

use crate::path_text;

/// Largest pid on Linux (`PID_MAX_LIMIT`).
const PID_MAX: i32 = 1 << 22;
/// Pid of the first process of the sandbox or the machine; no process of a job has it.
const PID_OF_INIT: i32 = 1;
/// Largest value of the permission bits.
const MODE_MAX: u32 = 0o7777;
/// User or group id that system calls treat as "unchanged".
const NO_OWNER: u32 = u32::MAX;
/// Longest path on Linux (`PATH_MAX`), in bytes.
const PATH_BYTES_MAX: usize = 4096;
/// Upper limit on durations, above the duration of any job.
const SECONDS_MAX: f64 = 1e10;

/// Parses the pid of a process or thread of the job, in the job's namespace.
pub(crate) fn pid<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
    let pid = i32::deserialize(from)?;
    refuse_unless(is_pid(pid), pid, "a process id of a job")
}

/// Parses a list of pids like [`pid`].
pub(crate) fn pids<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<i32>, D::Error> {
    let pids = Vec::<i32>::deserialize(from)?;
    match pids.iter().find(|pid| !is_pid(**pid)) {
        Some(wrong) => refuse_unless(false, *wrong, "a process id of a job").map(|_| pids),
        None => Ok(pids),
    }
}

/// Parses a file descriptor number.
pub(crate) fn descriptor<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
    let number = i32::deserialize(from)?;
    refuse_unless(number >= 0, number, "a descriptor")
}

/// Parses an absolute path without `..`.
pub(crate) fn path<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    let path: PathBuf = path_text::deserialize(from)?;
    if is_path(&path) {
        Ok(path)
    } else {
        Err(no_path(&path))
    }
}

/// Parses a list of paths like [`path`].
pub(crate) fn paths<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PathBuf>, D::Error> {
    let paths: Vec<PathBuf> = path_text::list::deserialize(from)?;
    match paths.iter().find(|path| !is_path(path)) {
        Some(wrong) => Err(no_path(wrong)),
        None => Ok(paths),
    }
}

/// Parses permission bits.
pub(crate) fn mode<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let mode = u32::deserialize(from)?;
    refuse_unless(mode <= MODE_MAX, mode, "a mode")
}

/// Parses owner and group.
pub(crate) fn owner<'de, D: Deserializer<'de>>(from: D) -> Result<(u32, u32), D::Error> {
    let (user, group) = <(u32, u32)>::deserialize(from)?;
    refuse_unless(user != NO_OWNER, user, "a user")?;
    refuse_unless(group != NO_OWNER, group, "a group")?;
    Ok((user, group))
}

/// Parses a file size or offset, which must fit the kernel's signed type.
pub(crate) fn size<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let size = u64::deserialize(from)?;
    refuse_unless(i64::try_from(size).is_ok(), size, "a file's size")
}

/// Parses ranges of a file, from and to, which must be in order.
pub(crate) fn ranges<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(u64, u64)>, D::Error> {
    let ranges = Vec::<(u64, u64)>::deserialize(from)?;
    let mut end = 0;
    for (from, to) in &ranges {
        let is_right = end <= *from && from < to && i64::try_from(*to).is_ok();
        refuse_unless(is_right, from, "the beginning of a range of a file")?;
        end = *to;
    }
    Ok(ranges)
}

/// Parses a time in nanoseconds since 1970.
pub(crate) fn time_ns<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    let time = i64::deserialize(from)?;
    refuse_unless(time >= 0, time, "a time")
}

/// Parses a duration in seconds.
pub(crate) fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let seconds = f64::deserialize(from)?;
    refuse_unless(
        (0.0..=SECONDS_MAX).contains(&seconds),
        seconds,
        "a duration",
    )
}

/// Returns true if a path is absolute, has no `..` and is within the kernel's limits.
pub(crate) fn is_path(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    let goes_up = |part: Component<'_>| part == Component::ParentDir;
    path.is_absolute()
        && bytes.len() < PATH_BYTES_MAX
        && !bytes.contains(&0)
        && !path.components().any(goes_up)
}

fn no_path<E: Error>(path: &Path) -> E {
    let shown = path.to_string_lossy();
    E::custom(format!("{shown:?} is not an absolute path without `..`"))
}

fn is_pid(pid: i32) -> bool {
    pid > PID_OF_INIT && pid <= PID_MAX
}

fn refuse_unless<T: Display, E: Error>(is_right: bool, value: T, what: &str) -> Result<T, E> {
    if is_right {
        Ok(value)
    } else {
        Err(E::custom(format!("{value} is not {what}")))
    }
}

#[cfg(test)]
mod tests {
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error, F64Deserializer, I32Deserializer, StrDeserializer};

    use super::*;

    #[test]
    fn pids_that_kill_takes_for_something_else_are_refused() {
        let read = |number: i32| {
            let from: I32Deserializer<Error> = number.into_deserializer();
            pid(from).is_ok()
        };
        for (number, expected) in [
            (-1, false),
            (0, false),
            (1, false),
            (2, true),
            (300, true),
            (1 << 22, true),
            (i32::MAX, false),
            (i32::MIN, false),
        ] {
            assert_eq!(read(number), expected, "{number}");
        }
    }

    #[test]
    fn paths_are_absolute_and_lead_down() {
        let read = |text: &str| {
            let from: StrDeserializer<'_, Error> = text.into_deserializer();
            path(from).is_ok()
        };
        for (text, expected) in [
            ("/", true),
            ("/srv/job/..log", true),
            ("/srv/../etc/shadow", false),
            ("etc/shadow", false),
            ("", false),
            ("/a\0b", false),
        ] {
            assert_eq!(read(text), expected, "{text:?}");
        }
        assert!(!read(&format!("/{}", "a".repeat(4096))));
    }

    #[test]
    fn ranges_are_in_order_and_not_empty() {
        let read = |text: &str| ranges(&mut serde_json::Deserializer::from_str(text)).is_ok();
        assert!(read("[]") && read("[[0,1],[1,5],[7,9223372036854775807]]"));
        for wrong in [
            "[[1,1]]",
            "[[5,1]]",
            "[[0,5],[4,6]]",
            "[[0,9223372036854775808]]",
        ] {
            assert!(!read(wrong), "{wrong}");
        }
    }

    #[test]
    fn durations_are_finite_and_not_negative() {
        let read = |number: f64| {
            let from: F64Deserializer<Error> = number.into_deserializer();
            seconds(from).is_ok()
        };
        assert!(read(0.0) && read(3600.5));
        assert!(!read(-0.1) && !read(1e300) && !read(f64::NAN) && !read(f64::INFINITY));
    }
}
