//! Command lines that clap does not understand: what is said of them.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};

use super::{grammar, output};
use crate::supervisor::OURS;

/// Explains a command line that clap does not understand; `ckpt-run ./train` lacks its `--`.
pub(super) fn explain(error: &clap::Error, arguments: &[OsString]) -> ExitCode {
    // A reader that went away has seen what it wanted.
    let _ = error.print();
    if is_asked_for(error) {
        return ExitCode::SUCCESS;
    }
    let about_an_option = error
        .get(ContextKind::InvalidArg)
        .is_some_and(|word| word.to_string().starts_with('-'));
    if matches!(
        error.kind(),
        ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument
    ) && !about_an_option
        && let Some(line) = with_dashes(arguments)
    {
        output::say(&format!("to run a command, put -- before it: {line}"));
    }
    ExitCode::from(OURS)
}

/// Whether it is no error: help, or the version.
pub(super) fn is_asked_for(error: &clap::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    )
}

/// The line with `--` before its first word that is no option, `run` or `rehearse`; `None` when there is none, or
/// when it is for another verb.
fn with_dashes(arguments: &[OsString]) -> Option<String> {
    let words: Vec<String> = arguments
        .iter()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if words.iter().any(|word| word == "--") {
        return None;
    }
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
        if word.starts_with('-') {
            place += if takes_value(word) { 2 } else { 1 };
        } else if verb.is_none() && grammar.find_subcommand(word).is_some() {
            verb = Some(word);
            place += 1;
        } else {
            break;
        }
    }
    if verb.is_some_and(|verb| verb != "run" && verb != "rehearse") {
        return None;
    }
    let (options, command) = words.split_at(place);
    let parts = [
        &["ckpt-run".to_owned()],
        options,
        &["--".to_owned()],
        command,
    ]
    .concat();
    Some(parts.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forgotten_double_dash_is_put_where_it_belongs() {
        let line =
            |text: &str| with_dashes(&text.split(' ').map(OsString::from).collect::<Vec<_>>());
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
        assert_eq!(line("ckpt-run --no-such -- ./train"), None);
    }
}
