//! Extended attributes of files: ACLs, capabilities, and user attributes. Symbolic links are not followed.

use std::fs::File;
use std::io;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error};

use rustix::fs::{XattrFlags, getxattr, lgetxattr, listxattr, llistxattr, removexattr, setxattr};

use crate::safe_path::link_to;

/// Prefixes of the names of attributes that belong to a file's content, not to the machine.
const KEPT: [&str; 3] = ["user.", "system.posix_acl_", "security.capability"];
/// Largest size of the list and of a value (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX`).
const BYTES_MAX: usize = 64 << 10;

/// Returns the attributes of a file; empty if the file system does not support them.
pub(super) fn of(path: &Path) -> Vec<(String, Vec<u8>)> {
    read(
        |list| llistxattr(path, list),
        |name, value| lgetxattr(path, name, value),
    )
}

fn read(
    list_into: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
    value_into: impl Fn(&str, &mut [u8]) -> rustix::io::Result<usize>,
) -> Vec<(String, Vec<u8>)> {
    // Few files have more than an ACL.
    let mut few = [0; 256];
    let (mut many, list) = (Vec::new(), &mut few[..]);
    let list: &[u8] = match list_into(list) {
        Ok(len) => &list[..len],
        Err(rustix::io::Errno::RANGE) => {
            many.resize(BYTES_MAX, 0);
            let len = list_into(&mut many).unwrap_or(0);
            &many[..len]
        }
        Err(_) => &[],
    };
    if list.is_empty() {
        return Vec::new();
    }
    let names = list.split(|byte| *byte == 0);
    let names = names.filter_map(|name| std::str::from_utf8(name).ok());
    let kept = names.filter(|name| is_kept(name));
    let mut value = vec![0; BYTES_MAX];
    kept.filter_map(|name| {
        let len = value_into(name, &mut value).ok()?;
        Some((name.to_owned(), value[..len].to_vec()))
    })
    .collect()
}

fn is_kept(name: &str) -> bool {
    KEPT.iter().any(|prefix| name.starts_with(prefix))
}

/// Reads attributes from an image. Refuses attributes that [`of`] does not return.
pub(super) fn checked<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Vec<(String, Vec<u8>)>, D::Error> {
    let attributes = Vec::<(String, Vec<u8>)>::deserialize(from)?;
    let wrong = attributes
        .iter()
        .find(|(name, value)| !is_kept(name) || value.len() > BYTES_MAX);
    match wrong {
        Some((name, _)) => Err(D::Error::custom(format!(
            "{name:?} is not an attribute of a job's file"
        ))),
        None => Ok(attributes),
    }
}

/// Sets the attributes of what is open, also by `O_PATH`, and removes all others.
pub(super) fn set(opened: &File, wanted: &[(String, Vec<u8>)]) -> io::Result<()> {
    let path = &link_to(opened);
    let there = read(
        |list| listxattr(path, list),
        |name, value| getxattr(path, name, value),
    );
    for (name, _) in &there {
        if !wanted.iter().any(|(kept, _)| kept == name) {
            removexattr(path, name.as_str())?;
        }
    }
    for one in wanted.iter().filter(|one| !there.contains(one)) {
        setxattr(path, one.0.as_str(), &one.1, XattrFlags::empty())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_restored() {
        let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        let path = file.path();
        assert_eq!(of(path), []);
        let first = vec![("user.a".to_owned(), b"1".to_vec())];
        if set(file.as_file(), &first).is_err() {
            println!("SKIPPED: the file system of /var/tmp has no extended attributes");
            return;
        }
        let second = vec![("user.b".to_owned(), b"2".to_vec())];
        for wanted in [&first, &second] {
            set(file.as_file(), wanted).unwrap();
            assert_eq!(&of(path), wanted);
        }
    }
}
