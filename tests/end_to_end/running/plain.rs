//! Jobs without namespaces: the job is a plain child, and nevertheless none of its processes is left.

use std::fs;
use std::process::Command;

use crate::harness::{
    COUNT, Place, Run, apply, as_root, as_root_and_user, descendants, is_dead, lines, state,
    wait_for_descendant, wait_until,
};

const PLAIN: [&str; 4] = ["--isolation", "none", "--interval", "never"];

/// Job that leaves a daemon and an orphan in its own group, writes their pids and then executes `then`.
fn with_orphans(then: &str) -> String {
    format!(
        "setsid sh -c 'echo $$ > daemon.new; mv daemon.new daemon; exec sleep 1000' & \
         sh -c 'sleep 1000 & echo $! > orphan.new; mv orphan.new orphan'; \
         while ! test -e daemon; do sleep 0.02; done; echo ready; {then}"
    )
}

fn left_behind(place: &Place) -> Vec<i32> {
    let pid = |name| place.text(name).trim().parse().unwrap();
    vec![pid("daemon"), pid("orphan")]
}

/// Returns the pid of the Python job.
pub fn python(run: &Run) -> i32 {
    wait_for_descendant(run.pid(), "the job's process", |pid| {
        fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.ends_with("python3\0-u\0job.py\0"))
    })
}

#[apply(as_root_and_user)]
fn orphans_of_a_plain_job_end_with_it() {
    let place = Place::new();
    let mut run = place.start(&PLAIN, &["sh", "-c", &with_orphans("exit 6")]);
    assert_eq!(run.wait(), 6, "{}", place.text("err"));
    for pid in left_behind(&place) {
        assert!(is_dead(pid), "{pid} lives");
    }
}

#[apply(as_root_and_user)]
fn a_plain_job_does_not_outlive_a_killed_supervisor() {
    let place = Place::new();
    let run = place.start(&PLAIN, &["sh", "-c", &with_orphans("exec sleep 1000")]);
    place.wait_for("out", "ready");
    let mut all = descendants(run.pid());
    assert!(all.len() >= 4, "{all:?}");
    all.extend(left_behind(&place));
    drop(run); // SIGKILL
    wait_until("the job's end", || all.iter().all(|pid| is_dead(*pid)));
}

#[apply(as_root_and_user)]
fn a_plain_job_is_stopped_and_continued_with_us() {
    use nix::sys::signal::Signal;
    let place = Place::new();
    let mut run = place.start_python(&PLAIN, COUNT);
    place.wait_for("log", "3\n");
    let job = python(&run);
    run.signal(Signal::SIGTSTP);
    wait_until("both to stop", || {
        state(run.pid()) == Some('T') && state(job) == Some('T')
    });
    place.go();
    run.signal(Signal::SIGCONT);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), lines(40));
}

#[apply(as_root)]
fn plain_job_is_restored_while_its_pids_are_free() {
    let place = Place::new();
    fs::write(place.file("job.py"), COUNT).unwrap();
    // Without a sandbox the changes of files are not watched.
    let mut run = place.start_with(&PLAIN, &["python3", "-u", "job.py"], |command| {
        command.env("CKPT_RUN_FILES_ON_LOST", "warn");
    });
    place.wait_for("log", "5\n");
    place.snapshot();
    place.wait_for("log", "10\n");
    let job = python(&run);
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(job),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

#[apply(as_root)]
fn missing_privileges_are_reported_at_the_start() {
    let place = Place::new();
    // Still root, with access to all files here, but without its capabilities.
    let ours = place.command(&["--interval", "never", "--", "true"]);
    let mut command = Command::new("setpriv");
    command
        .args(["--bounding-set=-all", "--inh-caps=-all"])
        .arg(ours.get_program())
        .args(ours.get_args())
        .current_dir(place.path())
        .env("XDG_CONFIG_HOME", place.path());
    let mut run = place.spawn(command, |_| {});
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert!(said.contains("running without isolation"), "{said}");
    assert!(said.contains("snapshots need privileges"), "{said}");
}
