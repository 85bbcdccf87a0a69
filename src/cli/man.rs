//! `ckpt-run man`: the manual pages, generated from the definitions of the command line.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use clap::Command;
use clap_mangen::Man;

use super::arguments::{PROGRAM, grammar};
use super::global::Failure;
use super::print;
use crate::run::OURS;

/// The section of commands.
const SECTION: &str = "1";

pub(super) fn run(folder: Option<&Path>) -> Result<ExitCode, Failure> {
    let mut command = grammar();
    // Adds the common options to the verbs, and their full names.
    command.build();
    let Some(folder) = folder else {
        return print::print(&String::from_utf8_lossy(&page(PROGRAM, &command)?));
    };
    let mut pages = Vec::new();
    collect(PROGRAM, &command, &mut pages)?;
    let failed = |path: &Path| {
        let text = format!("cannot write {}", path.display());
        move |error: io::Error| Failure {
            text: format!("{text}: {error}"),
            code: OURS,
        }
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    for (name, content) in &pages {
        let path = folder.join(format!("{name}.{SECTION}"));
        fs::write(&path, content).map_err(failed(&path))?;
    }
    print::say(&format!(
        "{} pages written to {}",
        pages.len(),
        folder.display()
    ));
    Ok(ExitCode::SUCCESS)
}

/// Adds the page of a command and those of its verbs.
fn collect(name: &str, command: &Command, pages: &mut Vec<(String, Vec<u8>)>) -> io::Result<()> {
    pages.push((name.to_owned(), page(name, command)?));
    let verbs = command.get_subcommands();
    for verb in verbs.filter(|verb| !verb.is_hide_set() && verb.get_name() != "help") {
        collect(&format!("{name}-{}", verb.get_name()), verb, pages)?;
    }
    Ok(())
}

fn page(name: &str, command: &Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    let page = ascii(&String::from_utf8_lossy(&page));
    Ok(tidied(name, &page).into_bytes())
}

/// Returns the page with two errors of `clap_mangen` (0.3) corrected: it leaves the date out of the title, which shifts
/// all later fields, and writes two line breaks around an empty line.
fn tidied(name: &str, page: &str) -> String {
    // There is no date: a page is generated on request by a program that prints its version.
    let version = env!("CARGO_PKG_VERSION");
    let title =
        format!(".TH \"{name}\" \"{SECTION}\" \"\" \"{PROGRAM} {version}\" \"User Commands\"");
    let lines = page.lines().map(|line| {
        if line.starts_with(".TH ") {
            &title
        } else {
            line
        }
    });
    let lines: Vec<&str> = lines.collect();
    (lines.join("\n") + "\n").replace("\n.br\n\n.br\n", "\n.sp\n")
}

/// Returns the page with groff's names for characters outside ASCII, because groff reads them as Latin 1.
fn ascii(page: &str) -> String {
    let mut text = String::with_capacity(page.len());
    for c in page.chars() {
        if c.is_ascii() {
            text.push(c);
        } else {
            // Writing to a string cannot fail.
            let _ = write!(text, "\\[u{:04X}]", u32::from(c));
        }
    }
    text
}
