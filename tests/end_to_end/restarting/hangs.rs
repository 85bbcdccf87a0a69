//! Jobs that neither end nor make progress: the signs, the diagnosis, and the restore.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{
    COUNT, ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, lines, state, wait_until,
};

/// Job like `COUNT` that runs until there is a file `go`, and sleeps for ever, once, when there is a file `stuck`.
const STICKS: &str = r#"
import os, time
log = open("log", "w")
i = 0
while not os.path.exists("go"):
    print(i, flush=True)
    log.write(f"{i}\n"); log.flush()
    i += 1
    time.sleep(0.05)
    if os.path.exists("stuck"):
        time.sleep(10 ** 6)
"#;

/// Prints all the time until there is a file `go`; sleeps for ever when there is a file `stuck`.
const TALKS: &str = r#"
import os, time
print("ready", flush=True)
while not os.path.exists("go"):
    print(".", flush=True)
    time.sleep(0.05)
    if os.path.exists("stuck"):
        time.sleep(10 ** 6)
"#;

fn start(place: &Place, settings: &str, options: &[&str], script: &str) -> Run {
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    place.start_python(options, script)
}

fn wait(time: Duration) {
    let begun = Instant::now();
    wait_until("some time to pass", || begun.elapsed() >= time);
}

pub(super) fn hang_log(place: &Place) -> String {
    let entries = fs::read_dir(place.file(".ckpt-run/logs"))
        .unwrap()
        .flatten();
    let mut paths = entries.map(|entry| entry.path());
    let is_one = |path: &Path| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("hang-")
    };
    let path = paths.find(|path| is_one(path)).expect("a log of the hang");
    assert!(
        place.text("err").contains(path.to_str().unwrap()),
        "{}",
        place.text("err")
    );
    fs::read_to_string(path).unwrap()
}

#[apply(as_root)]
fn a_job_that_falls_silent_is_written_down_killed_and_restored() {
    let place = Place::new();
    let settings = "hang.output = '2s'\nhooks.on_hang = 'rm stuck; echo $CKPT_RUN_REASON $CKPT_RUN_IMAGE; \
        test -f $CKPT_RUN_DIAGNOSIS && echo $CKPT_RUN_HOOK > told'";
    let mut run = start(&place, settings, &ON_REQUEST, STICKS);
    place.wait_for("log", "5\n");
    place.snapshot();
    let named = run.job_named();
    fs::write(place.file("stuck"), "").unwrap();
    place.wait_for("err", "the job hangs, no output for ");
    let said = place.text("err");
    let (_, silence) = said.split_once("the job hangs, no output for ").unwrap();
    let seconds = silence.split_whitespace().next().unwrap();
    assert!(seconds.parse::<f64>().unwrap() >= 2.0, "{said}");
    let reason = format!("no output for {seconds} s");
    let counted = || place.text("out").lines().count();
    let hung = counted();
    wait_until("more than before it hung", || counted() > hung + 5);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let all = lines(counted());
    assert_eq!(place.text("out"), all);
    assert_eq!(place.text("log"), all);
    assert_eq!(place.text("told"), "on_hang\n");
    assert!(
        place
            .text("err")
            .contains(&format!("hook on_hang: {reason}")),
        "{}",
        place.text("err")
    );
    let log = hang_log(&place);
    for part in [
        &reason,
        &named,
        "python3 -u job.py",
        "S (sleeping)",
        "nanosleep",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    let state = place.text(".ckpt-run/run.json");
    assert!(state.contains("\"failures\": 1"), "{state}");
}

#[apply(as_root_and_user)]
fn images_of_the_silence_are_not_restored() {
    let place = Place::new();
    let settings =
        "hang.output = '5s'\nhooks.on_hang = 'rm stuck; touch go'\nretention.keep_last = 50";
    let mut run = start(&place, settings, &["--interval", "1s"], TALKS);
    place.wait_for("out", "ready");
    let good = place.snapshot();
    // More than the delay of samples.
    wait(Duration::from_secs(2));
    fs::write(place.file("stuck"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let errors = place.text("err");
    assert!(
        errors.contains("skipping the images that were taken while the job was silent"),
        "{errors}"
    );
    let restored = errors
        .lines()
        .find(|line| line.contains("ckpt-run: restored"))
        .unwrap();
    let id = restored
        .split("image=")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap();
    // The schedule may have taken another image before the silence.
    assert!(id >= good.as_str(), "{errors}");
    let newest = place.images().last().unwrap()["id"].clone();
    assert!(
        newest.as_str().is_some_and(|newest| id < newest),
        "{errors}"
    );
    assert_eq!(errors.matches("the job hangs").count(), 1, "{errors}");
}

/// Reads a pipe, and computes for a moment whenever a debugger has a look.
const READS: &str = r#"
import os, signal, time
def disturbed(*_):
    begun = time.process_time()
    while time.process_time() < begun + 0.2: pass
    open("disturbed", "w").close()
signal.signal(signal.SIGUSR1, disturbed)
print("ready", flush=True)
open("pipe").read()
"#;

#[apply(as_root)]
fn a_job_that_uses_no_cpu_can_be_reported_alone_and_once() {
    let place = Place::new();
    // On a loaded machine the job itself gets less than one clock tick in a second.
    let settings = "[hang]\ncpu = '5s'\naction = 'report'";
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    nix::unistd::mkfifo(&place.file("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let seen = place.file("disturbed").display().to_string();
    let tool = format!(
        "#!/bin/sh\nkill -USR1 $4; until test -e {seen}; do sleep 0.05; done; echo a stack\n"
    );
    fs::create_dir(place.file("bin")).unwrap();
    fs::write(place.file("bin/py-spy"), tool).unwrap();
    fs::set_permissions(place.file("bin/py-spy"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", place.file("bin").display());
    let mut run = place.start_python_with(&ON_REQUEST, READS, |command| {
        command.env("PATH", path);
    });
    place.wait_for("err", "the job hangs, no CPU time used for");
    let named = run.job_named();
    assert!(hang_log(&place).contains(&named));
    assert!(hang_log(&place).contains("a stack"), "{}", hang_log(&place));
    wait(Duration::from_secs(6));
    fs::write(place.file("pipe"), "go").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let errors = place.text("err");
    assert_eq!(errors.matches("the job hangs").count(), 1, "{errors}");
    assert!(errors.contains("no action is taken"), "{errors}");
}

#[apply(as_root_and_user)]
fn snapshots_do_not_hide_that_a_job_uses_no_cpu() {
    let place = Place::new();
    let settings = "[hang]\ncpu = '3s'\naction = 'report'\n[retention]\nkeep_last = 50";
    // Large enough that snapshots cost its processes CPU time.
    let script = "import os, time\n\
        content = os.urandom(100 << 20)\n\
        print('ready', flush=True)\n\
        while not os.path.exists('still'): sum(range(10 ** 5)); time.sleep(0.01)\n\
        time.sleep(10 ** 6)\n";
    let _run = start(&place, settings, &["--interval", "1s"], script);
    place.wait_for("out", "ready");
    let newest = || {
        let images = place.images();
        let ids = images.iter().map(|image| image["id"].as_str().unwrap());
        ids.max().unwrap_or_default().to_owned()
    };
    let more_than = |id: &str| newest().as_str() > id;
    let before = place.snapshot();
    wait_until("one by the interval", || more_than(&before));
    let second = newest();
    wait_until("another", || more_than(&second));
    let errors = place.text("err");
    assert!(!errors.contains("the job hangs"), "{errors}");
    let last = newest();
    fs::write(place.file("still"), "").unwrap();
    place.wait_for("err", "the job hangs, no CPU time used for");
    assert!(more_than(&last), "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn a_heartbeat_that_stops_is_a_hang_though_the_job_computes() {
    let place = Place::new();
    let settings = "[hang]\nheartbeat = 'beat'\nheartbeat_timeout = '2s'\naction = 'report'";
    let script = "import os, pathlib, time\n\
        while not os.path.exists('go'):\n\
        \x20   if not os.path.exists('still'): pathlib.Path('beat').touch()\n\
        \x20   print('.', flush=True); time.sleep(0.02)\n";
    let mut run = start(&place, settings, &ON_REQUEST, script);
    wait_until("a beat", || place.file("beat").exists());
    wait(Duration::from_secs(3));
    assert!(
        !place.text("err").contains("hangs"),
        "{}",
        place.text("err")
    );
    fs::write(place.file("still"), "").unwrap();
    place.wait_for("err", "the job hangs, no heartbeat for");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn a_signal_that_the_job_survives_does_not_end_the_watch() {
    let place = Place::new();
    let settings =
        "hang.output = '3s'\nsnapshot.grace = '1s'\nhooks.on_hang = 'rm stuck; touch go'";
    let survives = format!("import signal\nsignal.signal(signal.SIGHUP, lambda *_: None)\n{TALKS}");
    let mut run = start(&place, settings, &ON_REQUEST, &survives);
    place.wait_for("out", "ready");
    place.snapshot();
    run.signal(Signal::SIGHUP);
    fs::write(place.file("stuck"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(place.text("err").contains("the job hangs, no output"));
}

#[apply(as_root_and_user)]
fn time_of_a_pause_or_a_stop_is_no_silence() {
    let place = Place::new();
    fs::write(place.file("ckpt-run.toml"), "hang.output = '2s'").unwrap();
    let mut run = place.start_python_with(&ON_REQUEST, COUNT, |command| {
        std::os::unix::process::CommandExt::process_group(command, 0);
    });
    place.wait_for("log", "5\n");
    let job = run.job();
    assert!(
        place.verb(&["pause"]).status.success(),
        "{}",
        place.text("err")
    );
    wait(Duration::from_secs(3));
    assert!(
        place.verb(&["unpause"]).status.success(),
        "{}",
        place.text("err")
    );
    run.signal(Signal::SIGTSTP);
    wait_until("both to stop", || {
        state(run.pid()) == Some('T') && state(job) == Some('T')
    });
    wait(Duration::from_secs(3));
    place.go();
    run.signal(Signal::SIGCONT);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(
        !place.text("err").contains("hangs"),
        "{}",
        place.text("err")
    );
    assert_eq!(place.text("out"), lines(40));
}

#[apply(as_root)]
fn repeatedly_hanging_job_ends_the_run() {
    let place = Place::new();
    fs::write(place.file("ckpt-run.toml"), "hang.output = '3s'").unwrap();
    let mut run = place.start_python_with(&ON_REQUEST, TALKS, |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    });
    place.wait_for("out", "ready");
    place.snapshot();
    fs::write(place.file("stuck"), "").unwrap();
    assert_eq!(run.wait(), 137, "{}", place.text("err"));
    let errors = place.text("err");
    assert_eq!(errors.matches("the job hangs").count(), 3, "{errors}");
    assert!(
        errors.contains("crashed 3 times without progress"),
        "{errors}"
    );
}
