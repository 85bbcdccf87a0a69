//! Table of known errors: the meaning of CRIU's messages, of the CUDA driver's codes and of full disks for the user,
//! and the search in that table.
//!
//! A leaf module: code that meets an error calls it, and it does not know its callers. The texts are those of CRIU 4.1
//! and 4.2, the codes those of driver 580. `docs/guide/troubleshooting.md` is generated from the table (see the tests).

use std::io;

pub use table::CAUSES;

#[cfg(test)]
mod examples;
mod table;
#[cfg(test)]
mod tests;

/// The meaning of an error and its remedy.
#[derive(Debug, PartialEq, Eq)]
pub struct Cause {
    /// The pattern that identifies the error.
    pub sign: Sign,
    /// The meaning of the error.
    pub cause: &'static str,
    /// The action for the user.
    pub remedy: &'static str,
}

/// A pattern that identifies an error.
#[derive(Debug, PartialEq, Eq)]
pub enum Sign {
    /// A line of CRIU's log that contains all of these texts.
    Criu(&'static [&'static str]),
    /// A code that the driver returned from one of these calls (from any call if the list is empty).
    Cuda(&'static [&'static str], i32),
}

/// An observed error.
#[derive(Clone, Copy, Debug)]
pub enum Symptom<'a> {
    /// A line of CRIU's log.
    Criu(&'a str),
    /// The driver's result of a call ("lock", "checkpoint", …).
    Cuda(&'a str, i32),
}

impl Sign {
    fn fits(&self, symptom: Symptom<'_>) -> bool {
        match (self, symptom) {
            (Self::Criu(texts), Symptom::Criu(line)) => {
                texts.iter().all(|text| line.contains(text))
            }
            (Self::Cuda(calls, code), Symptom::Cuda(call, answer)) => {
                *code == answer && (calls.is_empty() || calls.contains(&call))
            }
            (Self::Criu(_), Symptom::Cuda(..)) | (Self::Cuda(..), Symptom::Criu(_)) => false,
        }
    }
}

/// Returns true if a failed read means that the bytes are lost.
pub(crate) fn is_loss(error: &io::Error) -> bool {
    let is_bad_disk = error.raw_os_error() == Some(nix::libc::EIO);
    is_bad_disk
        || matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof
        )
}

/// Returns true if the disk or the user's quota is full.
pub(crate) fn is_disk_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Returns the first cause in the table that explains one of the symptoms, and that symptom. A more specific line of
/// the table wins over an earlier symptom.
#[must_use]
pub fn find<'a>(symptoms: &[Symptom<'a>]) -> Option<(&'static Cause, Symptom<'a>)> {
    CAUSES.iter().find_map(|cause| {
        let mut symptoms = symptoms.iter();
        let found = symptoms.find(|symptom| cause.sign.fits(**symptom))?;
        Some((cause, *found))
    })
}
