//! The state of processes that CRIU omits and its plugin saves: a file in memory, which ckpt-run keeps with the image.
//! `src/plugin/omitted_state.rs` describes the content.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::plugin::{PluginVariable, name};
use crate::plugin::variables;

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

    /// Returns the process for which the plugin has refused a dump.
    #[must_use]
    pub fn refused(&self) -> Option<i32> {
        let content = self.content().ok()?;
        let mut rest = content.as_slice();
        // Kind, thread and length of the content, then the content.
        while let Some(([kind, thread, len], after)) = header(rest) {
            if kind == variables::REFUSED {
                return Some(thread.cast_signed());
            }
            rest = after.get(len as usize..)?;
        }
        None
    }

    /// Returns a thread whose state the plugin has saved and not given back, once CRIU has ended.
    #[must_use]
    pub fn remaining(&self) -> Option<i32> {
        let content = self.content().ok()?;
        header(&content).map(|([_, thread, _], _)| thread.cast_signed())
    }
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

    fn record(kind: u32, thread: u32, content: &[u8]) -> Vec<u8> {
        let len = u32::try_from(content.len()).unwrap();
        let header = [kind, thread, len].map(u32::to_ne_bytes);
        [header.as_flattened(), content].concat()
    }

    #[test]
    fn a_refusal_is_found_after_other_records() {
        let refused = |records: &[Vec<u8>]| {
            let state = OmittedState::holding(&records.concat()).unwrap();
            assert_eq!(state.content().unwrap(), records.concat());
            (state.refused(), state.remaining())
        };
        let other = record(2, 7, &[0; 40]);
        assert_eq!(refused(&[]), (None, None));
        assert_eq!(
            refused(&[other.clone(), record(1, 8, &[])]),
            (None, Some(7))
        );
        let refusal = record(variables::REFUSED, 9, &[1; 24]);
        assert_eq!(
            refused(&[other.clone(), refusal.clone()]),
            (Some(9), Some(7))
        );
        // A record that is not complete.
        assert_eq!(refused(&[other[..50].to_vec()]), (None, Some(7)));
        assert_eq!(refused(&[refusal[..11].to_vec()]), (None, None));
    }
}
