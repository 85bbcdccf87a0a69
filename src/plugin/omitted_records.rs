#![allow(unsafe_code, reason = "called by CRIU through C")]
//! The file with the state that CRIU omits. It is a sequence of records: kind, thread and length of the content, four bytes
//! each, then the content. Numbers have the machine's byte order.

use core::ffi::{c_int, c_long};

use super::extended_registers::COMPONENT_BYTES_MAX;
use super::kernel::{read_at, variable, write_some};
use super::system_call::system_call;
use super::text::number;
use super::variables::OMITTED;

const HEADER_BYTES: usize = 12;
const CONTENT_BYTES_MAX: usize = COMPONENT_BYTES_MAX + 4;

/// A record that was read.
pub struct Record<'a> {
    pub kind: u32,
    pub thread: c_int,
    pub content: &'a [u8],
}

/// Returns the descriptor of the file; `None` if nothing is to be saved or given back.
pub fn file() -> Option<c_int> {
    c_int::try_from(number(variable(OMITTED)?.to_bytes())?).ok()
}

/// Appends a record.
pub fn append(file: c_int, kind: u32, thread: c_int, content: &[&[u8]]) -> Option<()> {
    let len: usize = content.iter().map(|part| part.len()).sum();
    let header = header(kind, thread, u32::try_from(len).ok()?);
    let parts = [header.as_slice()].into_iter();
    for part in parts.chain(content.iter().copied()) {
        (write_some(file, part) == Ok(part.len())).then_some(())?;
    }
    Some(())
}

/// Returns the beginning of a record with a content of so many bytes.
pub fn header(kind: u32, thread: c_int, len: u32) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    let words = [kind.to_ne_bytes(), thread.to_ne_bytes(), len.to_ne_bytes()];
    header.copy_from_slice(words.as_flattened());
    header
}

/// Calls `act` with each record until it returns false. Returns false then, and if the file is not a sequence of records.
pub fn for_each_record(file: c_int, mut act: impl FnMut(&Record<'_>) -> bool) -> bool {
    let mut place = 0;
    loop {
        let (mut header, mut content) = ([0; HEADER_BYTES], [0; CONTENT_BYTES_MAX]);
        match read_at(file, &mut header, place) {
            Ok(0) => return true,
            Ok(HEADER_BYTES) => {}
            Ok(_) | Err(_) => return false,
        }
        let word = |at: usize| header.get(at..).and_then(|at| at.first_chunk());
        let (Some(kind), Some(thread), Some(len)) = (word(0), word(4), word(8)) else {
            return false;
        };
        let len = u32::from_ne_bytes(*len);
        place += HEADER_BYTES as u64;
        let content = usize::try_from(len)
            .ok()
            .and_then(|len| content.get_mut(..len));
        let Some(content) = content else { return false };
        if read_at(file, content, place) != Ok(content.len()) {
            return false;
        }
        let record = Record {
            kind: u32::from_ne_bytes(*kind),
            thread: c_int::from_ne_bytes(*thread),
            content,
        };
        if !act(&record) {
            return false;
        }
        place += u64::from(len);
    }
}

/// Removes all records.
pub fn empty(file: c_int) {
    // SAFETY: takes numbers only.
    unsafe { system_call(FTRUNCATE, [file.into(), 0, 0, 0, 0, 0]) };
}

#[cfg(target_arch = "x86_64")]
const FTRUNCATE: c_long = 77;
#[cfg(target_arch = "aarch64")]
const FTRUNCATE: c_long = 46;
