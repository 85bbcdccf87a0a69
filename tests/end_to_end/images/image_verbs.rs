//! Verbs on images: comparison, copies, and export as one file.

use std::fs;
use std::process::Stdio;

use serde_json::Value;

use nix::sys::signal::Signal;

use crate::harness::{Place, Run, apply, as_root_and_user, code, stderr, stdout};

/// Allocates memory, opens a file and starts a child once there is a file `grow`; ends with `go`.
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

#[apply(as_root_and_user)]
fn growth_between_two_images_is_reported() {
    let place = Place::new();
    let mut run = place.start_python(&[], GROWS);
    place.wait_for("out", "ready");
    place.snapshot();
    fs::write(place.file("grow"), "").unwrap();
    place.wait_for("out", "grown");
    place.snapshot();

    let diff = place.json(&["diff", "1"]);
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
    place.go();
    assert_eq!(run.wait(), 0);
}

#[apply(as_root_and_user)]
fn exported_image_is_restored_on_another_machine() {
    let (place, other) = (Place::new(), Place::new());
    let mut run = place.start_ready(&[]);
    place.snapshot();
    let told = place.json(&["export", "latest", "image.ckpt"]);
    let bytes = fs::metadata(place.file("image.ckpt")).unwrap().len();
    assert_eq!(told["file_bytes"].as_u64(), Some(bytes));
    assert_eq!(told["encrypted"], false);
    let over = place.verb(&["export", "latest", "image.ckpt"]);
    assert_eq!(code(over.status), 125);
    assert!(
        stderr(&over).contains("exists already"),
        "{}",
        stderr(&over)
    );

    // Through a pipe, as over ssh.
    let export = place
        .command(&["export", "latest", "-"])
        .stdout(Stdio::piped())
        .spawn();
    let mut export = export.unwrap();
    let mut import = other.command(&["import", "-", "--json"]);
    let imported = import
        .stdin(export.stdout.take().unwrap())
        .output()
        .unwrap();
    assert!(export.wait().unwrap().success());
    let told: Value = serde_json::from_slice(&imported.stdout).unwrap();
    assert_eq!(told["id"], "000001", "{}", stderr(&imported));
    assert_eq!(stdout(&other.verb(&["verify"])).lines().count(), 1);
    let again = other.verb(&["import", &place.file("image.ckpt").display().to_string()]);
    assert_eq!(stdout(&again), "000002\n", "{}", stderr(&again));
    assert_eq!(other.json(&["list"]).as_array().unwrap().len(), 2);

    // The other machine has neither the run nor its store.
    run.signal(Signal::SIGKILL);
    run.wait();
    fs::rename(place.file(".ckpt-run"), place.file("gone")).unwrap();
    let mut restored = other.start(&["restore"], &[]);
    other.wait_for("err", "restored");
    // The user requested the restore, so no restart is counted.
    let status = other.json(&["status"]);
    assert_eq!(
        (&status["restarts_used"], &status["restarts_left"]),
        (&0.into(), &2.into())
    );
    place.go();
    assert_eq!(restored.wait(), 0, "{}", other.text("err"));
    // The store has that run from now on.
    let same = other.start(&[], &["python3", "-u", "job.py"]).wait();
    assert_eq!(same, 0, "{}", other.text("err"));
    assert!(other.text("err").contains("finished already"));
}

/// Restores an image in a folder with newer files whose writers are unknown to the store.
fn start_anyway(place: &Place, options: &[&str]) -> Run {
    place.start_with(options, &[], |command| {
        command.env("CKPT_RUN_FILES_ON_LOST", "warn");
    })
}

#[apply(as_root_and_user)]
fn copied_image_is_restored_without_the_first_store() {
    let place = Place::new();
    let mut run = place.start_ready(&[]);
    place.snapshot();
    let copied = place.verb(&["copy", "latest", "--to", "copy"]);
    assert_eq!(stdout(&copied), "000001\n", "{}", stderr(&copied));
    run.signal(Signal::SIGKILL);
    run.wait();
    fs::remove_dir_all(place.file(".ckpt-run")).unwrap();
    // A copy of the copy contains the accompanying files, too.
    let again = place.verb(&["copy", "1", "--store", "copy", "--to", "second"]);
    assert_eq!(code(again.status), 0, "{}", stderr(&again));
    fs::remove_dir_all(place.file("copy")).unwrap();

    // Without a run in the store, the same command line explains how to continue.
    let other = place.verb(&["--store", "second", "--", "true"]);
    let said = stderr(&other);
    assert_eq!(code(other.status), 0, "{said}");
    assert!(
        said.contains("newest=000001") && said.contains("use `ckpt-run restore`"),
        "{said}"
    );
    let mut restored = start_anyway(&place, &["--store", "second", "restore", "1"]);
    place.wait_for("err", "restored image=000001");
    place.go();
    assert_eq!(restored.wait(), 0, "{}", place.text("err"));
}

/// Prints its name and computes until there is a file of that name.
const NAMED: &str = r#"
import os, sys, time
print("ready", sys.argv[1], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("done", sys.argv[1], flush=True)
"#;

#[apply(as_root_and_user)]
fn image_of_another_run_is_restored_when_named() {
    let place = Place::new();
    fs::write(place.file("job.py"), NAMED).unwrap();
    let stores = [("one", "first"), ("other", "second")];
    for (store, name) in stores {
        let job = ["python3", "-u", "job.py", name];
        let mut run = place.start(&["--store", store], &job);
        place.wait_for("out", &format!("ready {name}"));
        let taken = place.verb(&["snapshot", "--store", store]);
        assert_eq!(code(taken.status), 0, "{}", stderr(&taken));
        run.signal(Signal::SIGKILL);
        run.wait();
    }
    let verb = |line: &[&str]| {
        let output = place.verb(line);
        assert_eq!(code(output.status), 0, "{line:?}: {}", stderr(&output));
        stderr(&output)
    };
    verb(&["export", "1", "image", "--store", "one"]);
    let told = verb(&["import", "image", "--store", "other"]);
    let how = "ckpt-run --store other restore 000002";
    assert!(
        told.contains(&format!(
            "image 000002 belongs to another run than the store's current one (python3 -u job.py second); to continue from it: {how}\n"
        )),
        "{told}"
    );
    let told = verb(&["copy", "1", "--store", "one", "--to", "other"]);
    assert!(
        told.contains("image 000003 belongs to another run"),
        "{told}"
    );
    let told = verb(&["copy", "1", "--store", "other", "--to", "other-2"]);
    assert!(!told.contains("another run"), "{told}");

    let restore = |image: &str, name: &str| {
        let mut run = start_anyway(&place, &["--store", "other", "restore", image]);
        place.wait_for("err", &format!("restored image={image}"));
        fs::write(place.file(name), "").unwrap();
        assert_eq!(run.wait(), 0, "{}", place.text("err"));
        place.wait_for("out", &format!("done {name}"));
    };
    restore("000002", "first");
    assert!(
        place.text("err").contains(
            "belongs to another run than the store's last one; `ckpt-run restore 000001` returns to that run"
        ),
        "{}",
        place.text("err")
    );
    // The store has that run now; the earlier run is restored in the same way.
    let line = ["--store", "other", "--", "python3", "-u", "job.py", "first"];
    assert!(verb(&line).contains("finished already"));
    restore("000001", "second");
    let again = "the run had finished: the job repeats its work after the image";
    assert!(!place.text("err").contains(again), "{}", place.text("err"));
    restore("000001", "second");
    assert!(place.text("err").contains(again), "{}", place.text("err"));
}

#[test]
fn invalid_export_creates_no_store() {
    let place = Place::new();
    fs::write(place.file("other"), "something else").unwrap();
    for (file, said) in [
        ("other", "the file is not an exported image"),
        ("none", "cannot read none"),
    ] {
        let refused = place.verb(&["import", file]);
        assert_eq!(code(refused.status), 125);
        assert!(stderr(&refused).contains(said), "{}", stderr(&refused));
    }
    assert!(!place.file(".ckpt-run").exists());
    let json = place.verb(&["export", "latest", "-", "--json"]);
    assert!(
        stderr(&json).contains("with --json, name a file"),
        "{}",
        stderr(&json)
    );
}
