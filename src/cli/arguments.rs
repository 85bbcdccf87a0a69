//! The grammar of the command line: every verb and its options.

use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use super::global::{Failure, Global};
use super::{config, cuda, key, plan, rehearse, report, run, store, template, wrong_line};
use crate::copier;
use crate::run::OURS;

/// Name of the program.
pub(super) const PROGRAM: &str = "ckpt-run";

/// Snapshots a GPU job, and restores it when it crashes, as if nothing had happened.
///
/// `ckpt-run -- ./train` starts the job, or goes on with it where its newest image is.
#[derive(Debug, Parser)]
#[command(name = PROGRAM, version, after_help = SIGNALS, override_usage = "ckpt-run [OPTIONS] -- CMD [ARGS]...\n       ckpt-run VERB [OPTIONS]")]
pub(super) struct CommandLine {
    #[command(flatten)]
    pub(super) global: Global,
    #[command(flatten)]
    pub(super) run: run::RunArguments,
    #[command(subcommand)]
    pub(super) verb: Option<Verb>,
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

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Run a command under supervision; the same as `ckpt-run -- CMD`
    Run(run::RunArguments),
    /// Go on with the run that the store holds from its newest image, or from an older one
    #[command(visible_alias = "resume")]
    Restore(run::RestoreArguments),
    /// Compare a killed and restored run of the job with two uninterrupted ones; exit code 0 PASS, 1 FAIL, 3 INCONCLUSIVE
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

/// Parses a command line as [`main`](super::main) does and does nothing else. The first word is the program's name.
///
/// # Errors
/// The message that the user would see.
pub fn parses(words: &[&str]) -> Result<(), String> {
    match CommandLine::try_parse_from(words) {
        Ok(line) => chosen(line).map(drop).map_err(|failure| failure.text),
        Err(error) if wrong_line::is_asked_for(&error) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the verb of a command line.
pub(super) fn chosen(line: CommandLine) -> Result<(Global, Verb), Failure> {
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

/// Returns the whole grammar.
pub(super) fn grammar() -> clap::Command {
    CommandLine::command()
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
