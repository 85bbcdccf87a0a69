//! A line of `/proc/PID/maps`.

/// Suffix of the name of a file whose name was removed.
const DELETED: &[u8] = b" (deleted)";

/// A mapping of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    pub start: u64,
    pub end: u64,
    /// True if writes through it reach the file and other processes.
    pub is_shared: bool,
    /// Offset in the file.
    pub offset: u64,
    pub identity: Identity,
    pub name: &'a [u8],
}

/// Identifies a file that is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub device: (u32, u32),
    pub inode: u64,
    /// True for a System V segment, whose inode numbers are separate.
    pub is_system_v: bool,
}

/// Kind of a mapped object, as far as its name shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory without a file, shared or not, and what the kernel provides.
    Memory,
    /// A file whose name exists.
    Named,
    /// A file whose name was removed.
    Nameless,
    /// The buffer of asynchronous I/O, which CRIU recreates.
    Aio,
    /// An object of another kind, such as the buffer of a device without a file.
    Other,
}

impl<'a> Mapping<'a> {
    /// Reads a line: `START-END PERMISSIONS OFFSET MAJOR:MINOR INODE   NAME`.
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let (addresses, rest) = word(line)?;
        let (permissions, rest) = word(rest)?;
        let (offset, rest) = word(rest)?;
        let (device, rest) = word(rest)?;
        let (inode, rest) = word(rest).unwrap_or((rest, &[]));
        let spaces = rest.iter().take_while(|byte| **byte == b' ').count();
        let name = &rest[spaces..];
        let (start, end) = range(addresses)?;
        let colon = device.iter().position(|byte| *byte == b':')?;
        let part = |digits| u32::try_from(number(digits, 16)?).ok();
        Some(Self {
            start,
            end,
            is_shared: permissions.get(3) == Some(&b's'),
            offset: number(offset, 16)?,
            identity: Identity {
                device: (part(&device[..colon])?, part(&device[colon + 1..])?),
                inode: number(inode, 10)?,
                is_system_v: name.starts_with(b"/SYSV"),
            },
            name,
        })
    }

    pub fn kind(&self) -> Kind {
        match self.name {
            // Users make no files of such names there.
            [] | [b'[', ..] | b"/dev/zero (deleted)" | b"/anon_hugepage (deleted)" => Kind::Memory,
            b"/[aio] (deleted)" => Kind::Aio,
            [b'/', ..] if self.identity.is_system_v => Kind::Memory,
            [b'/', ..] if self.name.ends_with(DELETED) => Kind::Nameless,
            [b'/', ..] => Kind::Named,
            _ => Kind::Other,
        }
    }

    /// Returns the name that the file had, without the mark.
    pub fn former_name(&self) -> &'a [u8] {
        self.name.strip_suffix(DELETED).unwrap_or(self.name)
    }
}

/// Splits a word off a line.
fn word(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = line.iter().position(|byte| *byte == b' ')?;
    Some((&line[..end], &line[end + 1..]))
}

/// Reads `START-END`, in hexadecimal.
pub fn range(text: &[u8]) -> Option<(u64, u64)> {
    let dash = text.iter().position(|byte| *byte == b'-')?;
    let (start, end) = (number(&text[..dash], 16)?, number(&text[dash + 1..], 16)?);
    (start < end).then_some((start, end))
}

fn number(digits: &[u8], radix: u32) -> Option<u64> {
    let is_number = digits.first().is_some_and(u8::is_ascii_hexdigit);
    let text = core::str::from_utf8(digits).ok().filter(|_| is_number)?;
    u64::from_str_radix(text, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read() {
        let line =
            b"7f01-7f03 rw-s 00002000 00:1a 4711                       /dev/shm/sem a (deleted)";
        let mapping = Mapping::parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end), (0x7f01, 0x7f03));
        assert!(mapping.is_shared);
        assert_eq!(mapping.offset, 0x2000);
        assert_eq!(mapping.identity.device, (0, 0x1a));
        assert_eq!(mapping.identity.inode, 4711);
        assert_eq!(mapping.name, b"/dev/shm/sem a (deleted)");
        assert_eq!(mapping.former_name(), b"/dev/shm/sem a");
        assert_eq!(mapping.kind(), Kind::Nameless);
    }

    #[test]
    fn names_tell_what_a_mapping_is_of() {
        let kind = |name: &str| {
            let line = format!("1000-2000 rw-s 00000000 00:01 7 {name}");
            Mapping::parse(line.as_bytes()).map(|mapping| mapping.kind())
        };
        for (name, expected) in [
            ("", Kind::Memory),
            ("[heap]", Kind::Memory),
            ("/dev/zero (deleted)", Kind::Memory),
            ("/SYSV00000000 (deleted)", Kind::Memory),
            ("/[aio] (deleted)", Kind::Aio),
            ("/usr/bin/python3", Kind::Named),
            ("/memfd:x (deleted)", Kind::Nameless),
            ("anon_inode:[perf_event]", Kind::Other),
        ] {
            assert_eq!(kind(name), Some(expected), "{name}");
        }
    }

    #[test]
    fn what_is_no_line_is_none() {
        for line in [
            "",
            "1000-2000",
            "2000-1000 rw-p 0 0:0 0 ",
            "1000-2000 rw-p 0 00 0 ",
            "1000-2000 rw-p x 0:0 0 ",
            "+1000-2000 rw-p 0 0:0 0 ",
        ] {
            assert_eq!(Mapping::parse(line.as_bytes()), None, "{line}");
        }
        assert_eq!(range(b"1000-2000"), Some((0x1000, 0x2000)));
        assert_eq!(range(b"map_files"), None);
    }
}
