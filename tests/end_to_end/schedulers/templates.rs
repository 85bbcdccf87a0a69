//! Templates for schedulers: their format, and the scheduler's actions, simulated here: its signals, its environment,
//! its second run of the same command line.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    COUNT, Place, Run, apply, as_root, descendants, installed, is_dead, job_of, lines, program,
    stderr, stdout, wait_until, write_script,
};

const SCHEDULERS: [&str; 6] = [
    "systemd",
    "slurm",
    "slurm-preempt",
    "kubernetes",
    "docker",
    "spot",
];

/// Returns a template with the job of these tests, which is snapshotted only when the scheduler requests it.
pub fn filled(place: &Place, scheduler: &str) -> String {
    let store = place.file(".ckpt-run");
    let line = ["template", scheduler, "--interval", "never", "--store"];
    let mut command = place.command(&line);
    command.arg(store).args(["--", "python3", "-u", "job.py"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    fs::write(place.file("job.py"), COUNT).unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Puts the scheduler's programs in front of PATH, and `ckpt-run` as users call it.
fn with_programs(place: &Place, command: &mut Command) {
    let folder = place.file("bin");
    if !folder.exists() {
        fs::create_dir(&folder).unwrap();
        symlink(program(), folder.join("ckpt-run")).unwrap();
        let scripts = [
            ("scontrol", "echo \"$@\" >> asked-for"),
            ("srun", "shift 2; exec \"$@\""),
        ];
        for (name, script) in scripts {
            write_script(&folder.join(name), &format!("#!/bin/sh\n{script}\n"));
        }
    }
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    command
        .env("PATH", path)
        .env("XDG_CONFIG_HOME", place.path())
        .env("SLURM_JOB_ID", "4711")
        .env("SLURM_RESTART_COUNT", "1")
        .current_dir(place.path());
}

fn batch(place: &Place) -> Run {
    let mut command = Command::new("bash");
    command.arg("job.sbatch");
    with_programs(place, &mut command);
    place.spawn(command, |_| {})
}

fn words(place: &Place, words: &[String]) -> Run {
    let mut command = Command::new("env");
    command.args(words);
    with_programs(place, &mut command);
    place.spawn(command, |_| {})
}

/// Returns the supervisor among the scheduler's processes.
fn supervisor(run: &Run) -> Pid {
    let mut found = None;
    wait_until("ckpt-run", || {
        let mut all = descendants(run.pid());
        all.insert(0, run.pid());
        found = all.into_iter().find(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with(b"ckpt-run\0")
        });
        found.is_some()
    });
    Pid::from_raw(found.unwrap())
}

/// Returns the processes of the step that is informed of preemptions.
fn listeners(run: &Run) -> Vec<Pid> {
    let mut found = vec![];
    wait_until("the listener", || {
        found = descendants(run.pid());
        found.retain(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with(b"sleep\0inf") || line.starts_with(b"bash\0-c\0trap")
        });
        found.len() == 2
    });
    found.into_iter().map(Pid::from_raw).collect()
}

/// Returns the list after a word of a file, in the form of YAML and Dockerfiles.
fn list(text: &str, before: &str) -> Vec<String> {
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix(before));
    serde_json::from_str(line.unwrap().trim()).unwrap()
}

fn checked(program: &str, arguments: &[&str], file: &Path) {
    let output: Output = Command::new(program)
        .args(arguments)
        .arg(file)
        .output()
        .unwrap();
    let said = stdout(&output);
    assert!(
        output.status.success(),
        "{program}: {said}{}",
        stderr(&output)
    );
}

#[test]
fn printed_templates_equal_the_config_folder() {
    let place = Place::new();
    let names = [
        "ckpt-run.service",
        "slurm.sbatch",
        "slurm-preempt.sbatch",
        "kubernetes-job.yaml",
        "Dockerfile",
        "spot-user-data.sh",
    ];
    for (scheduler, name) in SCHEDULERS.into_iter().zip(names) {
        let printed = place.verb(&["template", scheduler]).stdout;
        let kept = fs::read(
            Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("config")
                .join(name),
        )
        .unwrap();
        assert!(printed == kept, "{scheduler}");
    }
    let written = place.verb(&["template", "docker", "--output", "Dockerfile"]);
    assert!(written.status.success() && written.stdout.is_empty());
    let again = place.verb(&["template", "docker", "--output", "Dockerfile"]);
    assert_eq!(again.status.code(), Some(125));
    assert!(
        stderr(&again).contains("cannot write Dockerfile"),
        "{}",
        stderr(&again)
    );
    let wrong = place.verb(&["template", "docker", "--interval", "15"]);
    assert_eq!(wrong.status.code(), Some(0), "{}", stderr(&wrong));
    let wrong = place.verb(&["template", "docker", "--interval", "soon"]);
    assert_eq!(wrong.status.code(), Some(125));
}

#[test]
fn systemd_understands_the_services() {
    let place = Place::new();
    let spot = filled(&place, "spot").replace("/opt/ckpt-run/bin/ckpt-run", program());
    let (_, spot) = spot.split_once("<<'UNIT'\n").unwrap();
    let (spot, _) = spot.split_once("\nUNIT\n").unwrap();
    let systemd = filled(&place, "systemd").replace("/usr/local/bin/ckpt-run", program());
    let file = place.file("train.service");
    for text in [&systemd, spot] {
        fs::write(&file, text).unwrap();
        if installed("systemd-analyze") {
            checked("systemd-analyze", &["verify", "--man=no"], &file);
        }
    }
}

#[test]
fn bash_understands_the_scripts() {
    let place = Place::new();
    for scheduler in ["slurm", "slurm-preempt", "spot"] {
        let file = place.file(scheduler);
        fs::write(&file, filled(&place, scheduler)).unwrap();
        checked("bash", &["-n"], &file);
        if installed("shellcheck") {
            checked("shellcheck", &[], &file);
        }
    }
}

#[apply(as_root)]
fn slurm_saves_before_the_time_limit_and_requeues() {
    let place = Place::new();
    fs::write(place.file("job.sbatch"), filled(&place, "slurm")).unwrap();
    let mut run = batch(&place);
    place.wait_for("log", "5\n");
    run.signal(Signal::SIGUSR2);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert_eq!(place.text("asked-for"), "requeue 4711\n");
    assert_eq!(place.images().len(), 1);
    place.go();
    let mut run = batch(&place);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
    assert_eq!(place.text("asked-for"), "requeue 4711\n");
}

#[apply(as_root)]
fn slurm_preempts_a_step_and_runs_the_script_again() {
    let place = Place::new();
    fs::write(place.file("job.sbatch"), filled(&place, "slurm-preempt")).unwrap();
    let mut run = batch(&place);
    place.wait_for("log", "5\n");
    for pid in listeners(&run) {
        kill(pid, Signal::SIGTERM).unwrap();
    }
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert_eq!(place.text("asked-for"), "requeue 4711\n");
    let mut run = batch(&place);
    let step = listeners(&run);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    // Slurm ends the steps of a job with the job.
    for pid in step {
        kill(pid, Signal::SIGKILL).unwrap();
    }
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

#[apply(as_root)]
fn too_short_time_limit_loses_work_since_the_last_image() {
    let place = Place::new();
    fs::write(place.file("job.sbatch"), filled(&place, "slurm")).unwrap();
    let run = batch(&place);
    place.wait_for("log", "20\n");
    place.snapshot();
    let (job, supervisor) = (job_of(supervisor(&run).as_raw()), supervisor(&run));
    for pid in [Pid::from_raw(run.pid()), supervisor] {
        kill(pid, Signal::SIGKILL).unwrap();
    }
    wait_until("the job's end", || is_dead(job));
    drop(run);
    place.go();
    let mut run = batch(&place);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    let state = place.text(".ckpt-run/run.json");
    assert!(state.contains("\"failures\": 1"), "{state}");
}

#[apply(as_root)]
fn sigterm_saves_and_the_next_start_continues() {
    for scheduler in ["systemd", "kubernetes", "docker", "spot"] {
        let place = Place::new();
        let text = filled(&place, scheduler);
        assert!(text.contains("CKPT_RUN_PREEMPTION_WATCH"), "{scheduler}");
        let line = match scheduler {
            "systemd" | "spot" => {
                let line = text
                    .lines()
                    .find_map(|line| line.strip_prefix("ExecStart="));
                let (_, line) = line.unwrap().split_once("/bin/").unwrap();
                line.split(' ').map(str::to_owned).collect()
            }
            "kubernetes" => list(&text, "command:"),
            _ => [list(&text, "ENTRYPOINT"), list(&text, "CMD")].concat(),
        };
        let mut run = words(&place, &line);
        place.wait_for("log", "5\n");
        run.signal(Signal::SIGTERM);
        assert_eq!(run.wait(), 75, "{scheduler}: {}", place.text("err"));
        place.go();
        let mut run = words(&place, &line);
        assert_eq!(run.wait(), 0, "{scheduler}: {}", place.text("err"));
        assert_eq!(place.text("log"), lines(40), "{scheduler}");
        assert_eq!(place.text("out"), lines(40), "{scheduler}");
    }
}
