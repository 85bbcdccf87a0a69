//! Verbs that print data, as text and as JSON.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::harness::{Place, apply, as_root, code, criu_prefix, program, stderr, stdout};

#[apply(as_root)]
fn image_verbs_print_json_with_the_documented_fields() {
    let place = Place::new();
    let mut run = place.start_ready(&[]);
    assert_eq!(place.json(&["snapshot"])["id"], "000001");
    place.snapshot();

    let list = place.json(&["list"]);
    let ids: Vec<&Value> = list
        .as_array()
        .unwrap()
        .iter()
        .map(|image| &image["id"])
        .collect();
    assert_eq!(ids, ["000001", "000002"], "oldest first");
    let image = &list[0];
    assert!(image["created"].as_str().unwrap().ends_with('Z'));
    assert!(image["raw_bytes"].as_u64().unwrap() > image["stored_bytes"].as_u64().unwrap());
    assert!(image["freeze_ms"].as_u64().unwrap() > 0);
    assert_eq!(image["trigger"], "request");
    assert_eq!(image["damaged"], Value::Null);
    assert_eq!(
        (&image["pinned"], &image["note"]),
        (&false.into(), &Value::Null)
    );

    let shown = place.json(&["show"]);
    assert_eq!(shown["id"], "000002", "the latest");
    assert_eq!(place.json(&["show", "000001"])["id"], "000001");
    assert_eq!(
        shown["command"],
        serde_json::json!(["python3", "-u", "job.py"])
    );
    assert_eq!(shown["processes"], 2);
    assert!(shown["freeze_seconds"].as_f64().unwrap() > 0.0);
    let phases: Vec<&str> = shown["phases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|phase| phase["name"].as_str().unwrap())
        .collect();
    assert!(phases.contains(&"dump"), "{phases:?}");
    let writing = shown["writing"].as_object().unwrap().values();
    let sum: f64 = writing.map(|share| share.as_f64().unwrap()).sum();
    assert!((sum - 1.0).abs() < 1e-6, "{sum}");
    assert!(shown["streams"].as_array().unwrap().iter().any(|stream| {
        stream["name"].as_str().unwrap().starts_with("criu/pages-")
            && stream["kind"] == "memory"
            && stream["bytes"].is_u64()
    }));
    let tree = shown["process_tree"].as_array().unwrap();
    let job = tree.last().unwrap();
    // If python3 is a script, its path has changed by now.
    let words = job["arguments"].as_array().unwrap();
    assert_eq!(words[words.len() - 2..], ["-u", "job.py"]);
    assert_eq!(
        (&job["parent"], &job["threads"]),
        (&tree[0]["pid"], &1.into())
    );
    assert!(job["memory"]["anonymous"].as_u64().unwrap() > 1 << 20);
    let text = stdout(&place.verb(&["show"]));
    assert!(
        text.contains("python3 -u job.py [threads 1, anonymous "),
        "{text}"
    );
    assert!(text.contains("(request: ckpt-run snapshot)"), "{text}");
    let writing = text.lines().find(|line| line.starts_with("writing    "));
    assert!(writing.is_some_and(|line| line.contains("disk ")), "{text}");

    let verified = place.json(&["verify"]);
    assert_eq!(verified.as_array().unwrap().len(), 2);
    assert!(
        verified
            .as_array()
            .unwrap()
            .iter()
            .all(|one| one["good"] == true)
    );
    assert_eq!(place.json(&["verify", "--all"]), verified);
    assert!(stdout(&place.verb(&["verify", "latest"])).starts_with("000002 good"));

    place.go();
    assert_eq!(run.wait(), 0);
}

#[apply(as_root)]
fn data_goes_to_stdout_and_talk_to_stderr_without_colours() {
    let place = Place::new();
    assert_eq!(code(place.verb(&["--", "true"]).status), 0);
    let list = place.verb(&["list"]);
    assert_eq!(stdout(&list), "");
    assert!(
        stderr(&list).starts_with("ckpt-run: no images"),
        "{}",
        stderr(&list)
    );
    assert_eq!(place.json(&["list"]), serde_json::json!([]));
    let snapshot = place.verb(&["snapshot"]);
    assert_eq!(code(snapshot.status), 125);
    assert!(stderr(&snapshot).contains("cannot reach a supervisor"));
    assert!(!stderr(&snapshot).contains('\u{1b}'));
    let absent = place.verb(&["show", "latest"]);
    assert_eq!(code(absent.status), 125);
    assert!(
        stderr(&absent).contains("there is no image"),
        "{}",
        stderr(&absent)
    );
}

#[test]
fn doctor_prints_its_checks_as_json() {
    let place = Place::new();
    let checks = place.json(&["doctor"]);
    let checks = checks.as_array().unwrap();
    assert!(!checks.is_empty());
    for check in checks {
        assert!(check["name"].is_string() && check["detail"].is_string());
        assert!(["ok", "note", "problem"].contains(&check["status"].as_str().unwrap()));
        assert!(check["remedy"].is_string() != (check["status"] == "ok"));
    }
}

#[apply(as_root)]
fn doctor_knows_what_criu_lacks() {
    let place = Place::new();
    let mut without_loopback = Command::new("unshare");
    without_loopback
        .args(["--net", program(), "doctor", "--criu"])
        .arg(criu_prefix().expect("a CRIU of the tests"));
    place.in_folder(&mut without_loopback);
    let output = without_loopback.output().expect("unshare starts");
    assert_eq!(code(output.status), 1);
    let said = stdout(&output);
    assert!(said.contains("-> ip link set lo up\n"), "{said}");
}

#[test]
fn config_default_prints_the_file_that_changes_nothing() {
    let place = Place::new();
    let default = place.verb(&["config", "default"]);
    assert_eq!(code(default.status), 0);
    assert!(stdout(&default).starts_with("# Every setting of ckpt-run"));
    let before = stdout(&place.verb(&["config", "show"]));
    fs::write(place.file("ckpt-run.toml"), &default.stdout).unwrap();
    // The file's own `interval` and `cron = ""` do not contradict each other.
    let output = place.verb(&["config", "show"]);
    assert_eq!(stdout(&output), before, "{}", stderr(&output));
}

#[test]
fn config_show_prints_every_value_and_its_source() {
    let place = Place::new();
    fs::write(place.file("ckpt-run.toml"), "[retention]\nkeep_last = 7\n").unwrap();
    let show = |arguments: &[&str]| {
        let output = place
            .command(arguments)
            .env("CKPT_RUN_RESTART_MAX", "9")
            .output()
            .unwrap();
        assert_eq!(code(output.status), 0, "{}", stderr(&output));
        stdout(&output)
    };
    let text = show(&["config", "show", "--origin", "--store", "here"]);
    for line in [
        "store = \"here\"  # --store",
        "keep_last = 7  # ckpt-run.toml:2",
        "max = \"9\"  # environment CKPT_RUN_RESTART_MAX",
        "policy = \"on-failure\"  # default",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}: {text}");
    }
    assert!(!show(&["config", "show"]).contains('#'));

    let plain: Value = serde_json::from_str(&show(&["config", "show", "--json"])).unwrap();
    assert_eq!(plain["retention"]["keep_last"], 7);
    let told = show(&["config", "show", "--origin", "--json"]);
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["settings"], plain);
    assert_eq!(told["origins"]["retention.keep_last"], "ckpt-run.toml:2");
}

#[test]
fn config_show_refuses_the_same_settings_as_a_run() {
    let place = Place::new();
    fs::write(place.file("ckpt-run.toml"), "sore = \"x\"\n").unwrap();
    let output = place.verb(&["config", "show"]);
    assert_eq!(code(output.status), 125);
    assert!(
        stderr(&output).contains("ckpt-run.toml:1"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn config_check_reports_everything_and_changes_nothing() {
    let place = Place::new();
    fs::write(
        place.file("other.toml"),
        "[snapshot]\nlevle = 1\ninterval = 15\n",
    )
    .unwrap();
    let good = place.verb(&["config", "check"]);
    assert_eq!((code(good.status), stdout(&good)), (0, String::new()));
    let bad = place.verb(&["config", "check", "other.toml", "--store", ""]);
    assert_eq!(code(bad.status), 125);
    let said = stderr(&bad);
    for part in [
        "ckpt-run: other.toml:2: snapshot.levle: unknown key; did you mean `level`?\n",
        "ckpt-run: other.toml:3: snapshot.interval: 15 has no unit",
        "ckpt-run: --store: store: ",
        "errors in the settings: 3\n",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let checked = place.json(&["config", "check", "other.toml"]);
    assert_eq!(
        (
            &checked["good"],
            checked["errors"].as_array().unwrap().len()
        ),
        (&false.into(), 2)
    );
    let missing = place.verb(&["config", "check", "none.toml"]);
    assert_eq!(code(missing.status), 125);
    assert!(
        stderr(&missing).contains("none.toml"),
        "{}",
        stderr(&missing)
    );
    assert!(!place.file(".ckpt-run").exists());
}

#[test]
fn config_check_reports_missing_files_and_programs() {
    let place = Place::new();
    let settings = r#"
criu.path = "no-criu"
encryption.key_file = "no-key"
metrics.textfile = "no-folder/train.txt"
hooks.after_restore = ["no-program", "it is back"]
hooks.on_hang = ["sh", "-c", "no-program"]
hooks.on_give_up = "no-program"
"#;
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    let told = |checked: &Value, kind: &str| -> String {
        let all = checked[kind].as_array().unwrap().iter();
        all.map(|one| one.as_str().unwrap().to_owned() + "\n")
            .collect()
    };
    let checked = place.json(&["config", "check"]);
    assert_eq!(checked["good"], false);
    let (errors, warnings) = (told(&checked, "errors"), told(&checked, "warnings"));
    for part in [
        "criu.path: cannot run CRIU at no-criu to query its version",
        "encryption.key_file: cannot read the key file no-key: No such file",
        "ckpt-run key generate no-key\n",
    ] {
        assert!(errors.contains(part), "{part}: {errors}");
    }
    for part in [
        "metrics.textfile: there is no folder no-folder, ",
        "metrics.textfile: the node exporter reads only files with names in .prom",
        "hooks.after_restore: cannot find no-program: there is no such file or program on PATH that this user can reach; ",
    ] {
        assert!(warnings.contains(part), "{part}: {warnings}");
    }
    assert_eq!((errors.lines().count(), warnings.lines().count()), (2, 3));

    let (_, warned) = settings.split_once("metrics").unwrap();
    fs::write(place.file("ckpt-run.toml"), format!("metrics{warned}")).unwrap();
    let output = place.verb(&["config", "check"]);
    assert_eq!(code(output.status), 0);
    let said = stderr(&output);
    assert_eq!(said.matches("ckpt-run: warning: ").count(), 3, "{said}");
    assert!(said.contains("the settings are valid"), "{said}");
}
