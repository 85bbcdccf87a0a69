//! The way from the process's arguments to a verb and its exit code.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use super::arguments::{CommandLine, Verb, chosen};
use super::global::{Failure, Global};
use super::{
    completions, config, control, cuda, doctor, key, man, plan, print, rehearse, report, run,
    store, template, wrong_line,
};
use crate::criu::Search;
use crate::run::OURS;

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let line = match CommandLine::try_parse_from(&arguments) {
        Ok(line) => line,
        Err(error) => return wrong_line::explain(error, &arguments),
    };
    match chosen(line).and_then(|(global, verb)| dispatch(&global, verb)) {
        Ok(code) => code,
        Err(failure) => {
            print::fail(&failure.text);
            ExitCode::from(failure.code)
        }
    }
}

fn dispatch(global: &Global, verb: Verb) -> Result<ExitCode, Failure> {
    match verb {
        Verb::Run(arguments) => run::run(global, arguments),
        Verb::Restore(arguments) => run::restore(global, &arguments),
        Verb::Rehearse(arguments) => rehearse::run(global, arguments),
        Verb::Snapshot => control::snapshot::run(global),
        Verb::Pause => control::pause::pause(global),
        Verb::Unpause { wait } => control::pause::unpause(global, wait),
        Verb::Stop => control::pause::stop(global),
        Verb::Status { watch } => control::status::run(global, watch),
        Verb::Report(arguments) => report::run(global, &arguments),
        Verb::List => store::list::run(global),
        Verb::Show { image } => store::show::run(global, &image),
        Verb::Diff { from, to } => store::diff::run(global, &from, &to),
        Verb::Verify { images, all: _ } => store::verify::run(global, &images),
        Verb::Repair(arguments) => store::repair::run(global, &arguments),
        Verb::Copy(arguments) => store::copy::run(global, &arguments),
        Verb::Export(arguments) => store::export_import::export(global, &arguments),
        Verb::Import(arguments) => store::export_import::import(global, &arguments),
        Verb::Pin { image, note } => store::pin::pin(global, &image, &note),
        Verb::Unpin { image } => store::pin::unpin(global, &image),
        Verb::Forget(arguments) => store::forget::run(global, &arguments),
        Verb::Prune { dry_run } => store::prune::run(global, dry_run),
        Verb::Plan(arguments) => plan::run(global, arguments),
        Verb::Template(arguments) => template::run(global, &arguments),
        Verb::Doctor => {
            let config = global.load(Vec::new())?.config;
            let search = Search::new(config.criu.path);
            doctor::run(global.json, &config.store, &search)
        }
        Verb::Cuda(verb) => cuda::run(global, &verb),
        Verb::Config(verb) => config::run(global, &verb),
        Verb::Key(verb) => key::run(&verb),
        Verb::Completions { shell } => completions::run(shell),
        Verb::Man { folder } => man::run(folder.as_deref()),
        // A process that a supervisor started does not get here: see `helper_main`.
        Verb::GpuCopier => Err(Failure {
            text:
                "gpu-copier is internal: the supervisor starts it, with a socket as standard input"
                    .to_owned(),
            code: OURS,
        }),
    }
}
