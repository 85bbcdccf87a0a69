//! `ckpt-run rehearse`: tests with the user's own job if it can be snapshotted and restored.

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;
use nix::libc::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use super::global::{Failure, Global};
use super::print;
use crate::config::parse_duration;
use crate::history::time_in_words;
use crate::rehearsal::{Options, Outcome, RehearsalError, Report, Step, Verdict, rehearse};
use crate::run::{OURS, size};

/// The message before the start: a rehearsal has real effects.
const WARNING: &str = "rehearsal: this runs the job three times, and kills and restores it once. Each run has a copy of \
                       the working folder, if the folder is small enough; files outside of it are not copied, and the \
                       job's changes to them stay";
/// The time that a job has to show that it computes; enough for most jobs to load.
const SECONDS_DEFAULT: u64 = 30;
/// The time that a job has to end by itself; enough for a job that was made short, and short for one that does not end.
const END_WITHIN_DEFAULT: &str = "10s";
/// Exit code of a rehearsal that proves nothing.
const INCONCLUSIVE: u8 = 3;
/// Widths of the longest step name and of the longest outcome.
const NAME_WIDTH: usize = 10;
const OUTCOME_WIDTH: usize = 7;

/// Job and options of a rehearsal.
#[derive(Debug, Args)]
pub(super) struct RehearseArguments {
    /// Computing time before the first snapshot [default: until the job prints something, or has computed for 10 s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    after: Option<Duration>,
    /// Seconds for the job to show that it computes, at each step
    #[arg(long, value_name = "N", default_value_t = SECONDS_DEFAULT, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Time for the restored job to end; files are compared only if it does
    #[arg(long, value_name = "TIME", default_value = END_WITHIN_DEFAULT, value_parser = parse_duration)]
    end_within: Duration,
    /// Show the job's output on stderr
    #[arg(long)]
    show_output: bool,
    /// Keep the folder with images, logs and output, and print its path
    #[arg(long)]
    keep: bool,
    /// Command line of the job
    #[arg(last = true, value_name = "CMD", required = true)]
    command: Vec<OsString>,
}

pub(super) fn run(global: &Global, arguments: RehearseArguments) -> Result<ExitCode, Failure> {
    let settings = global.load(Vec::new())?;
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
        let value = usize::try_from(number).unwrap_or(0);
        signal_hook::flag::register_usize(number, Arc::clone(&signal), value)?;
    }
    let interrupted = || {
        let number = i32::try_from(signal.load(Ordering::SeqCst)).unwrap_or(0);
        (number != 0).then_some(number)
    };
    print::say(WARNING);
    let options = Options {
        program: std::env::current_exe()?,
        settings,
        command: arguments.command,
        after: arguments.after.unwrap_or_default(),
        patience: Duration::from_secs(arguments.seconds),
        end_within: arguments.end_within,
        show: arguments.show_output.then(|| Box::new(io::stderr()) as _),
        keep: arguments.keep,
        interrupted: &interrupted,
    };
    let mut tell = |step: &Step| {
        if !global.json {
            // The result is also reported at the end.
            let _ = print::print(&line(step));
        }
    };
    let report = rehearse(options, &mut tell).map_err(failure)?;
    if global.json {
        print::print_json(&report)?;
    } else {
        print::print(&verdict(&report))?;
    }
    Ok(ExitCode::from(match report.verdict {
        Verdict::Pass => 0,
        Verdict::Fail => 1,
        Verdict::Inconclusive => INCONCLUSIVE,
    }))
}

fn failure(error: RehearsalError) -> Failure {
    let code = match &error {
        RehearsalError::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(OURS),
        RehearsalError::Folder { .. }
        | RehearsalError::File { .. }
        | RehearsalError::Start { .. }
        | RehearsalError::Thread(_)
        | RehearsalError::Wait(_) => OURS,
    };
    Failure {
        code,
        ..Failure::from(error)
    }
}

fn line(step: &Step) -> String {
    let outcome = match step.outcome {
        Outcome::Ok => "ok",
        Outcome::Skipped => "skipped",
        Outcome::Unclear => "UNCLEAR",
        Outcome::Failed => "FAILED",
    };
    let (name, detail) = (step.name, &step.detail);
    format!("{outcome:OUTCOME_WIDTH$}  {name:NAME_WIDTH$}  {detail}\n")
}

fn verdict(report: &Report) -> String {
    let kept = report.kept.as_ref();
    let kept = kept.map_or_else(String::new, |folder| {
        format!("images and logs are kept in {}\n", folder.display())
    });
    if let Some(failure) = &report.failure {
        let word = match report.verdict {
            Verdict::Inconclusive => "INCONCLUSIVE",
            Verdict::Pass | Verdict::Fail => "FAIL",
        };
        return format!(
            "{word}: {}\n  -> {}\n{kept}",
            failure.reason, failure.remedy
        );
    }
    let figures = &report.figures;
    let times = |times: &[f64]| {
        let times: Vec<String> = times.iter().map(|time| time_in_words(*time)).collect();
        times.join(", ")
    };
    let checked = report.checked.iter();
    let mut rows: Vec<_> = checked.map(|text| ("checked", text.clone())).collect();
    rows.extend([
        ("frozen", times(&figures.freeze_seconds)),
        (
            "durable",
            format!("after {}", times(&figures.durable_seconds)),
        ),
    ]);
    rows.extend(
        figures
            .restore_seconds
            .map(|time| ("restore", time_in_words(time))),
    );
    if let (Some(raw), Some(stored)) = (figures.raw_bytes, figures.stored_bytes) {
        let added = figures
            .added_bytes
            .map(|bytes| format!(", the next one {} more", size(bytes)));
        let added = added.unwrap_or_default();
        rows.push((
            "image",
            format!("{}, {} stored{added}", size(raw), size(stored)),
        ));
    }
    rows.extend(interval(report).map(|text| ("interval", text)));
    let rows: String = rows
        .iter()
        .map(|(name, value)| format!("  {name:NAME_WIDTH$}{value}\n"))
        .collect();
    format!(
        "PASS: the job was killed and restored, and equals two uninterrupted runs\n{rows}{kept}"
    )
}

fn interval(report: &Report) -> Option<String> {
    let interval = as_argument(report.figures.interval_seconds?);
    let why = report.figures.interval_why.as_ref()?;
    Some(format!("--interval {interval}, or auto; {why}"))
}

/// Formats a time as `--interval` reads it.
fn as_argument(seconds: u64) -> String {
    match seconds {
        seconds if seconds % 60 == 0 => format!("{}m", seconds / 60),
        seconds => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rehearsal::Figures;

    fn report() -> Report {
        Report {
            pass: true,
            verdict: Verdict::Pass,
            failure: None,
            checked: vec!["stdout: equal up to line 9".to_owned()],
            not_kept: Vec::new(),
            command: vec!["train".to_owned()],
            steps: Vec::new(),
            output: Vec::new(),
            figures: Figures {
                freeze_seconds: vec![0.5, 0.4],
                durable_seconds: vec![2.0, 1.0],
                restore_seconds: Some(1.5),
                raw_bytes: Some(1 << 30),
                stored_bytes: Some(1 << 20),
                added_bytes: Some(1 << 10),
                interval_seconds: Some(150),
                interval_why: Some("arithmetic".to_owned()),
                assumed_mtbf_seconds: Some(21_600.0),
            },
            kept: None,
        }
    }

    #[test]
    fn a_pass_tells_what_was_measured_and_what_follows() {
        let text = verdict(&report());
        for part in [
            "PASS: ",
            "checked   stdout: equal up to line 9\n",
            "frozen    0.50 s, 0.40 s\n",
            "restore   1.5 s\n",
            "image     1.0 GiB, 1.0 MiB stored, the next one 1.0 KiB more\n",
            "interval  --interval 150s, or auto; arithmetic",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_fail_tells_why_and_what_to_do() {
        let failure = crate::rehearsal::Failure {
            kind: None,
            reason: "no".to_owned(),
            remedy: "do".to_owned(),
        };
        let failed = Report {
            pass: false,
            verdict: Verdict::Fail,
            failure: Some(failure),
            kept: Some("/k".into()),
            ..report()
        };
        assert_eq!(
            verdict(&failed),
            "FAIL: no\n  -> do\nimages and logs are kept in /k\n"
        );
        let unclear = Report {
            verdict: Verdict::Inconclusive,
            ..failed
        };
        assert!(verdict(&unclear).starts_with("INCONCLUSIVE: no\n  -> do\n"));
    }

    #[test]
    fn an_interval_is_written_as_the_option_takes_it() {
        for seconds in [10, 150, 3600] {
            let text = as_argument(seconds);
            assert_eq!(
                parse_duration(&text).unwrap(),
                Duration::from_secs(seconds),
                "{text}"
            );
        }
    }
}
