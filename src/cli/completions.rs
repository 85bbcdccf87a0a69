//! `ckpt-run completions`: what a shell needs to complete our command lines.

use std::process::ExitCode;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Arg, Command};
use clap_complete::Shell;

use super::arguments::{PROGRAM, grammar};
use super::global::Failure;
use super::print;
use crate::config::{Choice, Isolation, RestartPolicy};

/// How `clap_complete` (4.6.11) names us in one half of its bash script, where it takes the hyphen for
/// a step down to a verb, and in the other half.
const BASH_NAMES: (&str, &str) = ("ckpt__subcmd__run", "ckpt__run");
/// What completes the words after `--`, which `clap_complete` knows nothing of: in bash and zsh where their functions
/// begin, in fish at the end.
const BASH_JOB: (&str, &str) = ("_ckpt__run() {\n", include_str!("completions/job.bash"));
const ZSH_JOB: (&str, &str) = ("\n_ckpt-run() {\n", include_str!("completions/job.zsh"));
const FISH_JOB: &str = include_str!("completions/job.fish");
/// In fish, where it is asked whether a verb may come: not after `--`.
const FISH_VERB: (&str, &str) = (
    "    set -e cmd[1]\n",
    "    contains -- -- $cmd\n    and return 1\n",
);

pub(super) fn run(shell: Shell) -> Result<ExitCode, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut visible(&grammar()), PROGRAM, &mut script);
    let script = String::from_utf8_lossy(&script);
    let after = |text: &str, (place, what): (&str, &str)| {
        text.replacen(place, &format!("{place}{what}"), 1)
    };
    let (wrong, right) = BASH_NAMES;
    print::print(&match shell {
        Shell::Bash => after(&script.replace(wrong, right), BASH_JOB),
        Shell::Zsh => after(&script, ZSH_JOB),
        Shell::Fish => {
            let (values, options) = (fish_values(&grammar()), fish_options(&grammar()));
            format!("{}{values}{options}{FISH_JOB}", after(&script, FISH_VERB))
        }
        // Elvish, PowerShell, and those that clap_complete learns.
        _ => script.into_owned(),
    })
}

/// What fish is not told by `clap_complete`: the words that a verb's argument can be.
fn fish_values(command: &Command) -> String {
    let line = |verb: &Command| {
        let values = verb.get_positionals().flat_map(Arg::get_possible_values);
        let values: Vec<String> = values.map(|value| value.get_name().to_owned()).collect();
        let (verb, values) = (verb.get_name(), values.join(" "));
        let when = format!("__fish_ckpt_run_using_subcommand {verb}");
        (!values.is_empty())
            .then(|| format!("complete -c {PROGRAM} -n \"{when}\" -f -a \"{values}\"\n"))
    };
    command.get_subcommands().filter_map(line).collect()
}

/// In fish, the words of options before any verb: `clap_complete` looks for a verb with the option's value still missing,
/// and gives up.
fn fish_options(command: &Command) -> String {
    let options = command.get_arguments().cloned().map(with_words);
    let line = |option: Arg| {
        let long = option.get_long()?;
        let words = option.get_possible_values();
        let words: Vec<&str> = words.iter().map(PossibleValue::get_name).collect();
        let when = format!("string match -q -- --{long} (commandline -opc)[-1]");
        let takes = option.get_action().takes_values() && !words.is_empty();
        takes.then(|| {
            let words = words.join(" ");
            format!("complete -c {PROGRAM} -n \"{when}\" -l {long} -x -a \"{words}\"\n")
        })
    };
    options.filter_map(line).collect()
}

/// The argument with the words that its value can be, where the settings know them: they read it, not clap.
fn with_words(argument: Arg) -> Arg {
    let words = match argument.get_long() {
        Some("isolation") => Isolation::words(),
        Some("restart") => RestartPolicy::words(),
        Some(_) | None => return argument,
    };
    argument.value_parser(PossibleValuesParser::new(words))
}

/// The command as far as its help shows it: `clap_complete` offers what is hidden, too. Without the job, too, whose words
/// come after `--`: it would take verbs for its first.
fn visible(command: &Command) -> Command {
    let shown = |one: &&Arg| !one.is_hide_set() && !one.is_last_set();
    let arguments = command.get_arguments().filter(shown);
    let verbs = command.get_subcommands().filter(|one| !one.is_hide_set());
    let aliases = command.get_visible_aliases().map(str::to_owned);
    let made = Command::new(command.get_name().to_owned())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(arguments.cloned().map(with_words))
        .subcommands(verbs.map(visible))
        .visible_aliases(aliases);
    match command.get_version() {
        Some(version) => made.version(version.to_owned()),
        None => made,
    }
}
