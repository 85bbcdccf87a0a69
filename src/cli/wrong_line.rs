//! Error messages for command lines that clap does not accept. clap has no suggestion for a word before a `--`.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};

use super::arguments::{PROGRAM, VERBS_USAGE, grammar};
use super::print;
use crate::run::OURS;

/// Smallest similarity at which a word is treated as a mistyped verb: one wrong letter in a short one (`lst`,
/// `snapshto`).
const LIKENESS_MIN: f64 = 0.7;
/// The start of clap's error messages; help that was not requested has none.
const CLAP_BEGINS: &str = "error: ";
/// Limit on the length of a mistyped verb; longer words are not compared with verbs.
const VERB_BYTES_MAX: usize = 16;

/// Explains a command line that clap does not accept, such as `ckpt-run ./train` without its `--`.
pub(super) fn explain(mut error: clap::Error, arguments: &[OsString]) -> ExitCode {
    // clap's suggestion "put -- before it" is right for a command and wrong for an option.
    error.remove(ContextKind::Suggested);
    if error.use_stderr() && error.to_string().starts_with(CLAP_BEGINS) {
        // The prefix of all errors of ckpt-run; clap prints the rest, with its colors.
        let _ = write!(io::stderr(), "{PROGRAM}: ");
    }
    // A reader that closed the pipe has all it needs.
    let _ = error.print();
    if is_asked_for(&error) {
        return ExitCode::SUCCESS;
    }
    let words = arguments.iter().map(|word| word.to_string_lossy().into());
    for line in suggestions(&error, &words.collect::<Vec<String>>()) {
        print::say(&line);
    }
    ExitCode::from(OURS)
}

/// Returns true if the user requested the output: help, or the version.
pub(super) fn is_asked_for(error: &clap::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    )
}

/// Returns the line with the verb that the wrong word resembles, and the line with `--` before that word, as far as a
/// verb or a command can be in its place.
fn suggestions(error: &clap::Error, words: &[String]) -> Vec<String> {
    let context = |kind| error.get(kind).map(ToString::to_string);
    let argument = context(ContextKind::InvalidArg);
    let takes_command = argument.is_some();
    let wrong = argument.or_else(|| context(ContextKind::InvalidSubcommand));
    let is_wrong = |word: &String| Some(word) == wrong.as_ref() && !word.starts_with('-');
    let Some(place) = words.iter().position(is_wrong) else {
        return Vec::new();
    };
    let usage = context(ContextKind::Usage).unwrap_or_default();
    let mut lines = Vec::new();
    if let Some(verb) = likely_verb(&words[place]).filter(|_| usage.contains(VERBS_USAGE)) {
        let mut line = words.to_vec();
        line[place] = verb;
        lines.push(format!("did you mean: {}", line.join(" ")));
    }
    if takes_command && usage.contains("-- ") && !words.iter().any(|word| word == "--") {
        let (options, command) = words.split_at(place);
        let line = [options, &["--".to_owned()], command].concat().join(" ");
        lines.push(format!("to run a command, put -- before it: {line}"));
    }
    lines
}

fn likely_verb(word: &str) -> Option<String> {
    grammar()
        .get_subcommands()
        .filter(|verb| !verb.is_hide_set() && word.len() <= VERB_BYTES_MAX)
        .flat_map(|verb| verb.get_name_and_visible_aliases())
        .map(|verb| (strsim::normalized_damerau_levenshtein(word, verb), verb))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, verb)| verb.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::arguments::CommandLine;

    fn suggested(line: &str) -> Vec<String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let error = CommandLine::try_parse_from(&words).err();
        error.map_or_else(Vec::new, |error| suggestions(&error, &words))
    }

    #[test]
    fn a_forgotten_double_dash_is_put_where_it_belongs() {
        for (given, meant) in [
            (
                "ckpt-run --interval 5m python train.py",
                "ckpt-run --interval 5m -- python train.py",
            ),
            ("ckpt-run ./train", "ckpt-run -- ./train"),
            (
                "ckpt-run run -i 5m ./train",
                "ckpt-run run -i 5m -- ./train",
            ),
            ("ckpt-run rehearse ./train", "ckpt-run rehearse -- ./train"),
        ] {
            let meant = format!("to run a command, put -- before it: {meant}");
            assert_eq!(suggested(given), [meant]);
        }
        for other in ["ckpt-run list ./train", "ckpt-run --no-such -- ./train"] {
            assert!(suggested(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn a_mistyped_verb_is_told_with_the_rest_of_its_line() {
        for (given, meant) in [
            ("ckpt-run snapshto", "ckpt-run snapshot"),
            ("ckpt-run lst --json", "ckpt-run list --json"),
            (
                "ckpt-run --store here staus -w",
                "ckpt-run --store here status -w",
            ),
            (
                "ckpt-run reherse -- python train.py",
                "ckpt-run rehearse -- python train.py",
            ),
            ("ckpt-run resum", "ckpt-run resume"),
            ("ckpt-run help snaphot", "ckpt-run help snapshot"),
        ] {
            let meant = format!("did you mean: {meant}");
            assert_eq!(suggested(given).first(), Some(&meant), "{given}");
        }
        for other in [
            "ckpt-run python train.py",
            "ckpt-run ./snapshot.sh",
            "ckpt-run run snapshto",
            "ckpt-run -- snapshto",
            "ckpt-run gpu-copie",
            "ckpt-run --no-such",
        ] {
            let lines = suggested(other);
            let is_verb = |line: &String| line.starts_with("did you mean");
            assert!(!lines.iter().any(is_verb), "{other}: {lines:?}");
        }
    }
}
