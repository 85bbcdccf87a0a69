//! `ckpt-run status`: the state of the run, once or repeatedly.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::history::{Freeze, counted, time_in_words};
use crate::run::size;
use crate::store::Usage;
use crate::supervisor::{ControlError, State, Status, request_status, status_of_store};

#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_status;
mod live;
mod view;

/// Exit code if no supervisor runs, equal to that of `systemctl status` for a stopped service.
const NOT_RUNNING: u8 = 3;
/// Pause between two queries of a watched run: as often as a reader notices a change.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn run(global: &Global, watch: bool) -> Result<ExitCode, Failure> {
    let store = global.load(Vec::new())?.config.store;
    let terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if watch && terminal && !global.json {
        return Ok(exit_code(&live::run(&store)?));
    }
    let mut status = look(&store)?;
    print(global, &status, watch)?;
    while watch && status.state.is_supervised() {
        thread::sleep(LOOK_INTERVAL);
        let next = look(&store)?;
        if differs(&status, &next) {
            print(global, &next, watch)?;
        }
        status = next;
    }
    Ok(exit_code(&status))
}

fn exit_code(status: &Status) -> ExitCode {
    if status.state.is_supervised() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NOT_RUNNING)
    }
}

/// Returns the supervisor's status, or the status that the store has recorded.
fn look(store: &Path) -> Result<Status, Failure> {
    match request_status(store) {
        Ok(status) => Ok(status),
        // A supervisor that is just ending answers no more requests.
        Err(ControlError::NoSupervisor(_) | ControlError::Ended) => Ok(status_of_store(store)?),
        Err(error) => Err(error.into()),
    }
}

/// Returns true if a change is important enough for a line.
fn differs(one: &Status, other: &Status) -> bool {
    let essence = |status: &Status| {
        let last = status.last_snapshot().map(|last| last.image.clone());
        (
            status.state,
            last,
            status.summary.failed_snapshots,
            status.summary.crashes,
            status.summary.restores,
        )
    };
    essence(one) != essence(other)
}

fn print(global: &Global, status: &Status, line: bool) -> Result<ExitCode, Failure> {
    match (global.json, line) {
        (true, true) => print::print(&format!("{}\n", serde_json::to_string(status)?)),
        (true, false) => print::print_json(status),
        (false, true) => print::print(&format!("{}\n", in_a_line(status))),
        (false, false) => print::print(&in_full(status)),
    }
}

/// Returns the run's state and its duration.
fn headline(status: &Status) -> String {
    let since = match (status.since_seconds, status.since) {
        (Some(seconds), _) => format!(" for {}", time_in_words(seconds)),
        (None, Some(time)) => format!(" at {}", local(time)),
        (None, None) => String::new(),
    };
    match status.state {
        State::None => "no run".to_owned(),
        State::Killed => format!("not running: the supervisor was killed; {}", again(status)),
        State::Saved => format!("not running: stopped{since}; {}", again(status)),
        State::Finished => format!("not running: finished{since}"),
        State::Failed => format!("not running: the job failed{since}, no more restarts"),
        State::Error => format!("not running: ckpt-run failed{since}; {}", again(status)),
        // Every snapshot starts this state again, so its duration has no meaning.
        State::Running => format!("running, {}", up(status)),
        State::Starting
        | State::Snapshotting
        | State::Paused
        | State::Restoring
        | State::Waiting
        | State::Ending => format!("{}{since}, {}", status.state.as_str(), up(status)),
    }
}

/// Returns the effect of the same command line on a run that is not over.
fn again(status: &Status) -> &'static str {
    match status.usage {
        Some(Usage { images: 0, .. }) => {
            "there is no image: the same command line starts the job from the beginning"
        }
        _ => "the same command line continues the run",
    }
}

/// Returns the total time of the run, across snapshots and supervisors.
fn up(status: &Status) -> String {
    format!("up {}", time_in_words(status.summary.run_seconds))
}

/// Returns the time since the job's last restore.
fn back(status: &Status) -> Option<String> {
    let seconds = time_in_words(status.restored_seconds?);
    Some(format!("restored {seconds} ago"))
}

fn in_a_line(status: &Status) -> String {
    let mut parts = vec![headline(status)];
    parts.extend(back(status));
    parts.extend(
        status
            .last_snapshot()
            .map(|last| format!("newest image {}", last.image)),
    );
    parts.extend(
        status
            .work_at_risk_seconds
            .map(|at_risk| format!("{} of work at risk", time_in_words(at_risk))),
    );
    parts.join(", ")
}

/// Returns the headline and a line for each known fact.
fn in_full(status: &Status) -> String {
    let mut head = headline(status);
    if !status.command.is_empty() {
        head = format!("{head}: {}", print::plain(&status.command.join(" ")));
    }
    let rows = lines(status).map(|(name, value)| format!("  {name:<10}{value}\n"));
    format!("{head}\n{}", rows.collect::<String>())
}

fn lines(status: &Status) -> impl Iterator<Item = (&'static str, String)> {
    let rows = [
        ("pids", pids(status)),
        ("preempted", preempted(status)),
        ("restored", restored(status)),
        ("last", status.last_snapshot().map(snapshot)),
        ("frozen", frozen(status)),
        ("failed", failed(status)),
        ("next", next(status)),
        ("at risk", at_risk(status)),
        ("restarts", restarts(status)),
        ("store", store(status)),
        ("remote", remote(status)),
        ("so far", so_far(status)),
    ];
    rows.into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
}

/// Returns the newest image in the remote store, and what is missing there.
fn remote(status: &Status) -> Option<String> {
    let remote = status.remote.as_ref()?;
    let uploaded = remote.uploaded.map_or_else(
        || format!("no image in {}", remote.url),
        |image| format!("{image} in {}", remote.url),
    );
    let waiting = remote
        .waiting
        .map_or_else(String::new, |image| format!(", {image} is to follow"));
    let failure = remote.failure.as_ref();
    let failure = failure.map_or_else(String::new, |reason| format!("; {}", print::plain(reason)));
    Some(format!("{uploaded}{waiting}{failure}"))
}

/// Returns the cloud's notice, if it takes this machine back.
fn preempted(status: &Status) -> Option<String> {
    let notice = status.preemption?;
    let (cloud, action) = (notice.cloud.name(), notice.action.as_str());
    let time = local(notice.deadline);
    Some(format!(
        "{cloud} takes this machine back at {time} ({action})"
    ))
}

fn pids(status: &Status) -> Option<String> {
    let supervisor = format!("supervisor {}", status.pid?);
    Some(match status.job_pid {
        Some(job) => format!("{supervisor}, job {job}"),
        None => supervisor,
    })
}

fn restored(status: &Status) -> Option<String> {
    let (image, time) = (status.restored_image.as_ref()?, local(status.restored?));
    let ago = time_in_words(status.restored_seconds?);
    Some(format!("{image} at {time}, {ago} ago"))
}

fn snapshot(last: &Freeze) -> String {
    format!(
        "{} at {} ({}): frozen {}, {}, {} new in the store",
        last.image,
        local(last.time),
        last.trigger,
        time_in_words(last.freeze_seconds),
        size(last.raw_bytes),
        size(last.stored_bytes),
    )
}

/// Returns the history of freezes, if there is one.
fn frozen(status: &Status) -> Option<String> {
    let times = status.snapshots.iter();
    let times: Vec<String> = times.map(|one| time_in_words(one.freeze_seconds)).collect();
    (times.len() > 1).then(|| times.join(", "))
}

fn failed(status: &Status) -> Option<String> {
    let count = status.failed_in_a_row;
    (count > 0).then(|| format!("{} since then", counted(count, "snapshot")))
}

fn next(status: &Status) -> Option<String> {
    let snapshot = status.next_snapshot_seconds;
    let restart = status.next_restart_seconds;
    let snapshot = snapshot.map(|wait| format!("snapshot in {}", time_in_words(wait)));
    snapshot.or_else(|| restart.map(|wait| format!("restart in {}", time_in_words(wait))))
}

fn at_risk(status: &Status) -> Option<String> {
    let seconds = status.work_at_risk_seconds?;
    Some(format!("{} of work", time_in_words(seconds)))
}

fn restarts(status: &Status) -> Option<String> {
    let used = status.restarts_used?;
    Some(match status.restarts_left {
        Some(left) => format!("{used} since the newest image, {left} left"),
        None => format!("{used} since the newest image, no limit"),
    })
}

fn store(status: &Status) -> Option<String> {
    let usage = status.usage?;
    let path = status.store.display();
    let images = counted(usage.images, "image");
    Some(format!("{images}, {} in {path}", size(usage.bytes)))
}

fn so_far(status: &Status) -> Option<String> {
    status.run?;
    Some(status.summary.in_words())
}

fn local(time: jiff::Timestamp) -> String {
    let zoned = time.to_zoned(jiff::tz::TimeZone::system());
    zoned.strftime("%Y-%m-%d %H:%M:%S").to_string()
}
