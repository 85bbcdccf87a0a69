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

/// Snapshots a running GPU job, and restores it after a crash.
///
/// `ckpt-run -- ./train` starts the job, or continues it from its newest image.
#[derive(Debug, Parser)]
#[command(name = PROGRAM, version, after_help = SIGNALS, override_usage = format!("ckpt-run [OPTIONS] -- CMD [ARGS]...\n       {VERBS_USAGE}"))]
pub(super) struct CommandLine {
    #[command(flatten)]
    pub(super) global: Global,
    #[command(flatten)]
    pub(super) run: run::RunArguments,
    #[command(subcommand)]
    pub(super) verb: Option<Verb>,
}

/// The usage of verbs, which no verb itself has.
pub(super) const VERBS_USAGE: &str = "ckpt-run VERB [OPTIONS]";

const SIGNALS: &str = "\
Signals:
  SIGUSR1  snapshot, continue
  SIGUSR2  snapshot, stop, exit 75
  SIGTERM  like SIGUSR2, within the grace period; a second one stops at once
  SIGINT, SIGQUIT, SIGHUP  forwarded to the job
Exit codes:
  the job's own; 128+n if signal n killed it; 75 saved and stopped: run the same line again;
  76 another machine continues the run; 125 ckpt-run failed; 126, 127 the command cannot be run, or is not found";

#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Run a command under supervision; the same as `ckpt-run -- CMD`
    Run(run::RunArguments),
    /// Continue the store's run from its newest image, or from an older one
    #[command(visible_alias = "resume")]
    Restore(run::RestoreArguments),
    /// Kill and restore the job once and compare it with two uninterrupted runs; exit code 0 PASS, 1 FAIL, 3 INCONCLUSIVE
    Rehearse(rehearse::RehearseArguments),
    /// Request a snapshot, wait until it is durable, print the image's id
    Snapshot,
    /// Snapshot the job, stop it, and free its GPUs
    Pause,
    /// Continue a paused job
    Unpause {
        /// Wait until its GPUs have enough free memory
        #[arg(long)]
        wait: bool,
    },
    /// Snapshot the job and end the run; the same command line continues it
    Stop,
    /// Show the state of the run; exit code 3 if no supervisor runs
    Status {
        /// Repeat: a live view on a terminal, otherwise a line per change
        #[arg(short, long)]
        watch: bool,
    },
    /// Write an HTML page with charts of the run's history
    Report(report::ReportArguments),
    /// List the images
    List,
    /// Describe an image
    Show {
        /// Id of the image, or `latest`
        #[arg(default_value = "latest")]
        image: String,
    },
    /// Show the differences between two images
    Diff {
        /// Id of the older image
        from: String,
        /// Id of the newer image, or `latest`
        #[arg(default_value = "latest")]
        to: String,
    },
    /// Check every byte of images and report all damage
    Verify {
        /// Ids of the images, or `latest` [default: all]
        images: Vec<String>,
        /// Verify all images, as without ids
        #[arg(long, conflicts_with = "images")]
        all: bool,
    },
    /// Repair damaged images from intact copies of their data; remove those that cannot be repaired
    Repair(store::repair::RepairArguments),
    /// Copy an image, or all, into another store
    Copy(store::copy::CopyArguments),
    /// Write an image to one file, for `import`
    Export(store::export_import::ExportArguments),
    /// Create an image from a file that `export` wrote
    Import(store::export_import::ImportArguments),
    /// Keep an image regardless of the retention rules, until it is unpinned
    Pin {
        /// Id of the image, or `latest`
        image: String,
        /// Note, shown by `list` and `show`
        #[arg(
            long,
            value_name = "TEXT",
            default_value = "",
            hide_default_value = true
        )]
        note: String,
    },
    /// Release a pinned image, so that the retention rules apply to it again
    Unpin {
        /// Id of the image, or `latest`
        image: String,
    },
    /// Remove the named images, or those that no retention rule keeps
    Forget(store::forget::ForgetArguments),
    /// Remove data that no image needs
    Prune {
        /// Only print what would be removed
        #[arg(long)]
        dry_run: bool,
    },
    /// Show the interval that `--interval auto` would choose, and how it is calculated
    Plan(plan::PlanArguments),
    /// Print a file for a scheduler: systemd, slurm, slurm-preempt, kubernetes, docker, spot
    Template(template::TemplateArguments),
    /// Check whether this machine can snapshot and restore jobs
    Doctor,
    /// Suspend and resume CUDA processes by pid
    #[command(subcommand, after_help = cuda::HELP)]
    Cuda(cuda::CudaVerb),
    /// Show and check the settings
    #[command(subcommand)]
    Config(config::ConfigVerb),
    /// Generate keys for encrypted stores
    #[command(subcommand)]
    Key(key::KeyVerb),
    /// Print completions for a shell
    Completions {
        /// Shell
        shell: Shell,
    },
    /// Print the manual page, or write those of all verbs
    Man {
        /// Folder for the pages, ckpt-run.1 and one per verb; created if necessary
        #[arg(value_name = "DIR")]
        folder: Option<PathBuf>,
    },
    /// Copy GPU memory for a supervisor, which starts this verb
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
            "options of `run` cannot precede another verb; see ckpt-run --help",
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

    #[test]
    fn flags_of_all_verbs_can_be_repeated() {
        let parsed = |line: &str| CommandLine::try_parse_from(line.split(' '));
        for line in [
            "ckpt-run -vv -- job",
            "ckpt-run -v list -v",
            "ckpt-run --verbose list -v",
        ] {
            assert!(parsed(line).unwrap().global.verbose, "{line}");
        }
        assert!(parsed("ckpt-run -q --json list --json -q").is_ok());
        assert!(parsed("ckpt-run -q -v list").is_err());
    }
}
