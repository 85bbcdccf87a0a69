//! `ckpt-run export` and `import`: an image as one file.

use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::image_names::{find, tell_other_run};
use crate::cli::global::{Failure, Global, shown};
use crate::cli::print;
use crate::cli::print::Progress;
use crate::remote_run::lock_alone;
use crate::restore::companions;
use crate::run::{ImageFacts, OURS, read_key, size};
use crate::store::{Exported, Form, ImageId, OpenError, PortableReader, Store};

/// The file name that stands for stdout or stdin.
const PIPE: &str = "-";
/// Bytes per read, suitable for a pipe or a disk.
const SOURCE_BYTES: usize = 1 << 20;

/// Image to export and its destination.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Id of the image, or `latest`
    image: String,
    /// New file, or `-` for stdout
    file: PathBuf,
    /// Write the image of an encrypted store without encryption
    #[arg(long)]
    plaintext: bool,
}

/// File to import.
#[derive(Debug, Args)]
pub(crate) struct ImportArguments {
    /// File, or `-` for stdin
    file: PathBuf,
}

/// The output of `export --json`.
#[derive(Serialize)]
struct ExportReport {
    id: ImageId,
    file: String,
    raw_bytes: u64,
    file_bytes: u64,
    encrypted: bool,
}

/// The output of `import --json`.
#[derive(Serialize)]
struct ImportReport {
    id: ImageId,
    store: String,
    raw_bytes: u64,
    /// Bytes that the store did not have before.
    stored_bytes: u64,
}

pub(crate) fn export(global: &Global, arguments: &ExportArguments) -> Result<ExitCode, Failure> {
    let config = global.load(Vec::new())?.config;
    let to_stdout = arguments.file == Path::new(PIPE);
    check_target(global, &arguments.file, to_stdout)?;
    let key = read_key(&config.encryption)?;
    let store = match Store::open_with(&config.store, key.as_ref()) {
        // This allows an image of a store without a key to be moved to one with a key.
        Err(OpenError::KeyUnused { .. }) => Store::open(&config.store)?,
        opened => opened?,
    };
    let id = find(&store, &arguments.image)?;
    let form = if arguments.plaintext {
        Form::Plain
    } else {
        Form::AsStored
    };
    let facts: ImageFacts = serde_json::from_slice(&store.manifest(id)?.meta)?;
    let parts = companions(&store, &facts);
    let progress = Progress::new("export", global, &config);
    let show = |done, total| progress.show(done, total);
    let exported = if to_stdout {
        store.export_image(id, form, &parts, &mut io::stdout().lock(), &show)
    } else {
        store.export_to_file(id, form, &parts, &arguments.file, &show)
    }?;
    drop(progress);
    report(global, &arguments.file, to_stdout, &exported)
}

/// Fails if the target cannot be written, before anything is read.
fn check_target(global: &Global, file: &Path, to_stdout: bool) -> Result<(), Failure> {
    let problem = if to_stdout && io::stdout().is_terminal() {
        "stdout is a terminal: redirect it, or name a file".to_owned()
    } else if to_stdout && global.json {
        "stdout receives the image: with --json, name a file".to_owned()
    } else if !to_stdout && file.symlink_metadata().is_ok() {
        format!(
            "{} exists already: choose another name, or remove it",
            file.display()
        )
    } else {
        return Ok(());
    };
    Err(Failure {
        text: problem,
        code: OURS,
    })
}

fn report(
    global: &Global,
    file: &Path,
    to_stdout: bool,
    exported: &Exported,
) -> Result<ExitCode, Failure> {
    let file = file.display().to_string();
    if global.json {
        return print::print_json(&ExportReport {
            id: exported.id,
            file,
            raw_bytes: exported.raw_bytes,
            file_bytes: exported.file_bytes,
            encrypted: exported.sealed,
        });
    }
    let form = if exported.sealed {
        "encrypted with the store's key"
    } else {
        "not encrypted: it holds every secret that the job had in memory"
    };
    let place = if to_stdout { "stdout" } else { &file };
    print::say(&format!(
        "image {} ({}) written to {place} ({}), {form}",
        exported.id,
        size(exported.raw_bytes),
        size(exported.file_bytes)
    ));
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn import(global: &Global, arguments: &ImportArguments) -> Result<ExitCode, Failure> {
    let config = global.load(Vec::new())?.config;
    let key = read_key(&config.encryption)?;
    let source = source(&arguments.file)?;
    let source = BufReader::with_capacity(SOURCE_BYTES, source);
    // The store is created only once there is an image to import: a mistyped file name creates no store.
    let file = PortableReader::open(source, key.as_ref())?;
    serde_json::from_slice::<ImageFacts>(file.meta()).map_err(|error| Failure {
        text: format!("this version of ckpt-run cannot use the image in the file: {error}"),
        code: OURS,
    })?;
    let store = Store::create_or_open_with(&config.store, key.as_ref())?;
    let lock = lock_alone(&store)?;
    // Removes the remains of an interrupted import; the lock excludes other writers.
    store.sweep(&lock)?;
    let progress = Progress::new("import", global, &config);
    let show = |done, total| progress.show(done, total);
    let image = file.import_into(&store, &lock, &show)?;
    drop(progress);
    tell_other_run(&store, image.id, &image.meta);
    let report = ImportReport {
        id: image.id,
        store: shown(store.path()),
        raw_bytes: image.raw_bytes,
        stored_bytes: image.stored_bytes,
    };
    if global.json {
        return print::print_json(&report);
    }
    print::say(&format!(
        "imported image {} ({}) into {}, which grew by {}",
        report.id,
        size(report.raw_bytes),
        report.store,
        size(report.stored_bytes)
    ));
    print::print(&format!("{}\n", report.id))
}

fn source(file: &Path) -> Result<Box<dyn Read>, Failure> {
    if file != Path::new(PIPE) {
        let opened = File::open(file).map_err(|error| Failure {
            text: format!("cannot read {}: {error}", file.display()),
            code: OURS,
        })?;
        return Ok(Box::new(opened));
    }
    if io::stdin().is_terminal() {
        return Err(Failure {
            text: "stdin is a terminal: pipe an exported image into it, or name a file".to_owned(),
            code: OURS,
        });
    }
    Ok(Box::new(io::stdin().lock()))
}
