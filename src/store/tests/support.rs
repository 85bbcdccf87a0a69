//! Shared set-ups of the store's tests: stores in temporary folders, and other processes.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{self, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use crate::store::format::codec::tests::noise;
use crate::store::format::manifest::Content;
use crate::store::format::pack::PackName;
use crate::store::{Effort, ImageId, Manifest, Policy, Store, StoreLock, WriteError, WriteOptions};

const STORE_VARIABLE: &str = "CKPT_RUN_TEST_STORE";
const READY: &str = "the child is ready";

pub(crate) const OPTIONS: WriteOptions = WriteOptions {
    buffer: 4 << 20,
    workers: 2,
    level: 1,
};

pub(crate) fn temporary_store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create_or_open(&folder.path().join("store")).unwrap();
    (folder, store)
}

/// Writes an image of the given streams.
pub(crate) fn write_image(store: &Store, lock: &StoreLock, streams: &[(&str, &[u8])]) -> Manifest {
    let writer = store.begin(lock, OPTIONS).unwrap();
    for (name, bytes) in streams {
        let mut stream = writer.stream(name).unwrap();
        stream.copy_from(&mut &bytes[..]).unwrap();
        assert_eq!(stream.finish().unwrap(), bytes.len() as u64);
    }
    Arc::unwrap_or_clone(writer.commit(b"meta").unwrap())
}

/// Returns the place of a stream's first chunk: workers may store chunks in any order.
pub(crate) fn place_of(manifest: &Manifest, stream: &str) -> (PackName, u64) {
    let mut streams = manifest.streams.iter();
    let stream = streams.find(|found| found.name == stream).unwrap();
    match manifest.chunks[stream.chunks[0] as usize].content {
        Content::Stored(stored) => (manifest.packs[stored.pack as usize].name, stored.offset),
        Content::Zero => panic!("the stream's first chunk is stored"),
    }
}

/// Changes a byte of a pack.
pub(crate) fn flip(store: &Store, pack: PackName, at: u64) {
    let path = store.pack_file(pack);
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

impl Store {
    /// Keeps `keep_last` good images; returns the removed ones.
    pub(crate) fn rotate(
        &self,
        lock: &StoreLock,
        keep_last: u32,
    ) -> Result<Vec<ImageId>, WriteError> {
        let policy = Policy {
            keep_last,
            keep_within: Duration::ZERO,
            keep_hourly: 0,
            keep_daily: 0,
        };
        let plan = self.plan(&policy, &crate::clock::local(), &any)?;
        Ok(self.forget(lock, &plan, Effort::Quick, &any)?.images)
    }
}

pub(crate) fn read_stream(store: &Store, id: ImageId, name: &str) -> Vec<u8> {
    store.read(id).unwrap().read_to_vec(name, u64::MAX).unwrap()
}

/// Returns the names of the store's packs, sorted.
pub(crate) fn packs(store: &Store) -> Vec<String> {
    names(&store.path().join("packs"))
}

/// Returns the names of the store's manifests and marks, sorted.
pub(crate) fn image_files(store: &Store) -> Vec<String> {
    names(&store.path().join("images"))
}

/// A predicate for a run that continues from any image.
pub(crate) fn any(_: ImageId, _: &[u8]) -> bool {
    true
}

/// A progress callback that does nothing.
pub(crate) fn never(_: u64, _: u64) {}

/// Returns the names in one of the store's folders, sorted.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string();
    let mut names: Vec<String> = folder
        .read_dir()
        .unwrap()
        .map(|entry| name(entry).unwrap())
        .collect();
    names.sort();
    names
}

/// Another process, which runs an ignored test of this program.
pub(crate) struct Child(process::Child);

impl Child {
    /// Starts the test, given by its full path as of `module_path!`, and waits until it is ready.
    pub(crate) fn start(test: &str, store: &Path) -> Self {
        let test = test.trim_start_matches("ckpt_run::");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--ignored", "--nocapture"])
            .env(STORE_VARIABLE, store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let ready = output.lines().any(|line| line.unwrap().contains(READY));
        assert!(ready, "{test} ended before it was ready");
        Self(child)
    }

    /// Runs the test itself: holds the result of `prepare` until the process is killed.
    pub(crate) fn main<T>(prepare: impl FnOnce(&Path) -> T) {
        let Some(store) = std::env::var_os(STORE_VARIABLE) else {
            eprintln!("skipped: not started by another test");
            return;
        };
        let _held = prepare(Path::new(&store));
        println!("{READY}");
        let _ = std::io::stdin().read(&mut [0]);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends SIGKILL and waits until the process has exited.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
