//! The state of processes that CRIU omits and its plugin saves: a file in memory, which ckpt-run keeps with the image.
//! `src/plugin/omitted_state.rs` describes the content.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::plugin::{PluginVariable, name};
use crate::plugin::variables;

/// Reasons of the plugin to refuse a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A process uses protection keys in a way that cannot be restored.
    Keys,
    /// A thread has descriptors or a working folder of its own.
    Unshared,
    /// A thread has the scheduling policy `SCHED_DEADLINE`.
    Deadline,
    /// A thread blocks the signal of a fault, which it has sent itself.
    Blocked,
}

/// The file, for one run of CRIU.
#[derive(Debug)]
pub struct OmittedState(File);

impl OmittedState {
    /// Creates the file with this content, which is empty for a dump.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn holding(content: &[u8]) -> io::Result<Self> {
        let mut file = File::from(memfd_create(c"omitted", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(content)?;
        Ok(Self(file))
    }

    /// Returns another handle to the same file.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn handle(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }

    /// Returns the descriptor for CRIU.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Returns the variable for a CRIU that inherits the file with this number.
    #[must_use]
    pub fn variable(number: RawFd) -> PluginVariable {
        (name(variables::OMITTED), number.to_string().into())
    }

    /// Returns what the plugin has saved so far.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn content(&self) -> io::Result<Vec<u8>> {
        let len = usize::try_from(self.0.metadata()?.len()).map_err(io::Error::other)?;
        let mut content = vec![0; len];
        self.0.read_exact_at(&mut content, 0)?;
        Ok(content)
    }

    /// Returns the reason for which the plugin has refused a dump, and the process.
    #[must_use]
    pub fn refused(&self) -> Option<(Refused, i32)> {
        let kinds = [
            (variables::BAD_KEYS, Refused::Keys),
            (variables::UNSHARED, Refused::Unshared),
            (variables::DEADLINE, Refused::Deadline),
            (variables::BLOCKED, Refused::Blocked),
        ];
        let (kind, thread) = self.first_of(&kinds.map(|(kind, _)| kind))?;
        let mut kinds = kinds.into_iter();
        kinds.find_map(|(known, refused)| (known == kind).then_some((refused, thread)))
    }

    /// Returns a thread that still lacks state after a dump. The plugin empties the file once it has given everything back.
    #[must_use]
    pub fn lacking(&self) -> Option<i32> {
        let (_, thread) = self.first_of(&[
            variables::REGISTERS,
            variables::DISPATCH,
            variables::ALIGNMENT,
        ])?;
        Some(thread)
    }

    /// Returns true if the plugin has given everything back to restored processes.
    #[must_use]
    pub fn is_given_back(&self) -> bool {
        self.0.metadata().is_ok_and(|file| file.len() == 0)
    }

    /// Returns the kind and the thread of the first record of these kinds.
    fn first_of(&self, kinds: &[u32]) -> Option<(u32, i32)> {
        let content = self.content().ok()?;
        let mut rest = content.as_slice();
        // Kind, thread and length of the content, then the content.
        while let Some(([kind, thread, len], after)) = header(rest) {
            if kinds.contains(&kind) {
                return Some((kind, thread.cast_signed()));
            }
            rest = after.get(len as usize..)?;
        }
        None
    }
}

/// Returns a record with a record lock: pid as seen by CRIU, descriptor, and a `struct flock`.
#[must_use]
pub fn lock_record(pid: i32, descriptor: i32, lock: [i64; 4]) -> Vec<u8> {
    let lock = lock.map(i64::to_ne_bytes);
    let content = [&descriptor.to_ne_bytes()[..], lock.as_flattened()].concat();
    record(variables::LOCK, pid.cast_unsigned(), &content)
}

/// Returns a record of less than 4 GiB.
fn record(kind: u32, thread: u32, content: &[u8]) -> Vec<u8> {
    let len = u32::try_from(content.len()).unwrap_or(u32::MAX);
    let header = [kind, thread, len].map(u32::to_ne_bytes);
    [header.as_flattened(), content].concat()
}

/// Splits the header of a record from the rest.
fn header(rest: &[u8]) -> Option<([u32; 3], &[u8])> {
    let (header, rest) = rest.split_first_chunk::<12>()?;
    let (words, _) = header.as_chunks::<4>();
    let words: [[u8; 4]; 3] = words.try_into().ok()?;
    Some((words.map(u32::from_ne_bytes), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_records_are_found_by_their_kinds() {
        let found = |records: &[Vec<u8>]| {
            let state = OmittedState::holding(&records.concat()).unwrap();
            assert_eq!(state.content().unwrap(), records.concat());
            assert_eq!(state.is_given_back(), records.is_empty());
            (state.refused(), state.lacking())
        };
        let (keys, register) = (record(3, 6, &[0; 40]), record(2, 7, &[0; 40]));
        assert_eq!(found(&[]), (None, None));
        assert_eq!(found(&[keys.clone(), record(1, 8, &[])]), (None, None));
        assert_eq!(found(&[keys.clone(), register.clone()]), (None, Some(7)));
        assert_eq!(
            found(&[keys.clone(), record(5, 8, &[9; 32])]),
            (None, Some(8))
        );
        let refusal = record(variables::BAD_KEYS, 9, &[1; 24]);
        let refused = (Some((Refused::Keys, 9)), Some(7));
        assert_eq!(found(&[register, refusal.clone()]), refused);
        for (kind, reason) in [
            (6, Refused::Unshared),
            (7, Refused::Deadline),
            (13, Refused::Blocked),
        ] {
            assert_eq!(found(&[record(kind, 5, &[])]), (Some((reason, 5)), None));
        }
        // Records that are not complete.
        assert_eq!(found(&[keys[..50].to_vec()]), (None, None));
        assert_eq!(found(&[refusal[..11].to_vec()]), (None, None));
    }
}
