//! Error messages for command lines that clap does not accept.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};

use super::arguments::{PROGRAM, grammar};
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
    let about_an_option = error
        .get(ContextKind::InvalidArg)
        .is_some_and(|word| word.to_string().starts_with('-'));
    let about_a_word = matches!(
        error.kind(),
        ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument
    );
    if about_a_word && !about_an_option {
        let words: Vec<String> = arguments
            .iter()
            .skip(1)
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        if let Some(line) = with_verb(&words) {
            print::say(&format!("did you mean: {line}"));
        }
        if let Some(line) = with_dashes(&words) {
            print::say(&format!("to run a command, put -- before it: {line}"));
        }
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

/// Returns the place of the first word that is neither an option of ckpt-run nor a verb, and the verb before it.
fn stray(words: &[String]) -> Option<(usize, Option<&str>)> {
    let grammar = grammar();
    let takes_value = |word: &str| {
        grammar.get_arguments().any(|argument| {
            argument.get_action().takes_values()
                && (argument
                    .get_long()
                    .is_some_and(|long| word == format!("--{long}"))
                    || argument
                        .get_short()
                        .is_some_and(|short| word == format!("-{short}")))
        })
    };
    let (mut place, mut verb) = (0, None);
    loop {
        let word = words.get(place)?;
        if word == "--" {
            return None;
        }
        if word.starts_with('-') {
            place += if takes_value(word) { 2 } else { 1 };
        } else if verb.is_none() && (word == "help" || grammar.find_subcommand(word).is_some()) {
            verb = Some(word.as_str());
            place += 1;
        } else {
            return Some((place, verb));
        }
    }
}

/// Returns the line with the probable verb, if the word in the verb's place resembles one.
fn with_verb(words: &[String]) -> Option<String> {
    let (place, None | Some("help")) = stray(words)? else {
        return None;
    };
    let given = Some(&words[place]).filter(|word| word.len() <= VERB_BYTES_MAX)?;
    let grammar = grammar();
    let (_, verb) = grammar
        .get_subcommands()
        .filter(|verb| !verb.is_hide_set())
        .flat_map(|verb| verb.get_name_and_visible_aliases())
        .map(|verb| (strsim::normalized_damerau_levenshtein(given, verb), verb))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    let mut words = words.to_vec();
    verb.clone_into(&mut words[place]);
    Some(format!("{PROGRAM} {}", words.join(" ")))
}

/// Returns the line with `--` before its first word that is neither an option, `run` nor `rehearse`. Returns `None` if
/// there is no such word, or if the line is for another verb.
fn with_dashes(words: &[String]) -> Option<String> {
    if words.iter().any(|word| word == "--") {
        return None;
    }
    let (place, verb) = stray(words)?;
    if verb.is_some_and(|verb| verb != "run" && verb != "rehearse") {
        return None;
    }
    let (options, command) = words.split_at(place);
    let parts = [&[PROGRAM.to_owned()], options, &["--".to_owned()], command].concat();
    Some(parts.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').skip(1).map(str::to_owned).collect()
    }

    #[test]
    fn a_forgotten_double_dash_is_put_where_it_belongs() {
        let line = |text: &str| with_dashes(&words(text));
        assert_eq!(
            line("ckpt-run --interval 5m python train.py").unwrap(),
            "ckpt-run --interval 5m -- python train.py"
        );
        assert_eq!(line("ckpt-run ./train").unwrap(), "ckpt-run -- ./train");
        assert_eq!(
            line("ckpt-run run -i 5m ./train").unwrap(),
            "ckpt-run run -i 5m -- ./train"
        );
        assert_eq!(
            line("ckpt-run rehearse ./train").unwrap(),
            "ckpt-run rehearse -- ./train"
        );
        assert_eq!(line("ckpt-run list ./train"), None);
        assert_eq!(line("ckpt-run help snaphot"), None);
        assert_eq!(line("ckpt-run --no-such -- ./train"), None);
    }

    #[test]
    fn a_mistyped_verb_is_told_with_the_rest_of_its_line() {
        let line = |text: &str| with_verb(&words(text));
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
            assert_eq!(line(given).as_deref(), Some(meant));
        }
        for other in [
            "ckpt-run python train.py",
            "ckpt-run ./snapshot.sh",
            "ckpt-run run snapshto",
            "ckpt-run -- snapshto",
            "ckpt-run gpu-copie",
            "ckpt-run --no-such",
        ] {
            assert_eq!(line(other), None, "{other}");
        }
    }
}
