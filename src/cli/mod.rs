//! The command line: arguments in, exit code out. One file a verb; what they
//! do is in the library.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::config::{Config, ConfigError, Loaded, LogLevel, Override, Sources};
use crate::copier;
use crate::criu::Search;
use crate::run::{OURS, chain, read_key};
use crate::store::Store;

mod completions;
mod config;
pub(crate) mod control;
mod cuda;
pub mod doctor;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_cli;
mod key;
mod man;
mod plan;
mod print;
mod rehearse;
mod report;
mod run;
pub(crate) mod store;
mod template;
mod wrong_line;

/// What we are called.
const PROGRAM: &str = "ckpt-run";

/// Snapshots a GPU job, and restores it when it crashes, as if nothing had happened.
///
/// `ckpt-run -- ./train` starts the job, or goes on with it where its newest image is.
#[derive(Debug, Parser)]
#[command(name = PROGRAM, version, after_help = SIGNALS, override_usage = "ckpt-run [OPTIONS] -- CMD [ARGS]...\n       ckpt-run VERB [OPTIONS]")]
struct CommandLine {
    #[command(flatten)]
    global: Global,
    #[command(flatten)]
    run: run::RunArguments,
    #[command(subcommand)]
    verb: Option<Verb>,
}

const SIGNALS: &str = "\
Signals:
  SIGUSR1  snapshot, go on
  SIGUSR2  snapshot, stop, exit 75
  SIGTERM  as SIGUSR2 within the grace period; a second one stops at once
  SIGINT, SIGQUIT, SIGHUP  are passed on to the job
Exit codes:
  the job's own; 128+n when signal n killed it; 75 saved and stopped: run the same line again;
  125 a failure of ckpt-run's; 126, 127 the command cannot be run, is not found";

/// Options of every verb.
#[derive(Debug, Args)]
struct Global {
    /// Folder of the images [default: ./.ckpt-run]
    #[arg(long, global = true, value_name = "PATH")]
    store: Option<String>,
    /// Settings, instead of ./ckpt-run.toml
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// CRIU's program or the folder it is installed in
    #[arg(long, global = true, value_name = "PATH")]
    criu: Option<String>,
    /// Data as JSON
    #[arg(long, global = true)]
    json: bool,
    /// Warnings and errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// More about what is done
    #[arg(short, long, global = true)]
    verbose: bool,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run a command under supervision; the same as `ckpt-run -- CMD`
    Run(run::RunArguments),
    /// Go on with the run that the store holds from its newest image, or from an older one
    #[command(visible_alias = "resume")]
    Restore(run::RestoreArguments),
    /// Try on the job itself whether it can be kept alive: run it, snapshot it, kill it, restore it, compare
    Rehearse(rehearse::RehearseArguments),
    /// Ask the running supervisor for a snapshot, wait, print the image's id
    Snapshot,
    /// Snapshot the job, stop it, and free its GPUs for others
    Pause,
    /// Let a paused job go on
    Unpause {
        /// Wait until its GPUs have room for it
        #[arg(long)]
        wait: bool,
    },
    /// Snapshot the job and end the run, which goes on from there when the same line is run again
    Stop,
    /// Tell how the run is; exit code 3 where no supervisor runs
    Status {
        /// Go on telling: a live view on a terminal, otherwise a line for each change
        #[arg(short, long)]
        watch: bool,
    },
    /// Write what happened to the run, with charts, as one page of HTML
    Report(report::ReportArguments),
    /// List the images
    List,
    /// Show all about an image
    Show {
        /// Its id, or `latest`
        #[arg(default_value = "latest")]
        image: String,
    },
    /// Show what is different between two images
    Diff {
        /// The id of the older one
        from: String,
        /// The id of the newer one, or `latest`
        #[arg(default_value = "latest")]
        to: String,
    },
    /// Read images again, check every byte, name all that is bad
    Verify {
        /// Their ids, or `latest` [default: all]
        images: Vec<String>,
        /// All of them, which is what is done without ids
        #[arg(long, conflicts_with = "images")]
        all: bool,
    },
    /// Heal damaged images where that is possible, remove those that are lost
    Repair(store::repair::RepairArguments),
    /// Copy an image into another store
    Copy(store::copy::CopyArguments),
    /// Write an image as one file, which `import` reads
    Export(store::export_import::ExportArguments),
    /// Make an image of a file that `export` wrote
    Import(store::export_import::ImportArguments),
    /// Keep an image whatever the rules say, until it is unpinned
    Pin {
        /// Its id, or `latest`
        image: String,
        /// Why, for those who read the list
        #[arg(
            long,
            value_name = "TEXT",
            default_value = "",
            hide_default_value = true
        )]
        note: String,
    },
    /// Leave an image to the rules again
    Unpin {
        /// Its id, or `latest`
        image: String,
    },
    /// Remove images: those named, or those that no rule keeps
    Forget(store::forget::ForgetArguments),
    /// Remove what no image needs, and give its space back
    Prune {
        /// Only say what would go
        #[arg(long)]
        dry_run: bool,
    },
    /// Show the interval that `--interval auto` would choose, and its arithmetic
    Plan(plan::PlanArguments),
    /// Print a ready file for a scheduler: systemd, slurm, slurm-preempt, kubernetes, docker
    Template(template::TemplateArguments),
    /// Check whether this machine can snapshot and restore jobs
    Doctor,
    /// Suspend and resume CUDA processes by hand, by their pids
    #[command(subcommand, after_help = cuda::HELP)]
    Cuda(cuda::CudaVerb),
    /// Show the settings, and where they come from
    #[command(subcommand)]
    Config(config::ConfigVerb),
    /// Make keys for encrypted stores
    #[command(subcommand)]
    Key(key::KeyVerb),
    /// Print what a shell needs to complete command lines of ckpt-run
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, or write the pages of all verbs
    Man {
        /// Folder for the pages, ckpt-run.1 and one for each verb; made if need be
        #[arg(value_name = "DIR")]
        folder: Option<PathBuf>,
    },
    /// Copy GPU memory for a supervisor, which starts this by itself
    #[command(name = copier::ARGUMENT, hide = true)]
    GpuCopier,
}

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

/// Understands a command line as [`main`] does, and does nothing. The first of the words is the program's name.
///
/// # Errors
/// What is wrong with it, in words.
pub fn parses(words: &[&str]) -> Result<(), String> {
    match CommandLine::try_parse_from(words) {
        Ok(line) => chosen(line).map(drop).map_err(|failure| failure.text),
        Err(error) if wrong_line::is_asked_for(&error) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// The verb that a command line is for.
fn chosen(line: CommandLine) -> Result<(Global, Verb), Failure> {
    let CommandLine { global, run, verb } = line;
    let wrong = |text: &str| Failure {
        text: text.to_owned(),
        code: OURS,
    };
    match verb {
        None if run.command.is_empty() => Err(wrong(
            "nothing to run: give a command after --, as in: ckpt-run -- ./train (or --help)",
        )),
        None => Ok((global, Verb::Run(run))),
        Some(_) if run != run::RunArguments::default() => Err(wrong(
            "options of a run do not go before another verb; see ckpt-run --help",
        )),
        Some(verb) => Ok((global, verb)),
    }
}

/// All that the command line can be.
fn grammar() -> clap::Command {
    CommandLine::command()
}

/// A failure of ours, in words, and the exit code.
struct Failure {
    text: String,
    code: u8,
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self {
            text: chain(&error),
            code: OURS,
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
        // Started by a supervisor it does not get here: see `helper_main`.
        Verb::GpuCopier => Err(Failure {
            text: "gpu-copier is a part of ckpt-run that a supervisor starts by itself; its standard input has to be \
                   the supervisor's socket"
                .to_owned(),
            code: OURS,
        }),
    }
}

impl Global {
    /// Loads the settings, with these flags over all else.
    fn load(&self, overrides: Vec<Override>) -> Result<Loaded, ConfigError> {
        let overrides = self.overrides(overrides);
        crate::config::load(&Sources::from_process(self.config.clone(), overrides)?)
    }

    /// Those of a verb and those of all verbs.
    fn overrides(&self, mut overrides: Vec<Override>) -> Vec<Override> {
        let flags = [
            ("store", "--store", &self.store),
            ("criu.path", "--criu", &self.criu),
        ];
        for (key, flag, value) in flags {
            overrides.extend(value.clone().map(|value| Override { key, flag, value }));
        }
        overrides
    }

    /// What we say on stderr.
    fn log_level(&self, config: &Config) -> LogLevel {
        match (self.quiet, self.verbose) {
            (true, _) => LogLevel::Warn,
            (_, true) => LogLevel::Debug,
            (false, false) => config.log.level,
        }
    }

    /// Opens the store that is there.
    fn open(&self) -> Result<Store, Failure> {
        open(&self.load(Vec::new())?.config)
    }
}

/// Opens the store of these settings, with its key.
fn open(config: &Config) -> Result<Store, Failure> {
    let key = read_key(&config.encryption)?;
    Ok(Store::open_with(&config.store, key.as_ref())?)
}

/// The store's path as the user gave it, for messages.
fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        grammar().debug_assert();
    }

    #[test]
    fn options_of_the_job_are_not_ours() {
        let line = CommandLine::try_parse_from([
            "ckpt-run",
            "--interval",
            "5m",
            "--",
            "job",
            "--store",
            "x",
        ])
        .unwrap();
        assert_eq!(line.run.command, ["job", "--store", "x"]);
        assert_eq!(line.global.store, None);
    }
}
