//! Pod of the Job in the Kubernetes template, run by podman, which supports pods and claims but no Jobs.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::image_build::{IN_A_REGISTRY, JOB, machine, template};
use super::machine::Machine;
use crate::harness::{apply, as_root, lines};

/// Claim in the template.
const CLAIM: &str = "train-store";
/// Name that podman gives the pod's container: the pod's name and its own.
const CONTAINER: &str = "train-train";

/// Returns the template's documents: the claim and the Job.
fn documents() -> [Value; 2] {
    let text = template("kubernetes");
    let all: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    all.try_into().unwrap()
}

/// Returns the pod that the Job creates.
fn pod(job: &Value) -> Value {
    let template = &job["spec"]["template"];
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]});
    pod["metadata"]["name"] = job["metadata"]["name"].clone();
    let container = &pod["spec"]["containers"][0];
    // For this setting, podman (4.3) supports only the form of Kubernetes before 1.19.
    let profile = &container["securityContext"]["seccompProfile"]["type"];
    assert_eq!(profile, "Unconfined");
    pod["metadata"]["annotations"] =
        json!({"seccomp.security.alpha.kubernetes.io/pod": "unconfined"});
    let container = &mut pod["spec"]["containers"][0];
    assert_eq!(container["image"], IN_A_REGISTRY);
    // There is no registry, and no GPU.
    container["imagePullPolicy"] = "Never".into();
    let limits = container["resources"]["limits"].as_object_mut().unwrap();
    assert_eq!(limits.remove("nvidia.com/gpu"), Some(1.into()));
    pod
}

fn play(machine: &Machine, document: &Value) {
    let file = machine.file("document.yaml");
    fs::write(&file, document.to_string()).unwrap();
    let words = ["kube", "play", "--network", "none"];
    machine.podman(&[&words[..], &[file.to_str().unwrap()]].concat());
}

#[apply(as_root)]
fn deleted_pod_is_saved_and_the_next_one_continues() {
    let Some(machine) = machine() else { return };
    let [claim, job] = documents();
    play(&machine, &claim);
    play(&machine, &pod(&job));
    machine.wait_for(CLAIM, "log", "20\n", CONTAINER);
    // podman (4.3) does not read the pod's grace period, and kills after 10 s.
    let grace = &job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"];
    machine.podman(&["pod", "stop", "--time", &grace.to_string(), "train"]);
    assert_eq!(machine.wait(CONTAINER), 75, "{}", machine.err(CONTAINER));
    let first = machine.out(CONTAINER);
    machine.podman(&["pod", "rm", "train"]);
    fs::write(machine.in_volume(CLAIM, "go"), "").unwrap();
    play(&machine, &pod(&job));
    assert_eq!(machine.wait(CONTAINER), 0, "{}", machine.err(CONTAINER));
    let log = fs::read_to_string(machine.in_volume(CLAIM, "log")).unwrap();
    assert_eq!(log, lines(40));
    assert_eq!(first + &machine.out(CONTAINER), lines(40));
}

/// Checks that the Job acts on exit codes of a container that exists in it.
#[test]
fn job_manifest_is_consistent_with_exit_codes() {
    let [claim, job] = documents();
    let pod = &job["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let rules = job["spec"]["podFailurePolicy"]["rules"].as_array().unwrap();
    for rule in rules.iter().filter(|rule| rule["onExitCodes"].is_object()) {
        assert_eq!(rule["onExitCodes"]["containerName"], container["name"]);
        assert_eq!(rule["onExitCodes"]["operator"], "In");
    }
    let action = |code: i32| {
        let about = |rule: &&Value| {
            let values = rule["onExitCodes"]["values"].as_array();
            values.is_some_and(|values| values.contains(&code.into()))
        };
        rules.iter().find(about).map(|rule| rule["action"].clone())
    };
    assert_eq!(action(75), Some("Ignore".into()));
    assert_eq!(action(127), Some("FailJob".into()));
    assert_eq!(action(1), None);
    assert_eq!(pod["restartPolicy"], "Never");
    assert_eq!(pod["terminationGracePeriodSeconds"], 360);
    let volume = &pod["volumes"][0];
    assert_eq!(
        volume["persistentVolumeClaim"]["claimName"],
        claim["metadata"]["name"]
    );
    let mount = &container["volumeMounts"][0];
    assert_eq!(mount["name"], volume["name"]);
    let command: Vec<&str> = container["command"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let store = Path::new(command[2]).parent().and_then(Path::to_str);
    assert_eq!(store, mount["mountPath"].as_str());
    assert_eq!(command[command.len() - JOB.len()..], JOB);
}
