//! Minimality of the templates' privileges: without any one of them a restore fails, and `doctor` reports it
//! beforehand.

use serde_json::Value;

use super::docker::{VOLUME, go, log, options, start};
use super::image_build::{IMAGE, machine, template};
use super::machine::Machine;
use crate::harness::{apply, as_root, lines};

/// Capabilities without which CRIU fails a restore at once, with a known message. Without `CAP_SYS_ADMIN` there is no
/// sandbox; without `CAP_SETPCAP` CRIU (4.1.1) may hang; `CAP_SYS_PTRACE` is needed on some machines only.
const REFUSED: [&str; 3] = ["SYS_TIME", "NET_ADMIN", "SYS_CHROOT"];

/// Returns the options without one capability.
fn without(options: &[String], capability: &str) -> Vec<String> {
    let place = options.iter().position(|word| word == capability).unwrap();
    let kept = options
        .iter()
        .enumerate()
        .filter(|(at, _)| *at != place && *at + 1 != place);
    kept.map(|(_, word)| word.clone()).collect()
}

fn capabilities(options: &[String]) -> Vec<String> {
    let pairs = options.windows(2).filter(|pair| pair[0] == "--cap-add");
    pairs.map(|pair| pair[1].clone()).collect()
}

/// Returns the problems that `doctor` reports in a container.
fn problems(machine: &Machine, options: &[String]) -> Vec<String> {
    let mut words: Vec<&str> = options.iter().map(String::as_str).collect();
    words.extend(["--entrypoint", "ckpt-run", IMAGE, "doctor", "--json"]);
    let (_, text) = machine.run(&words);
    let checks: Vec<Value> = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}"));
    let problems = checks.iter().filter(|check| check["status"] == "problem");
    problems.map(|check| check["detail"].to_string()).collect()
}

#[test]
fn both_templates_ask_for_the_same_rights() {
    let pod = template("kubernetes");
    let listed = pod
        .lines()
        .find_map(|line| line.trim().strip_prefix("add: "));
    let listed = listed.unwrap().trim_matches(['[', ']']);
    assert_eq!(
        listed.split(", ").collect::<Vec<_>>(),
        capabilities(&options())
    );
    assert!(!pod.contains("privileged: true"), "{pod}");
}

#[apply(as_root)]
fn doctor_in_a_container_names_missing_privileges() {
    let Some(machine) = machine() else { return };
    let all = options();
    assert_eq!(problems(&machine, &all), [""; 0]);
    for capability in capabilities(&all) {
        let problems = problems(&machine, &without(&all, &capability));
        let wanted = format!("missing CAP_{capability}");
        assert!(
            problems.iter().any(|one| one.contains(&wanted)),
            "{problems:?}"
        );
    }
    let filtered: Vec<String> = all
        .iter()
        .map(|word| word.replace("seccomp=unconfined", "label=disable"))
        .collect();
    let problems = problems(&machine, &filtered);
    assert!(
        problems.iter().any(|one| one.contains("seccomp filter")),
        "{problems:?}"
    );
}

#[apply(as_root)]
fn a_restore_without_a_right_names_it_and_harms_nothing() {
    let Some(machine) = machine() else { return };
    let all = options();
    start(&machine, "saved", &all);
    machine.wait_for(VOLUME, "log", "20\n", "saved");
    machine.podman(&["stop", "saved"]);
    assert_eq!(machine.wait("saved"), 75, "{}", machine.err("saved"));
    go(&machine);
    for capability in REFUSED {
        let mut options = without(&all, capability);
        options.push(IMAGE.to_owned());
        let words: Vec<&str> = options.iter().map(String::as_str).collect();
        let (code, text) = machine.run(&words);
        assert_eq!(code, 125, "{text}");
        let warning =
            format!("warning: snapshots or restores will fail here without CAP_{capability}");
        let remedy = format!("with CAP_{capability}");
        assert!(text.contains(&warning) && text.contains(&remedy), "{text}");
    }
    start(&machine, "next", &all);
    assert_eq!(machine.wait("next"), 0, "{}", machine.err("next"));
    assert_eq!(log(&machine), lines(40));
}
