//! What an ordinary user's job is, and its way through all verbs.

use std::fs;
use std::process::Command;

use super::snapshot_crash_and_end;
use crate::harness::{
    COUNT, ON_REQUEST, Ordinary, Place, apply, as_root, as_user, code, copy_environment, lines,
    stderr, stdout,
};

/// Says who it is, and again after a crash.
const WHO: &str = r#"
import os, time
def say():
    lines = open("/proc/self/status").read().splitlines()
    rights = [line.split()[1] for line in lines if line.startswith(("CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs"))]
    print(os.getresuid(), os.getresgid(), os.getgroups(), *rights, flush=True)
    open("mine", "w").close()
say()
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
say()
"#;

#[apply(as_user)]
fn the_job_is_the_user_and_has_no_capabilities() {
    use std::os::unix::fs::MetadataExt;
    let place = Place::new();
    snapshot_crash_and_end(&place, place.start_python(&ON_REQUEST, WHO));
    let file = fs::metadata(place.file("mine")).unwrap();
    let (user, group) = (file.uid(), file.gid());
    let none = "0".repeat(16);
    let who = format!(
        "({user}, {user}, {user}) ({group}, {group}, {group}) [] {none} {none} {none} {none} 0\n"
    );
    assert_eq!(place.text("out"), format!("{who}ready\n{who}"));
}

#[apply(as_root)]
fn root_may_use_a_user_namespace_too() {
    let place = Place::new();
    let run = place.start_python(
        &["--isolation", "user", "--interval", "never"],
        &COUNT.replace("import", "print('ready', flush=True)\nimport"),
    );
    snapshot_crash_and_end(&place, run);
    assert_eq!(place.text("out"), format!("ready\n{}", lines(40)));
    assert_eq!(place.text("log"), lines(40));
}

/// Raises its limit on descriptors, and has more than the limit of before.
const MANY_FILES: &str = r#"
import os, resource, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print(os.fstat(files[-1]).st_rdev != 0, resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"#;

#[apply(as_user)]
fn more_descriptors_than_the_callers_limit_survive() {
    let place = Place::new();
    fs::write(place.file("job.py"), MANY_FILES).unwrap();
    let command = place.command(&[&ON_REQUEST[..], &["--", "python3", "-u", "job.py"]].concat());
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -Sn 1024; exec \"$@\"", "sh"]);
    limited.arg(command.get_program()).args(command.get_args());
    limited.current_dir(place.path());
    copy_environment(&command, &mut limited);
    place.own(&mut limited);
    snapshot_crash_and_end(&place, place.spawn(limited, |_| {}));
    assert_eq!(place.text("out"), "ready\nTrue 2000\n");
}

#[apply(as_user)]
fn a_stopped_run_of_a_user_s_goes_on_from_its_image() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, COUNT);
    place.wait_for("log", "15\n");
    let stopped = place.verb(&["stop"]);
    assert_eq!(code(stopped.status), 0, "{}", stderr(&stopped));
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let mut again = place.start(&ON_REQUEST, &["python3", "-u", "job.py"]);
    place.wait_for("err", "ckpt-run: restored image=000001");
    place.go();
    assert_eq!(again.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

#[apply(as_user)]
fn doctor_has_no_problem_and_says_what_is_weaker() {
    let place = Place::new();
    let checked = place.verb(&["doctor"]);
    let said = stdout(&checked);
    assert_eq!(code(checked.status), 0, "{said}");
    assert!(
        said.contains("namespaces can be created in a user namespace")
            && said.contains("none on the machine: jobs run in a user namespace")
            && said.contains("connections inside a job are restored")
                != said.contains("finds its TCP connections closed"),
        "{said}"
    );
}

/// Prints 400 lines: slowly until the restored job has been snapshotted, fast afterwards.
const PACED: &str = r#"
import os, sys, time
for i in range(400):
    print(i, flush=True)
    while not os.path.exists(sys.argv[1] + "/go"):
        time.sleep(0.05)
        if i < 100:
            break
"#;

#[apply(as_user)]
fn rehearse_compares_runs_and_tells_that_files_may_be_unknown() {
    let place = Place::new();
    let work = place.file("work");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("job.py"), PACED).unwrap();
    Ordinary::of_test().inspect(|user| user.owns(&work));
    let job = ["python3", "-u", "job.py", place.path().to_str().unwrap()];
    let mut run = place.start_with(&["rehearse", "--end-within", "10m"], &job, |command| {
        command.current_dir(&work);
    });
    place.wait_for("out", " again ");
    place.go();
    let code = run.wait();
    let said = place.text("out");
    assert!(
        code == 0
            && said.contains("stdout: all 400 lines are equal")
            && said.contains("some files that the job writes may be unknown"),
        "{said} {}",
        place.text("err")
    );
}
