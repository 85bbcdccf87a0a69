//! The mounts that a process sees, read from `/proc/PID/mountinfo` as bytes: their names need not be UTF-8.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Its number.
    pub id: u64,
    /// Number of the mount that it is on.
    pub below: u64,
    /// Major and minor number of the file system.
    pub device: String,
    /// The folder or file of the file system that is mounted.
    pub root: PathBuf,
    /// The path, from the root folder of the process.
    pub point: PathBuf,
    /// Type of the file system.
    pub kind: String,
    /// Options of the mount.
    options: String,
    /// Options of the file system.
    filesystem_options: String,
}

impl Mount {
    /// Lists the mounts that a process sees, `self` or a host pid.
    ///
    /// # Errors
    /// The process has exited.
    pub fn all_of(process: impl std::fmt::Display) -> io::Result<Vec<Self>> {
        let list = fs::read(format!("/proc/{process}/mountinfo"))?;
        let lines = list.split(|byte| *byte == b'\n');
        Ok(lines.filter_map(Self::parse).collect())
    }

    /// Returns true if the mount has this option.
    pub fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|one| one == option)
    }

    /// Returns true if the file system has this option.
    pub fn is_of_file_system(&self, option: &str) -> bool {
        let mut options = self.filesystem_options.split(',');
        options.any(|one| one == option)
    }

    /// Returns true if nothing can be written through the mount.
    pub fn is_read_only(&self) -> bool {
        self.has("ro") || self.is_of_file_system("ro")
    }

    /// Reads a line: number, number below, device, root, point, options, further fields up to "-", type, source, options
    /// of the file system.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
        Some(Self {
            id: text(fields.next()?).parse().ok()?,
            below: text(fields.next()?).parse().ok()?,
            device: text(fields.next()?),
            root: unescaped(fields.next()?),
            point: unescaped(fields.next()?),
            options: text(fields.next()?),
            kind: text(fields.by_ref().skip_while(|field| *field != b"-").nth(1)?),
            filesystem_options: text(fields.nth(1)?),
        })
    }
}

/// Replaces the kernel's escapes: it writes blanks and backslashes of a path as octal numbers (`\040` is a space).
fn unescaped(mut field: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    while let Some((first, after)) = field.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            plain.push(byte);
            field = &after[3..];
        } else {
            plain.push(*first);
            field = after;
        }
    }
    OsString::from_vec(plain).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernels_is_read_with_its_blanks() {
        let line = b"36 35 98:0 /a\\040b /m\\040t\\134\xe9\\x rw,noatime master:1 shared:2 - ext3 /dev/root ro,errors=x";
        let mount = Mount::parse(line).unwrap();
        assert_eq!((mount.id, mount.below), (36, 35));
        let point = OsString::from_vec(b"/m t\\\xe9\\x".to_vec());
        assert_eq!((mount.root, mount.point), ("/a b".into(), point.into()));
        assert_eq!((&*mount.device, &*mount.kind), ("98:0", "ext3"));
        let mount = Mount::parse(line).unwrap();
        assert!(mount.has("noatime") && !mount.has("ro") && mount.is_read_only());
        let without = b"1 0 0:2 / / rw - tmpfs none rw";
        assert!(Mount::parse(without).is_some_and(|mount| !mount.is_read_only()));
        for wrong in [
            &b""[..],
            b"36",
            b"36 x 98:0 / / rw - ext3 none rw",
            b"36 35 98:0 / / rw ext3",
        ] {
            assert_eq!(Mount::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn own_mounts_are_listed() {
        let mounts = Mount::all_of("self").unwrap();
        let at = |point: &str| mounts.iter().find(|mount| mount.point == *point);
        assert!(at("/").is_some());
        assert_eq!(at("/proc").unwrap().kind, "proc");
    }
}
