//! Tests of the verbs with a fake driver.

use std::sync::Arc;

use clap::Parser;

use super::*;
use crate::cuda::GpuUuid;
use crate::cuda::fake::Fake;
use crate::run::OURS;

const PIDS: [i32; 2] = [300, 301];

/// A command line of this verb alone.
#[derive(Parser)]
struct Only {
    #[command(subcommand)]
    verb: CudaVerb,
}

fn verb(line: &str) -> CudaVerb {
    Only::try_parse_from(format!("cuda {line}").split_whitespace())
        .unwrap_or_else(|error| panic!("{error}"))
        .verb
}

/// Returns the text, and true if everything succeeded.
fn done(fake: &Arc<Fake>, line: &str) -> (String, bool) {
    let driver = Driver::fake(fake.clone());
    let verb = verb(line);
    let map = match &verb {
        CudaVerb::Resume(Return { onto, .. }) | CudaVerb::Restore(Return { onto, .. }) => {
            onto.map(|| Ok(Vec::new())).ok().unwrap()
        }
        _ => GpuMap::default(),
    };
    let outcome = act(&driver, &verb, map).ok().unwrap();
    let good = outcome.failure.is_none() && outcome.lines.iter().all(|line| line.error.is_none());
    assert_eq!(
        format!("{:?}", outcome.code()),
        format!("{:?}", ExitCode::from(u8::from(!good)))
    );
    (outcome.text(), good)
}

fn gpu(number: u8) -> GpuUuid {
    GpuUuid::from_bytes([number; 16])
}

#[test]
fn the_verbs_lead_through_the_states_and_back() {
    let fake = Fake::new(&PIDS);
    let both = "--pid 300 --pid 301 --pid 300";
    for (line, state) in [
        ("state", "running"),
        ("lock", "locked"),
        ("checkpoint", "checkpointed"),
        ("restore", "locked"),
        ("unlock", "running"),
        ("suspend", "checkpointed"),
        ("suspend", "checkpointed"),
        ("resume", "running"),
        ("toggle", "checkpointed"),
        ("toggle", "running"),
    ] {
        let text = format!("300 {state}\n301 {state}\n");
        assert_eq!(
            done(&fake, &format!("{line} {both}")),
            (text, true),
            "{line}"
        );
    }
    assert_eq!(
        done(&fake, "tid -p 300"),
        ("300 301\n".to_owned(), true),
        "a line of numbers"
    );
}

#[test]
fn a_process_that_is_not_where_it_should_be_fails_the_verb() {
    let fake = Fake::new(&PIDS);
    for line in ["checkpoint", "restore", "unlock"] {
        let (text, good) = done(&fake, &format!("{line} --pid 300"));
        assert_eq!((text.as_str(), good), ("300 running\n", false), "{line}");
    }
    fake.set(301, State::Checkpointed);
    let (text, good) = done(&fake, "lock --pid 300 --pid 301");
    assert_eq!(
        (text.as_str(), good),
        ("300 locked\n301 checkpointed\n", false)
    );
}

#[test]
fn processes_without_cuda_are_told_from_those_that_answer() {
    let fake = Fake::new(&PIDS);
    let (text, good) = done(&fake, "state --pid 300 --pid 999");
    assert_eq!((text.as_str(), good), ("300 running\n", false));
    let (text, good) = done(&fake, "suspend --pid 300 --pid 999");
    assert_eq!((text.as_str(), good), ("300 running\n", false), "untouched");
}

#[test]
fn json_has_a_line_a_process_with_its_error() {
    let fake = Fake::new(&PIDS);
    let outcome = act(
        &Driver::fake(fake),
        &verb("state --pid 300 --pid 999"),
        GpuMap::default(),
    );
    let lines = serde_json::to_value(outcome.ok().unwrap().lines).unwrap();
    assert_eq!(
        lines[0],
        serde_json::json!({"pid": 300, "state": "running", "error": null})
    );
    let error = lines[1]["error"].as_str().unwrap();
    assert!(
        error.starts_with("cannot query CUDA process 999"),
        "{error}"
    );
}

#[test]
fn a_map_reaches_the_driver() {
    let fake = Fake::in_state(&PIDS, State::Checkpointed);
    fake.move_from(gpu(1));
    let (text, good) = done(&fake, "resume --pid 300");
    assert_eq!((text.as_str(), good), ("300 checkpointed\n", false));
    let line = format!("resume --pid 300 --gpu-map {}={}", gpu(1), gpu(2));
    assert_eq!(done(&fake, &line), ("300 running\n".to_owned(), true));
    let line = format!("restore --pid 301 --gpu-map {}={}", gpu(1), gpu(2));
    assert_eq!(done(&fake, &line), ("301 locked\n".to_owned(), true));
}

#[test]
fn auto_replaces_missing_gpus_and_requires_the_old_ones() {
    let onto = |text: &str| match verb(&format!("resume --pid 300 {text}")) {
        CudaVerb::Resume(arguments) => arguments
            .onto
            .map(|| Ok(vec![gpu(2), gpu(3)]))
            .map_err(|failure| (failure.code, failure.text)),
        other => panic!("{other:?}"),
    };
    let from = format!("--gpu-map auto --from {},{}", gpu(1), gpu(2));
    let expected = format!("{}={},{}={}", gpu(1), gpu(3), gpu(2), gpu(2));
    assert_eq!(onto(&from), Ok(expected.parse().unwrap()));
    assert_eq!(onto(""), Ok(GpuMap::default()));
    let (code, text) = onto("--gpu-map auto").unwrap_err();
    assert!(code == OURS && text.contains("--from OLD,OLD"), "{text}");
    let both = format!("--gpu-map {0}={0} --from {0}", gpu(1));
    assert_eq!(onto(&both).unwrap_err().0, OURS);
    let many = format!("--gpu-map auto --from {},{},{}", gpu(7), gpu(8), gpu(9));
    let (code, text) = onto(&many).unwrap_err();
    assert!(code == REFUSED && text.contains("had 3 GPUs"), "{text}");
}

#[test]
fn lines_that_make_no_sense_are_refused() {
    for line in [
        "state",
        "state --pid 0",
        "state --pid -4",
        "lock --pid 300 --timeout 10",
        "resume --pid 300 --from GPU-1",
        "resume --pid 300 --gpu-map GPU-1=GPU-2",
        "suspend --pid 300 --gpu-map auto",
    ] {
        assert!(
            Only::try_parse_from(format!("cuda {line}").split(' ')).is_err(),
            "{line}"
        );
    }
}

#[test]
fn a_stopped_process_is_named_instead_of_waited_for() {
    let mut sleeper = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    let pid = i32::try_from(sleeper.id()).unwrap();
    let process = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(process, Signal::SIGSTOP).unwrap();
    // The signal takes effect once the process is scheduled.
    while !job::is_stopped(pid) {
        std::thread::yield_now();
    }
    let driver = Driver::fake(Fake::new(&[pid]));
    for name in ["state", "tid", "suspend", "resume"] {
        let verb = verb(&format!("{name} --pid {pid}"));
        let refused = act(&driver, &verb, GpuMap::default()).err().unwrap();
        assert!(refused.text.contains("kill -CONT"), "{}", refused.text);
    }
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}
