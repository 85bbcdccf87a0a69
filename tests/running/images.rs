//! What images tell of jobs: compared with each other, and carried elsewhere as one file.

use std::fs;

use serde_json::Value;

use super::common::{Place, can_run, code};
use super::{stderr, stdout};

/// Takes memory, opens a file and starts a child once there is a file `grow`; ends with `go`.
const GROWS: &str = r#"
import os, subprocess, sys, time
print("ready", flush=True)
while not os.path.exists("grow"):
    time.sleep(0.02)
data = os.urandom(32 << 20)
log = open("log", "w")
log.write("x" * 100); log.flush()
child = subprocess.Popen(["sleep", "1000"])
print("grown", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
child.kill(); child.wait()
print(len(data), flush=True)
"#;

fn json(place: &Place, arguments: &[&str]) -> Value {
    let output = place.verb(&[arguments, &["--json"]].concat());
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{arguments:?}: {error}: {}", stderr(&output)))
}

#[test]
fn what_grew_between_two_images_is_told() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut run = place.start_python(&[], GROWS);
    place.wait_for("out", "ready");
    place.snapshot();
    fs::write(place.file("grow"), "").unwrap();
    place.wait_for("out", "grown");
    place.snapshot();

    let diff = json(&place, &["diff", "1"]);
    assert_eq!(
        (&diff["from"], &diff["to"]),
        (&"000001".into(), &"000002".into())
    );
    let number = |value: &Value| value.as_u64().unwrap();
    let grown = number(&diff["raw_bytes"]["to"]) - number(&diff["raw_bytes"]["from"]);
    assert!(grown > 32 << 20, "{grown}");
    let chunks = &diff["chunks"];
    assert!(
        number(&chunks["new"]) > 32 << 20 && number(&chunks["shared"]) > 0,
        "{chunks}"
    );
    let sum = number(&chunks["new"]) + number(&chunks["shared"]) + number(&chunks["zero"]);
    assert_eq!(sum, number(&diff["raw_bytes"]["to"]));
    let came = diff["processes"]["came"].as_array().unwrap();
    assert!(
        came.len() == 1 && came[0].as_str().unwrap().ends_with("sleep 1000"),
        "{came:?}"
    );
    let log = place.file("log").display().to_string();
    assert_eq!(diff["files"]["came"], serde_json::json!([log]));
    let memory = |index: usize| number(&diff["memory"][index]["anonymous"]);
    assert!(memory(1) - memory(0) > 30 << 20);

    let text = stdout(&place.verb(&["diff", "1", "2"]));
    assert!(
        text.contains(" sleep 1000\n") && text.contains(&format!("+ file     {log}")),
        "{text}"
    );
    let back = stdout(&place.verb(&["diff", "2", "1"]));
    assert!(back.contains("- process"), "{back}");
    let missing = place.verb(&["diff", "1", "9"]);
    assert_eq!(code(missing.status), 125);
    assert!(
        stderr(&missing).contains("there is no image 000009"),
        "{}",
        stderr(&missing)
    );
    fs::write(place.file("go"), "").unwrap();
    assert_eq!(run.wait(), 0);
}
