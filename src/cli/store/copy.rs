//! `ckpt-run copy`: copies an image, or all, into another store.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::any_store::AnyStore;
use super::image_names::{no_image, tell_other_run};
use crate::cli::global::{Failure, Global, object_storage, shown};
use crate::cli::print;
use crate::cli::print::Progress;
use crate::config::{Config, Cpus};
use crate::remote_run::lock_alone;
use crate::restore::companions;
use crate::run::{ImageFacts, OURS, read_key, size};
use crate::store::remote::bucket::{is_address, without_secrets};
use crate::store::{ImageId, Key, Manifest, OpenError, Store, StoreLock, WriteOptions};

/// Memory for chunks on their way to the workers: enough that no worker waits. The job is not frozen during a copy.
const BUFFER_BYTES: u64 = 64 << 20;

/// Image to copy and its destination.
#[derive(Debug, Args)]
pub(crate) struct CopyArguments {
    /// Id of the image, or `latest`
    #[arg(required_unless_present = "all")]
    image: Option<String>,
    /// Copy all images that are not damaged
    #[arg(long, conflicts_with = "image")]
    all: bool,
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
    let config = global.load_for_any_store(Vec::new())?.config;
    if let Some(url) = arguments.to.to_str().filter(|to| is_address(to)) {
        return Err(upload_refused(url));
    }
    let key = read_key(&config.encryption)?;
    let from = source(&config, key.as_ref())?;
    let sources = match &arguments.image {
        Some(name) => vec![from.find(name)?],
        None => whole(&from)?,
    };
    // The store is created only once there is an image to copy: a mistyped image id creates no store.
    let first = sources.first().ok_or_else(|| no_image(&from.shown()))?;
    from.manifest(*first)?;
    let to = Store::create_or_open_with(&arguments.to, key.as_ref())?;
    let lock = lock_alone(&to)?;
    // Removes the remains of an interrupted copy; the lock excludes other writers.
    to.sweep(&lock)?;
    let mut all = Vec::new();
    for source in sources {
        let progress = Progress::new("copy", global, &config);
        let show = |done, total| progress.show(done, total);
        let copy = match &from {
            AnyStore::Folder(store) => copy_here(&config, store, source, &to, &lock, &show)?,
            AnyStore::Remote(remote) => remote.copy(source, &to, &lock, &show)?,
        };
        drop(progress);
        tell_other_run(&to, copy.id, &copy.meta);
        let copied = Copied {
            id: copy.id,
            source,
            to: shown(to.path()),
            raw_bytes: copy.raw_bytes,
            stored_bytes: copy.stored_bytes,
        };
        if !global.json {
            report(&copied)?;
        }
        all.push(copied);
    }
    match &all[..] {
        [copied] if global.json && !arguments.all => print::print_json(copied),
        all if global.json => print::print_json(&all),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Opens the store that has the images.
fn source(config: &Config, key: Option<&Key>) -> Result<AnyStore, Failure> {
    if let Some(url) = object_storage(config) {
        return AnyStore::open_remote(config, url);
    }
    Ok(AnyStore::Folder(
        match Store::open_with(&config.store, key) {
            // This allows a copy from a store without a key to one with a key.
            Err(OpenError::KeyUnused { .. }) => Store::open(&config.store)?,
            opened => opened?,
        },
    ))
}

/// Returns the images that are not damaged.
fn whole(from: &AnyStore) -> Result<Vec<ImageId>, Failure> {
    let images = from.images()?.into_iter();
    let whole = images.filter(|image| image.damaged.is_none());
    Ok(whole.map(|image| image.id).collect())
}

fn copy_here(
    config: &Config,
    from: &Store,
    source: ImageId,
    to: &Store,
    lock: &StoreLock,
    show: &dyn Fn(u64, u64),
) -> Result<Manifest, Failure> {
    let options = WriteOptions {
        buffer: BUFFER_BYTES,
        workers: match config.snapshot.cpus {
            Cpus::Auto => std::thread::available_parallelism().map_or(1, usize::from),
            Cpus::Count(count) => count.get(),
        },
        level: config.snapshot.level,
    };
    // An image that this version cannot restore is copied unchanged.
    let facts: Option<ImageFacts> = serde_json::from_slice(&from.manifest(source)?.meta).ok();
    let parts = facts.map_or_else(Vec::new, |facts| companions(from, &facts));
    Ok(from.copy_image(source, &parts, to, lock, options, show)?)
}

fn report(copied: &Copied) -> Result<ExitCode, Failure> {
    print::say(&format!(
        "copied image {} ({}) as image {} into {}, which grew by {}",
        copied.source,
        size(copied.raw_bytes),
        copied.id,
        copied.to,
        size(copied.stored_bytes),
    ));
    print::print(&format!("{}\n", copied.id))
}

/// Returns the failure of a copy into object storage.
fn upload_refused(url: &str) -> Failure {
    let url = without_secrets(url);
    Failure {
        text: format!(
            "cannot copy into {url}: only a run uploads its images; continue the run with --remote {url}, or copy into a \
             folder"
        ),
        code: OURS,
    }
}
