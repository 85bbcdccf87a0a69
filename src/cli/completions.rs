//! `ckpt-run completions`: what a shell needs to complete our command lines.

use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

use super::{Failure, PROGRAM, grammar, output};

/// How `clap_complete` (4.6.11) names us in one half of its bash script, where it takes the hyphen for
/// a step down to a verb, and in the other half.
const BASH_NAMES: (&str, &str) = ("ckpt__subcmd__run", "ckpt__run");

pub(super) fn run(shell: Shell) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut visible(&grammar()), PROGRAM, &mut script);
    let (wrong, right) = BASH_NAMES;
    output::print(&String::from_utf8_lossy(&script).replace(wrong, right))
}

/// The command as far as its help shows it: `clap_complete` offers what is hidden, too.
fn visible(command: &Command) -> Command {
    let arguments = command.get_arguments().filter(|one| !one.is_hide_set());
    let verbs = command.get_subcommands().filter(|one| !one.is_hide_set());
    let shown = Command::new(command.get_name().to_owned())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(arguments.cloned())
        .subcommands(verbs.map(visible));
    match command.get_version() {
        Some(version) => shown.version(version.to_owned()),
        None => shown,
    }
}
