//! Retention of images: pins while a job runs, verbs that remove images, and other files in a store.

use std::fs;

use serde_json::Value;

use crate::harness::{
    ON_REQUEST, Place, apply, as_root, as_root_and_user, code, criu_prefix, program, stderr, stdout,
};

fn ids(place: &Place) -> Vec<String> {
    let id = |image: &Value| image["id"].as_str().unwrap().to_owned();
    place.images().iter().map(id).collect()
}

/// Runs a verb that succeeds; returns its output with `--json`.
fn json(place: &Place, arguments: &[&str]) -> Value {
    let output = place.verb(&[arguments, &["--json"]].concat());
    assert_eq!(code(output.status), 0, "{arguments:?}: {}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a verb that fails; returns its message.
fn refusal(place: &Place, arguments: &[&str]) -> String {
    let output = place.verb(arguments);
    assert_eq!(code(output.status), 125, "{arguments:?}");
    stderr(&output)
}

#[apply(as_root_and_user)]
fn an_image_pinned_while_the_job_runs_outlives_the_rotations() {
    let place = Place::new();
    let mut run = place.start_ready(&[&ON_REQUEST[..], &["--keep-last", "1"]].concat());
    place.snapshot();
    let pinned = json(&place, &["pin", "1", "--note", "before the change"]);
    assert_eq!(
        (&pinned["id"], &pinned["pinned"]),
        (&"000001".into(), &true.into())
    );
    place.snapshot();
    place.snapshot();
    assert_eq!(ids(&place), ["000001", "000003"]);
    let first = &place.images()[0];
    assert_eq!(first["pinned"], true);
    assert_eq!(first["note"], "before the change");
    let list = stdout(&place.verb(&["list"]));
    assert!(list.contains("pinned: before the change"), "{list}");
    assert!(!list.contains(" \n"), "{list:?}");
    assert_eq!(json(&place, &["show", "1"])["note"], "before the change");
    assert!(stdout(&place.verb(&["show", "1"])).contains("pinned     before the change"));

    // A dry run blocks no other process.
    let looked = place.verb(&["prune", "--dry-run", "--json"]);
    let found: Value = serde_json::from_slice(&looked.stdout).unwrap();
    assert_eq!(
        (&found["packs"], &found["programs"]),
        (&0.into(), &0.into())
    );
    assert!(
        stderr(&looked).contains("files that it may be writing"),
        "{}",
        stderr(&looked)
    );
    for verb in [&["forget"][..], &["forget", "1"], &["prune"]] {
        let said = refusal(&place, verb);
        assert!(
            said.contains(&format!("in use by process {}", run.pid())),
            "{said}"
        );
    }
    assert!(refusal(&place, &["pin", "77"]).contains("no image 000077"));

    assert_eq!(stdout(&place.verb(&["unpin", "1"])), "000001 unpinned\n");
    assert_eq!(json(&place, &["unpin", "1"])["was_pinned"], false);
    place.snapshot();
    assert_eq!(ids(&place), ["000004"]);
    place.go();
    assert_eq!(run.wait(), 0);
}

#[apply(as_root)]
fn forget_and_prune_do_what_they_announce() {
    let place = Place::new();
    let mut run = place.start_ready(&ON_REQUEST);
    for _ in 0..4 {
        place.snapshot();
    }
    place.go();
    assert_eq!(run.wait(), 0);

    let said = refusal(&place, &["forget", "9", "1", "000007"]);
    assert!(said.contains("there is no image 000007, 000009"), "{said}");
    assert!(refusal(&place, &["forget", "latest"]).contains("newest good"));
    place.verb(&["pin", "2"]);
    assert!(refusal(&place, &["forget", "2"]).contains("pinned"));
    assert!(refusal(&place, &["forget", "--keep-last", "0"]).contains("--keep-last"));

    let planned = json(&place, &["forget", "--keep-last", "1", "--dry-run"]);
    let removed = |report: &Value| -> Vec<(String, String)> {
        let images = report["images"].as_array().unwrap().iter();
        let gone = images.filter(|image| image["removed"] == true);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        gone.map(|image| (text(&image["id"]), text(&image["reason"])))
            .collect()
    };
    let reason = "no rule keeps it".to_owned();
    let expected = ["000001", "000003"].map(|id| (id.to_owned(), reason.clone()));
    assert_eq!(removed(&planned), expected);
    assert_eq!(ids(&place).len(), 4, "a dry run removes nothing");
    let within = [
        "forget",
        "--keep-last",
        "1",
        "--keep-within",
        "1h",
        "--dry-run",
    ];
    assert_eq!(removed(&json(&place, &within)), []);
    let done = json(&place, &["forget", "--keep-last", "1"]);
    assert_eq!(removed(&done), expected);
    assert!(done["bytes"].as_u64().unwrap() >= planned["bytes"].as_u64().unwrap());
    assert_eq!(ids(&place), ["000002", "000004"]);
    assert_eq!(
        stdout(&place.verb(&["forget", "--keep-last", "5"]))
            .lines()
            .count(),
        2
    );

    fs::write(
        place.file(".ckpt-run/packs/000003-90.pack"),
        vec![7; 1 << 20],
    )
    .unwrap();
    fs::write(place.file(".ckpt-run/images/.tmp-x"), "x").unwrap();
    fs::write(place.file(".ckpt-run/bin/ckpt-run-0123456789abcdef"), "#!").unwrap();
    let planned = json(&place, &["prune", "--dry-run"]);
    let counts = ["temporary_files", "packs", "programs"].map(|key| planned[key].as_u64().unwrap());
    assert_eq!(counts, [1, 1, 1], "the copy that the images map stays");
    assert!(planned["bytes"].as_u64().unwrap() >= 1 << 20);
    let text = stdout(&place.verb(&["prune"]));
    assert!(
        text.contains("packs removed: 1\n") && text.contains("freed: 1."),
        "{text}"
    );
    let again = json(&place, &["prune"]);
    assert_eq!((&again["packs"], &again["bytes"]), (&0.into(), &0.into()));
    assert_eq!(
        fs::read_dir(place.file(".ckpt-run/bin")).unwrap().count(),
        1
    );
    let verified = place.verb(&["verify"]);
    assert!(verified.status.success(), "{}", stdout(&verified));
}

#[apply(as_root)]
fn unmapped_copies_of_the_program_are_removed_at_a_start() {
    let place = Place::new();
    let mut run = place.start_ready(&ON_REQUEST);
    place.snapshot();
    run.signal(nix::sys::signal::Signal::SIGKILL);
    run.wait();
    let bin = place.file(".ckpt-run/bin");
    let mapped = fs::read_dir(&bin).unwrap().next().unwrap().unwrap().path();
    let old = bin.join("ckpt-run-0123456789abcdef");
    fs::write(&old, "#!").unwrap();
    // Another build of ckpt-run continues: the copy that the image maps is not its own.
    let upgraded = place.file("ckpt-run-upgraded");
    // In a process of its own: a descriptor for writing here would be in every process that another test forks, and
    // as long as one of them has it, the program cannot be started (ETXTBSY).
    let copied = std::process::Command::new("sh")
        .args([
            "-c",
            r#"cp "$0" "$1" && printf upgraded >> "$1""#,
            program(),
        ])
        .arg(&upgraded)
        .status();
    assert!(copied.unwrap().success());
    place.go();
    let mut command = std::process::Command::new(&upgraded);
    command
        .args(["--interval", "never", "--", "python3", "-u", "job.py"])
        .current_dir(place.path())
        .env("XDG_CONFIG_HOME", place.path())
        .env_remove("CKPT_RUN_STORE")
        .stdin(std::process::Stdio::null());
    // The built program searches there, too.
    if let Some(criu) = criu_prefix() {
        command.env("CKPT_RUN_CRIU", criu);
    }
    let output = command.output().unwrap();
    assert_eq!(code(output.status), 0, "{}", stderr(&output));
    assert!(stderr(&output).contains("restored"), "{}", stderr(&output));
    assert!(!old.exists() && mapped.exists());
    assert_eq!(fs::read_dir(&bin).unwrap().count(), 2);
}
