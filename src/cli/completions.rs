//! `ckpt-run completions`: the scripts with which a shell completes ckpt-run's command lines.

use std::process::ExitCode;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Arg, Command, ValueEnum};
use clap_complete::Shell;

use super::arguments::{PROGRAM, grammar};
use super::global::Failure;
use super::print;
use crate::config::{Isolation, RestartPolicy};

/// The name that `clap_complete` (4.6.11) gives ckpt-run in one half of its bash script, where it treats the hyphen as
/// a step down to a verb, and the name in the other half.
const BASH_NAMES: (&str, &str) = ("ckpt__subcmd__run", "ckpt__run");
/// Completion of the words after `--`, which `clap_complete` does not support. In bash and zsh the text is inserted at
/// the start of their functions, in fish at the end.
const BASH_JOB: (&str, &str) = ("_ckpt__run() {\n", include_str!("completions/job.bash"));
const ZSH_JOB: (&str, &str) = ("\n_ckpt-run() {\n", include_str!("completions/job.zsh"));
const FISH_JOB: &str = include_str!("completions/job.fish");
/// The place in the fish script that decides if a verb may follow, and the addition: no verb after `--`.
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
        // Elvish, PowerShell, and shells that clap_complete adds later.
        _ => script.into_owned(),
    })
}

/// Returns fish's completions for the possible values of a verb's argument, which `clap_complete` leaves out.
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

/// Returns fish's completions for the values of options before any verb. `clap_complete` looks for a verb while the
/// option's value is still missing, and finds none.
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

/// Returns the argument with its possible values if the settings define them: the settings parse them, not clap.
fn with_words(argument: Arg) -> Arg {
    let words = match argument.get_long() {
        Some("isolation") => words::<Isolation>(),
        Some("restart") => words::<RestartPolicy>(),
        Some(_) | None => return argument,
    };
    argument.value_parser(PossibleValuesParser::new(words))
}

fn words<T: ValueEnum>() -> Vec<PossibleValue> {
    let values = T::value_variants().iter();
    let words = values.filter_map(ValueEnum::to_possible_value);
    words
        .map(|word| PossibleValue::new(word.get_name().to_owned()))
        .collect()
}

/// Returns the command with only the parts that its help shows, because `clap_complete` also offers hidden ones. The
/// job is left out too: its words come after `--`, and `clap_complete` would treat verbs as its first word.
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
