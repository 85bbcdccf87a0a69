//! `ckpt-run report`: the run as a page of HTML.

use std::fs::{self, Permissions};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use super::global::{Failure, Global, open, shown};
use super::print;
use crate::config::Config;
use crate::history;
use crate::report::{Machine, Story, page};
use crate::run::{ImageFacts, OURS};

/// File mode of a report; the umask decides about other users.
const MODE: u32 = 0o666;

/// Destination of the report.
#[derive(Debug, Args)]
pub(super) struct ReportArguments {
    /// File for the page [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(super) fn run(global: &Global, arguments: &ReportArguments) -> Result<ExitCode, Failure> {
    if arguments.output.is_none() && !global.json && io::stdout().is_terminal() {
        return Err(refused(
            "the report is HTML and stdout is a terminal: name a file, as in: ckpt-run report -o run.html",
        ));
    }
    let config = global.load(Vec::new())?.config;
    let entries = history::entries(&history::path(&config.store));
    let Some(story) = Story::of(entries, machine(&config)) else {
        let store = shown(&config.store);
        return Err(refused(&format!(
            "no report: the store {store} has no events of a run; check --store"
        )));
    };
    let text = if global.json {
        format!("{}\n", serde_json::to_string_pretty(&story)?)
    } else {
        page(&story)
    };
    match &arguments.output {
        Some(path) => write(path, &text)
            .map_err(|error| refused(&format!("cannot write {}: {error}", path.display())))?,
        None => return print::print(&text),
    }
    Ok(ExitCode::SUCCESS)
}

fn refused(text: &str) -> Failure {
    Failure {
        text: text.to_owned(),
        code: OURS,
    }
}

/// Returns the facts of the newest image; `None` if there is no image, or the store cannot be read.
fn machine(config: &Config) -> Option<Machine> {
    let store = open(config).ok()?;
    let images = store.images().ok()?;
    let facts = images
        .iter()
        .rev()
        .find_map(|image| serde_json::from_slice::<ImageFacts>(&image.meta).ok())?;
    Some(Machine::of(&facts))
}

/// Writes a file completely or not at all. A target that is not a regular file (a pipe, a device) is written directly.
fn write(path: &Path, text: &str) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return fs::write(path, text);
    }
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let mut file = tempfile::Builder::new()
        .permissions(Permissions::from_mode(MODE))
        .tempfile_in(folder.unwrap_or(Path::new(".")))?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(())
}
