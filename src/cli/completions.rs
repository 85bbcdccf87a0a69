//! `ckpt-run completions`: what a shell needs to complete our command lines.

use std::process::ExitCode;

use clap_complete::Shell;

use super::{Failure, PROGRAM, grammar, output};

/// How `clap_complete` (4.6.11) names us in one half of its bash script, where it takes the hyphen for
/// a step down to a verb, and in the other half.
const BASH_NAMES: (&str, &str) = ("ckpt__subcmd__run", "ckpt__run");

pub(super) fn run(shell: Shell) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut grammar(), PROGRAM, &mut script);
    let (wrong, right) = BASH_NAMES;
    output::print(&String::from_utf8_lossy(&script).replace(wrong, right))
}
