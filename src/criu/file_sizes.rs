//! Sizes in CRIU's list of open files. CRIU refuses a file whose size differs from that at the dump, except where it is
//! only appended to. Files that stay as other programs have changed them must not have a size there.
//!
//! The list is edited by field, because `images/*.proto` of another CRIU may have more fields than are known here.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint, skip_field,
};

/// Name of the image file with the list.
pub const OPEN_FILES: &str = "files.img";
/// Bytes before the entries.
const MAGIC_BYTES: usize = 8;
/// Fields of `file_entry` and `reg_file_entry`.
const REGULAR: u32 = 3;
const NAME: u32 = 6;
const SIZE: u32 = 8;

/// A field of a message.
struct Field<'a> {
    number: u32,
    /// With its key and length.
    whole: &'a [u8],
    content: &'a [u8],
}

/// Returns the list without the sizes of the files that `is_left` selects, or `None` if it cannot be read.
#[must_use]
pub fn without_sizes(list: &[u8], is_left: impl Fn(&Path) -> bool) -> Option<Vec<u8>> {
    let (magic, mut rest) = list.split_at_checked(MAGIC_BYTES)?;
    let mut edited = magic.to_vec();
    while let Some((length, after)) = rest.split_first_chunk() {
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let (entry, after) = after.split_at_checked(length)?;
        let entry = edited_entry(entry, &is_left)?;
        edited.extend(u32::try_from(entry.len()).ok()?.to_le_bytes());
        edited.extend(entry);
        rest = after;
    }
    rest.is_empty().then_some(edited)
}

fn edited_entry(entry: &[u8], is_left: &impl Fn(&Path) -> bool) -> Option<Vec<u8>> {
    let mut edited = Vec::with_capacity(entry.len());
    for field in fields(entry)? {
        if field.number != REGULAR {
            edited.extend(field.whole);
            continue;
        }
        let mut parts = fields(field.content)?;
        let name = parts.iter().find(|part| part.number == NAME)?.content;
        if is_left(Path::new(OsStr::from_bytes(name))) {
            parts.retain(|part| part.number != SIZE);
        }
        let length: usize = parts.iter().map(|part| part.whole.len()).sum();
        encode_key(REGULAR, WireType::LengthDelimited, &mut edited);
        encode_varint(u64::try_from(length).ok()?, &mut edited);
        for part in parts {
            edited.extend(part.whole);
        }
    }
    Some(edited)
}

fn fields(mut message: &[u8]) -> Option<Vec<Field<'_>>> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let begin = message;
        let (number, kind) = decode_key(&mut message).ok()?;
        let value = message;
        skip_field(kind, number, &mut message, DecodeContext::default()).ok()?;
        let mut content = &value[..value.len() - message.len()];
        if kind == WireType::LengthDelimited {
            decode_varint(&mut content).ok()?;
        }
        fields.push(Field {
            number,
            whole: &begin[..begin.len() - message.len()],
            content,
        });
    }
    Some(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    #[derive(Clone, PartialEq, Message)]
    struct Regular {
        #[prost(uint32, required, tag = "1")]
        id: u32,
        #[prost(string, required, tag = "6")]
        name: String,
        #[prost(uint64, optional, tag = "8")]
        size: Option<u64>,
        #[prost(uint32, repeated, packed = "false", tag = "11")]
        build_id: Vec<u32>,
    }

    #[derive(Clone, PartialEq, Message)]
    struct Entry {
        #[prost(uint32, required, tag = "2")]
        id: u32,
        #[prost(message, optional, tag = "3")]
        regular: Option<Regular>,
        #[prost(fixed64, optional, tag = "99")]
        later: Option<u64>,
    }

    fn list(entries: &[Entry]) -> Vec<u8> {
        let mut list = vec![7; MAGIC_BYTES];
        for entry in entries {
            let entry = entry.encode_to_vec();
            list.extend(u32::try_from(entry.len()).unwrap().to_le_bytes());
            list.extend(entry);
        }
        list
    }

    fn entry(name: &str, size: Option<u64>) -> Entry {
        let name = name.to_owned();
        let build_id = vec![5, 6];
        Entry {
            id: 1,
            regular: Some(Regular {
                id: 1,
                name,
                size,
                build_id,
            }),
            later: Some(9),
        }
    }

    #[test]
    fn only_the_sizes_of_the_selected_files_are_left_out() {
        let socket = Entry {
            id: 2,
            regular: None,
            later: None,
        };
        let size = Some(1 << 40);
        let before = [entry("/a", size), socket.clone(), entry("/b", size)];
        let after = [entry("/a", size), socket, entry("/b", None)];
        let edited = without_sizes(&list(&before), |path| path == Path::new("/b"));
        assert_eq!(edited, Some(list(&after)));
        let same = without_sizes(&list(&before), |_| false);
        assert_eq!(same, Some(list(&before)));
    }

    #[test]
    fn a_list_that_is_cut_is_refused() {
        let whole = list(&[entry("/a", Some(3))]);
        for length in (0..whole.len()).filter(|length| *length != MAGIC_BYTES) {
            assert_eq!(without_sizes(&whole[..length], |_| true), None, "{length}");
        }
    }
}
