//! The local store's record of a remote store: its own identity, and which of its images are there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::clock;
use crate::store::RemoteError;
use crate::store::durable;
use crate::store::{ImageId, Store};

/// Name of the file in the store.
const FILE: &str = "remote.json";

/// The record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LocalRecord {
    /// Random identity of the store.
    pub identity: String,
    /// The folder that got the identity: a copy of the store is another one.
    folder: Folder,
    /// Objects of the images that this store and the remote store both have, by number in this store.
    pub images: BTreeMap<ImageId, String>,
    /// Tenure in which this store has last run the job.
    #[serde(default)]
    pub tenure: Option<u64>,
    /// Images that came from another machine, or can come, since another machine had run the job.
    #[serde(default)]
    pub came: BTreeSet<ImageId>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Folder {
    machine: String,
    inode: u64,
    born_ns: u128,
}

impl Folder {
    fn of(store: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(store)?;
        let born = metadata.created().ok();
        let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        let machine = fs::read_to_string("/etc/machine-id").unwrap_or_default();
        Ok(Self {
            machine: machine.trim().to_owned(),
            inode: metadata.ino(),
            // 0 where the file system does not know it. Device numbers change at a boot.
            born_ns: born.map_or(0, |since| since.as_nanos()),
        })
    }
}

impl LocalRecord {
    /// Reads the record, or makes one with a new identity.
    pub(super) fn load(store: &Store) -> Result<Self, RemoteError> {
        let path = file(store);
        let failed = |reason: String| RemoteError::Record {
            path: path.clone(),
            reason,
        };
        let folder = Folder::of(store.path()).map_err(|error| failed(error.to_string()))?;
        match fs::read(&path) {
            Ok(text) => {
                let record: Self =
                    serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
                if record.folder == folder {
                    return Ok(record);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error.to_string())),
        }
        let random = clock::random().map_err(|error| failed(error.to_string()))?;
        let record = Self {
            identity: blake3::Hash::from_bytes(random).to_hex()[..16].to_owned(),
            folder,
            images: BTreeMap::new(),
            tenure: None,
            came: BTreeSet::new(),
        };
        record.save(store)?;
        Ok(record)
    }

    pub(super) fn save(&self, store: &Store) -> Result<(), RemoteError> {
        let path = file(store);
        let failed = |reason: String| RemoteError::Record {
            path: path.clone(),
            reason,
        };
        let text = serde_json::to_vec_pretty(self).map_err(|error| failed(error.to_string()))?;
        durable::write(&path, &text).map_err(|error| failed(crate::printable::chain(&error)))
    }
}

fn file(store: &Store) -> PathBuf {
    store.path().join(FILE)
}
