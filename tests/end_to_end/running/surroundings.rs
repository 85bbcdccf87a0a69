//! Environment of the job: working directory, variables, limits, session, pids.

use std::fs;
use std::process::{Command, Stdio};

use crate::harness::{Place, apply, as_root, as_root_and_user, stderr, stdout};

#[apply(as_root)]
fn directory_environment_umask_limits_and_cgroup_are_kept() {
    let place = Place::new();
    let mut command = place.command(&["-q", "--", "sh", "-c"]);
    command.arg("pwd; umask; ulimit -n; echo \"$GREETING\"; cat /proc/self/cgroup");
    let output = Command::new("sh")
        .args(["-c", "umask 027; ulimit -Sn 777; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir(place.path())
        .env("GREETING", "hello  world\n!")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let expected = format!(
        "{}\n0027\n777\nhello  world\n!\n{}",
        place.path().canonicalize().unwrap().display(),
        fs::read_to_string("/proc/self/cgroup").unwrap()
    );
    assert_eq!(stdout(&output), expected, "{}", stderr(&output));
}

#[apply(as_root_and_user)]
fn job_gets_its_store_but_no_systemd_variables() {
    let place = Place::new();
    let output = place
        .command(&["-q", "--", "env"])
        .env("NOTIFY_SOCKET", "/run/notify")
        .env("WATCHDOG_USEC", "1")
        .env("LISTEN_FDS", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = stdout(&output);
    let value = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(&format!("{name}=")))
    };
    let store = place.path().canonicalize().unwrap().join(".ckpt-run");
    assert_eq!(value("CKPT_RUN_STORE"), store.to_str());
    assert_eq!(
        value("CKPT_RUN_SOCKET"),
        store.join("control.sock").to_str()
    );
    assert!(value("CKPT_RUN_JOB").is_some_and(|job| !job.is_empty()));
    for name in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"] {
        assert_eq!(value(name), None);
    }
}

#[apply(as_root_and_user)]
fn job_leads_its_own_session_below_its_root() {
    let place = Place::new();
    let script = "import os; print(os.getpid(), os.getppid(), os.getsid(0), os.getpgid(0)); \
                  print(open(f'/proc/{os.getppid()}/stat').read().split()[3], os.listdir('/proc/self/fd'))";
    let output = place.verb(&["-q", "--", "python3", "-c", script]);
    let said = stdout(&output);
    let (pids, rest) = said.split_once('\n').expect("two lines");
    let pids: Vec<i32> = pids.split(' ').map(|pid| pid.parse().unwrap()).collect();
    let root = pids[1];
    assert!(root >= 300, "{said}");
    assert_eq!(pids, [root + 1, root, root + 1, root + 1], "{said}");
    // The fourth descriptor belongs to the listing itself.
    assert_eq!(rest, "1 ['0', '1', '2', '3']\n");
}

#[apply(as_root_and_user)]
fn orphans_are_reaped_while_the_job_runs() {
    let place = Place::new();
    // Each child leaves a grandchild, which exits by itself.
    let script = r#"
import os, subprocess, time
for _ in range(20):
    subprocess.run(["sh", "-c", "sleep 0.05 & setsid sleep 0.05 &"])
def is_ours(pid):
    # The process that watches the job's files ends with the job.
    try: return open(f"/proc/{pid}/comm").read() == "ckpt-run-files\n"
    except OSError: return False
def others():
    return [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getppid(), os.getpid()) and not is_ours(p)]
end = time.monotonic() + 30
while others() and time.monotonic() < end:
    time.sleep(0.01)
print(others())
"#;
    let output = place.verb(&["-q", "--", "python3", "-c", script]);
    assert_eq!(stdout(&output), "[]\n");
}
