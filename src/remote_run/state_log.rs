//! The log of a run's states in object storage. Its newest entry is the state.
//!
//! ```text
//! state/0000000000000016   an earlier state
//! state/0000000000000017   the present state
//! state/0000000000000018   whoever creates it decides what comes next
//! ```
//! An entry is created only if it does not exist, which every provider does atomically. So two processes that append
//! to the same state cannot both succeed: a renewal, a commit of an image, a takeover of the lease and a change of the
//! images by a verb exclude each other without clocks. Old entries are removed. A process that knows only an old entry,
//! because it was suspended, can create a removed one again. This changes nothing, because newer entries exist, and the
//! process notices it by them.

use bytes::Bytes;

use super::shared_state::{FORMAT, State};
use crate::clock;
use crate::store::RemoteError;
use crate::store::remote::bucket::{Bucket, Created};

/// Folder of the entries.
const FOLDER: &str = "state";
/// Number of entries that are kept: enough that a process which is not suspended never meets a removed one.
const KEPT: u64 = 64;

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) serial: u64,
    pub(crate) state: State,
}

/// Part of an entry that every format has.
#[derive(serde::Deserialize)]
struct Versioned {
    format: u32,
}

/// Log of a run.
#[derive(Clone, Debug)]
pub(crate) struct StateLog {
    bucket: Bucket,
}

impl StateLog {
    pub(crate) fn new(bucket: Bucket) -> Self {
        Self { bucket }
    }

    /// Returns the address of the remote store.
    pub(crate) fn url(&self) -> &str {
        self.bucket.url()
    }

    /// Returns the newest entry; `None` if the run has none. `after` is an earlier entry that is known.
    pub(crate) fn newest(&self, after: Option<&Entry>) -> Result<Option<Entry>, RemoteError> {
        let known = after.map(|entry| name(entry.serial));
        loop {
            let Some(newest) = self.newest_serial(known.as_deref())? else {
                return Ok(after.cloned());
            };
            // It is missing if newer ones were appended, and this one removed, since then.
            if let Some(entry) = self.read(newest)? {
                return Ok(Some(entry));
            }
        }
    }

    /// Appends a state to the log, directly after `known`. Returns `None` if another entry was appended before.
    pub(crate) fn append(
        &self,
        known: Option<&Entry>,
        mut state: State,
    ) -> Result<Option<Entry>, RemoteError> {
        let serial = known.map_or(1, |entry| entry.serial + 1);
        state.format = FORMAT;
        state.nonce = random(&self.bucket, &name(serial))?;
        let content = serde_json::to_vec(&state)
            .map_err(|error| self.bucket.damaged(&name(serial), error))?;
        let entry = Entry { serial, state };
        match self.bucket.create(&name(serial), Bytes::from(content))? {
            // The entry of this number was removed, if much later ones exist.
            Created::New if self.newest_serial(Some(&name(serial)))? >= Some(serial + KEPT) => {
                return Ok(None);
            }
            Created::New => {}
            // Ours, if only the answer to an earlier attempt of the request was lost.
            Created::Existed if self.read(serial)?.as_ref() == Some(&entry) => {}
            Created::Existed => return Ok(None),
        }
        if let Some(old) = serial.checked_sub(KEPT) {
            // It stays if this fails, and costs some bytes.
            let _ = self.bucket.remove(&name(old));
        }
        Ok(Some(entry))
    }

    /// Returns the number of the newest entry whose name follows `after`.
    fn newest_serial(&self, after: Option<&str>) -> Result<Option<u64>, RemoteError> {
        let entries = self.bucket.list(FOLDER, after)?;
        let serials = entries.iter().filter_map(|entry| serial(&entry.name));
        Ok(serials.max())
    }

    fn read(&self, serial: u64) -> Result<Option<Entry>, RemoteError> {
        let object = name(serial);
        let Some(content) = self.bucket.get(&object)? else {
            return Ok(None);
        };
        let versioned: Versioned = serde_json::from_slice(&content)
            .map_err(|error| self.bucket.damaged(&object, error))?;
        if versioned.format > FORMAT {
            return Err(RemoteError::Newer {
                url: self.bucket.url().to_owned(),
                format: versioned.format,
            });
        }
        let state = serde_json::from_slice(&content)
            .map_err(|error| self.bucket.damaged(&object, error))?;
        Ok(Some(Entry { serial, state }))
    }
}

fn name(serial: u64) -> String {
    format!("{FOLDER}/{serial:016}")
}

fn serial(name: &str) -> Option<u64> {
    name.strip_prefix(FOLDER)?.strip_prefix('/')?.parse().ok()
}

fn random(bucket: &Bucket, object: &str) -> Result<u64, RemoteError> {
    let bytes = clock::random().map_err(|error| bucket.damaged(object, error))?;
    let (eight, _) = bytes.split_first_chunk().unwrap_or((&[0; 8], &[]));
    Ok(u64::from_le_bytes(*eight))
}
