//! `ckpt-run copy`: copies an image into another store.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::image_names::{find, tell_other_run};
use crate::cli::global::{Failure, Global, shown};
use crate::cli::print;
use crate::cli::print::Progress;
use crate::config::Cpus;
use crate::restore::companions;
use crate::run::{ImageFacts, read_key, size};
use crate::store::{ImageId, OpenError, Store, WriteOptions};

/// Memory for chunks on their way to the workers: enough that no worker waits. The job is not frozen during a copy.
const BUFFER_BYTES: u64 = 64 << 20;

/// Image to copy and its destination.
#[derive(Debug, Args)]
pub(crate) struct CopyArguments {
    /// Id of the image, or `latest`
    image: String,
    /// Folder of the other store; created if necessary, encrypted if the settings name a
    /// key
    #[arg(long, value_name = "STORE")]
    to: PathBuf,
}

#[derive(Serialize)]
struct Copied {
    /// The id of the copy in the other store.
    id: ImageId,
    source: ImageId,
    to: String,
    raw_bytes: u64,
    /// Bytes that the other store did not have before.
    stored_bytes: u64,
}

pub(crate) fn run(global: &Global, arguments: &CopyArguments) -> Result<ExitCode, Failure> {
    let config = global.load(Vec::new())?.config;
    let key = read_key(&config.encryption)?;
    let from = match Store::open_with(&config.store, key.as_ref()) {
        // This allows a copy from a store without a key to one with a key.
        Err(OpenError::KeyUnused { .. }) => Store::open(&config.store)?,
        opened => opened?,
    };
    let source = find(&from, &arguments.image)?;
    // The store is created only once there is an image to copy: a mistyped image id creates no store.
    let meta = from.manifest(source)?.meta;
    let to = Store::create_or_open_with(&arguments.to, key.as_ref())?;
    let lock = to.lock()?;
    // Removes the remains of an interrupted copy; the lock excludes other writers.
    to.sweep(&lock)?;
    let options = WriteOptions {
        buffer: BUFFER_BYTES,
        workers: match config.snapshot.cpus {
            Cpus::Auto => std::thread::available_parallelism().map_or(1, usize::from),
            Cpus::Count(count) => count.get(),
        },
        level: config.snapshot.level,
    };
    let progress = Progress::new("copy", global, &config);
    let show = |done, total| progress.show(done, total);
    // An image that this version cannot restore is copied unchanged.
    let facts: Option<ImageFacts> = serde_json::from_slice(&meta).ok();
    let parts = facts.map_or_else(Vec::new, |facts| companions(&from, &facts));
    let copy = from.copy_image(source, &parts, &to, &lock, options, &show)?;
    drop(progress);
    tell_other_run(&to, copy.id, &copy.meta);
    let copied = Copied {
        id: copy.id,
        source,
        to: shown(to.path()),
        raw_bytes: copy.raw_bytes,
        stored_bytes: copy.stored_bytes,
    };
    if global.json {
        return print::print_json(&copied);
    }
    print::say(&format!(
        "copied image {source} ({}) as image {} into {}, which grew by {}",
        size(copied.raw_bytes),
        copied.id,
        copied.to,
        size(copied.stored_bytes),
    ));
    print::print(&format!("{}\n", copied.id))
}
