//! Hooks of the user: their environment, their influence, and their isolation from the run.

use std::fs;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    ON_REQUEST, Place, Run, UNTIL_GO, apply, as_root, as_root_and_user, descendants, inner_pid,
    program, stderr, wait_for_descendant, wait_until,
};

fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap();
}

/// Starts a job with these settings; snapshots are taken on request only.
fn start(place: &Place, settings: &str, then: &str) -> Run {
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    let run = place.start_python_with(&ON_REQUEST, &format!("{UNTIL_GO}{then}\n"), |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    });
    place.wait_for("out", "ready");
    run
}

/// Waits for the process of a sleeping hook, and returns it.
fn sleeping_hook(run: &Run) -> i32 {
    wait_for_descendant(run.pid(), "the hook", |pid| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
    })
}

fn lives(pid: i32) -> bool {
    kill(Pid::from_raw(pid), None).is_ok()
}

#[apply(as_root)]
fn a_hook_has_the_job_s_limit_of_descriptors() {
    let place = Place::new();
    let settings = "[hooks]\nbefore_snapshot = \"ulimit -n > limit\"\n";
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    fs::write(place.file("job.py"), format!("{UNTIL_GO}\n")).unwrap();
    let command = place.command(&["--interval", "never", "--", "python3", "-u", "job.py"]);
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "ulimit -Sn 777; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir(place.path());
    let mut run = place.spawn(limited, |_| {});
    place.wait_for("out", "ready");
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("limit"), "777\n");
}

#[apply(as_root)]
fn hooks_run_outside_the_sandbox_on_each_occasion() {
    let place = Place::new();
    let settings = r#"[hooks]
before_snapshot = "echo $CKPT_RUN_HOOK $CKPT_RUN_TRIGGER >> told; readlink /proc/self/ns/pid > namespace"
after_snapshot = ["sh", "-c", "echo $CKPT_RUN_HOOK $CKPT_RUN_IMAGE $CKPT_RUN_TRIGGER >> told; echo froze $CKPT_RUN_FREEZE_SECONDS"]
after_restore = "echo $CKPT_RUN_HOOK $CKPT_RUN_IMAGE >> told; test -d $CKPT_RUN_STORE && test $CKPT_RUN_JOB -gt 0 && echo in place >&2"
on_give_up = "echo $CKPT_RUN_HOOK $CKPT_RUN_EXIT_CODE $CKPT_RUN_IMAGE $CKPT_RUN_REASON >> told"
"#;
    let mut run = start(&place, settings, "sys.exit(7)");
    place.snapshot();
    place.wait_for("told", "after_snapshot 000001 request");
    run.crash();
    place.wait_for("told", "after_restore 000001");
    place.wait_for("err", "ckpt-run: hook after_restore: in place\n");
    place.go();
    assert_eq!(run.wait(), 7, "{}", place.text("err"));
    let told = place.text("told");
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(
        lines[..3],
        [
            "before_snapshot request",
            "after_snapshot 000001 request",
            "after_restore 000001"
        ]
    );
    let given_up = lines.iter().find(|line| line.starts_with("on_give_up"));
    assert!(
        given_up.is_some_and(|line| line.starts_with("on_give_up 7 000001 crashed 3 times")),
        "{told}"
    );
    let errors = place.text("err");
    let (_, froze) = errors
        .split_once("ckpt-run: hook after_snapshot: froze ")
        .unwrap();
    let seconds = froze.split_whitespace().next().unwrap();
    assert!(seconds.parse::<f64>().unwrap() > 0.0, "{errors}");
    let ours = fs::read_link("/proc/self/ns/pid").unwrap();
    assert_eq!(place.text("namespace").trim(), ours.to_str().unwrap());
}

#[apply(as_root_and_user)]
fn a_veto_skips_a_snapshot_but_not_the_one_before_a_stop() {
    let place = Place::new();
    let mut run = start(&place, "hooks.before_snapshot = 'exit 75'", "");
    let asked = place.verb(&["snapshot"]);
    assert_eq!(asked.status.code(), Some(125));
    assert!(stderr(&asked).contains("the hook before_snapshot cancelled it"));
    place.wait_for("err", "snapshot skipped");
    assert!(place.images().is_empty());
    assert!(
        !place.text("err").contains("warning"),
        "{}",
        place.text("err")
    );
    run.signal(Signal::SIGTERM);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert_eq!(place.images().len(), 1);
}

#[apply(as_root_and_user)]
fn failing_or_hanging_hook_is_a_warning() {
    let place = Place::new();
    let settings = "[hooks]\nbefore_snapshot = 'sleep 1000'\nafter_snapshot = 'exit 3'\n\
        after_restore = ['/no/such/program']\ntimeout = '5s'";
    let mut run = start(&place, settings, "");
    place.snapshot();
    place.wait_for(
        "err",
        "warning: hook before_snapshot exceeded its time (hooks.timeout) and was killed",
    );
    place.wait_for(
        "err",
        "warning: hook after_snapshot failed, ckpt-run continues: exit status: 3",
    );
    run.crash();
    place.wait_for(
        "err",
        "warning: hook after_restore failed, ckpt-run continues: cannot start it",
    );
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn hanging_hook_leaves_grace_for_the_last_snapshot() {
    let place = Place::new();
    let settings =
        "snapshot.grace = '20s'\nhooks.before_snapshot = 'sleep 1000; :'\nhooks.timeout = '1h'";
    let mut run = start(&place, settings, "");
    run.signal(Signal::SIGUSR1);
    let hook = sleeping_hook(&run);
    // Its snapshot would continue; the following one has its own hook.
    run.signal(Signal::SIGTERM);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let said = place.text("err");
    let warning = "warning: hook before_snapshot exceeded its time (a part of the grace period)";
    assert_eq!(said.matches(warning).count(), 2, "{said}");
    assert_eq!(place.images().len(), 2, "{said}");
    assert!(!lives(hook));
}

#[apply(as_root_and_user)]
fn a_hook_that_holds_up_a_snapshot_is_killed_with_the_run_s_end() {
    let place = Place::new();
    let settings =
        "snapshot.grace = '1h'\nhooks.timeout = '1h'\nhooks.before_snapshot = 'sleep 1000; :'";
    let mut run = start(&place, settings, "");
    run.signal(Signal::SIGTERM);
    let hook = sleeping_hook(&run);
    wait_until("the end after a second SIGTERM", || {
        run.signal(Signal::SIGTERM);
        run.has_ended()
    });
    wait_until("the hook's end", || !lives(hook));
    let said = place.text("err");
    assert!(
        said.contains("hook before_snapshot was killed because the run ends"),
        "{said}"
    );
}

#[apply(as_root_and_user)]
fn no_hook_is_called_for_a_job_that_has_ended() {
    let place = Place::new();
    let settings = r#"[hooks]
before_snapshot = "echo called >> told; test ! -e slow || exec sleep 1000"
timeout = "1h"
"#;
    let mut run = start(&place, settings, "");
    place.snapshot();
    fs::write(place.file("slow"), "").unwrap();
    run.signal(Signal::SIGUSR2);
    let hook = sleeping_hook(&run);
    // As at the end of an allocation, all processes get SIGTERM. The process that reports the job's end is late.
    let first = |pid: &i32| inner_pid(*pid) == Some(1);
    let first = descendants(run.pid()).into_iter().find(first).unwrap();
    send(first, Signal::SIGSTOP);
    send(run.job(), Signal::SIGTERM);
    run.signal(Signal::SIGTERM);
    send(hook, Signal::SIGTERM);
    place.wait_for("err", "cancelled: the job ended");
    send(first, Signal::SIGCONT);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert_eq!(place.text("told"), "called\n".repeat(2));
}

#[apply(as_root_and_user)]
fn the_hook_of_the_last_image_has_ended_before_the_run_has() {
    let place = Place::new();
    let mut run = start(
        &place,
        "hooks.after_snapshot = 'sleep 1; echo copied $CKPT_RUN_IMAGE > copied'",
        "",
    );
    run.signal(Signal::SIGUSR2);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert_eq!(place.text("copied"), "copied 000001\n");
}

#[apply(as_root_and_user)]
fn hook_may_run_verbs_on_its_store() {
    let place = Place::new();
    let program = program();
    let settings = format!("hooks.after_snapshot = '{program} pin $CKPT_RUN_IMAGE --note by-hook'");
    let mut run = start(&place, &settings, "");
    place.snapshot();
    wait_until("the pin", || {
        place
            .images()
            .first()
            .is_some_and(|image| image["note"] == "by-hook")
    });
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
