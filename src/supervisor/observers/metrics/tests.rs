//! Tests of the exported metrics: the alerts, the dashboard and the guide name no others.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use super::exporter::TextFile;
use super::prometheus_text;
use crate::history::{Freeze, Summary};
use crate::remote_run::UploadProgress;
use crate::store::Usage;
use crate::supervisor::observers::run_phase::State;
use crate::supervisor::observers::run_status::Status;

const ALERTS: &str = include_str!("../../../../config/prometheus-alerts.yml");
const DASHBOARD: &str = include_str!("../../../../config/grafana-dashboard.json");
const GUIDE: &str = include_str!("../../../../docs/guide/metrics.md");

/// A run of which everything is known.
fn status() -> Status {
    let last = Freeze {
        time: jiff::Timestamp::from_second(1_790_000_000).unwrap(),
        image: "000002".to_owned(),
        trigger: "schedule".to_owned(),
        freeze_seconds: 0.75,
        durable_seconds: 3.0,
        raw_bytes: 100,
        stored_bytes: 10,
    };
    let mut freeze_counts = [0; 11];
    freeze_counts[3] = 2;
    freeze_counts[10] = 1;
    Status {
        state: State::Running,
        version: "0.1.0".to_owned(),
        store: PathBuf::from("/a \"b\"\\c"),
        next_snapshot: Some(last.time),
        interval_seconds: Some(900.0),
        snapshots: vec![last],
        work_at_risk_seconds: Some(12.5),
        restarts_used: Some(1),
        restarts_left: Some(2),
        usage: Some(Usage {
            images: 2,
            bytes: 4096,
        }),
        free_bytes: Some(1 << 40),
        remote: Some(UploadProgress::default()),
        exit_code: Some(0),
        summary: Summary {
            snapshots: 3,
            freeze_seconds: 401.5,
            freeze_counts,
            ..Summary::default()
        },
        ..Status::default()
    }
}

/// Names of all samples.
fn exported() -> BTreeSet<String> {
    let text = prometheus_text::of(&status());
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let name = |line: &str| line.split('{').next().unwrap().to_owned();
    samples.map(name).collect()
}

/// Everything in a text that looks like a name of ours.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|byte: char| !byte.is_ascii_alphanumeric() && byte != '_');
    let ours = words.filter(|word| word.starts_with("ckpt_run_"));
    ours.map(str::to_owned).collect()
}

/// Returns the metrics as the guide names them: a histogram by its name alone.
fn families() -> BTreeSet<String> {
    let text = prometheus_text::of(&status());
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect()
}

#[test]
fn each_figure_has_a_type_a_help_and_the_store_as_a_label() {
    let text = prometheus_text::of(&status());
    for line in [
        r#"ckpt_run_info{store="/a \"b\"\\c",version="0.1.0"} 1"#,
        r#"ckpt_run_up{store="/a \"b\"\\c"} 1"#,
        r#"ckpt_run_state{store="/a \"b\"\\c",state="running"} 1"#,
        r#"ckpt_run_state{store="/a \"b\"\\c",state="paused"} 0"#,
        "# TYPE ckpt_run_snapshots_total counter",
        r#"ckpt_run_snapshots_total{store="/a \"b\"\\c"} 3"#,
        "# TYPE ckpt_run_snapshot_freeze_seconds histogram",
        r#"ckpt_run_snapshot_freeze_seconds_bucket{store="/a \"b\"\\c",le="0.5"} 0"#,
        r#"ckpt_run_snapshot_freeze_seconds_bucket{store="/a \"b\"\\c",le="1"} 2"#,
        r#"ckpt_run_snapshot_freeze_seconds_bucket{store="/a \"b\"\\c",le="300"} 2"#,
        r#"ckpt_run_snapshot_freeze_seconds_bucket{store="/a \"b\"\\c",le="+Inf"} 3"#,
        r#"ckpt_run_snapshot_freeze_seconds_sum{store="/a \"b\"\\c"} 401.5"#,
        r#"ckpt_run_snapshot_freeze_seconds_count{store="/a \"b\"\\c"} 3"#,
        r#"ckpt_run_last_snapshot_timestamp_seconds{store="/a \"b\"\\c"} 1790000000"#,
        r#"ckpt_run_work_at_risk_seconds{store="/a \"b\"\\c"} 12.5"#,
        r#"ckpt_run_store_free_bytes{store="/a \"b\"\\c"} 1099511627776"#,
    ] {
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
}

#[test]
fn what_is_not_known_is_left_out() {
    let text = prometheus_text::of(&Status::default());
    assert!(text.contains("ckpt_run_up{store=\"\"} 0"));
    for name in [
        "last_snapshot",
        "next_snapshot",
        "restarts_left",
        "store_bytes",
        "exit_code",
    ] {
        assert!(!text.contains(name), "{name}");
    }
}

#[test]
fn alerts_and_dashboard_speak_of_figures_that_there_are() {
    let exported = exported();
    for (file, text) in [("alerts", ALERTS), ("dashboard", DASHBOARD)] {
        let named = named(text);
        assert!(named.len() > 5, "{file} names only {named:?}");
        let unknown: Vec<&String> = named.difference(&exported).collect();
        assert!(unknown.is_empty(), "{file} names {unknown:?}");
    }
}

#[test]
fn the_guide_lists_every_figure_and_no_other() {
    let listed = GUIDE
        .lines()
        .filter(|line| line.starts_with("| `ckpt_run_"));
    let listed = named(&listed.collect::<Vec<_>>().join("\n"));
    assert_eq!(listed, families());
}

#[test]
fn every_alert_has_what_a_reader_needs() {
    let alerts: serde_json::Value = serde_saphyr::from_str(ALERTS).unwrap();
    let groups = alerts["groups"].as_array().unwrap();
    let rules = groups
        .iter()
        .flat_map(|group| group["rules"].as_array().unwrap());
    let mut names = BTreeSet::new();
    for rule in rules {
        let name = rule["alert"].as_str().unwrap();
        assert!(names.insert(name), "{name} twice");
        assert!(!named(rule["expr"].as_str().unwrap()).is_empty(), "{name}");
        assert!(rule["labels"]["severity"].is_string(), "{name}");
        for annotation in ["summary", "description"] {
            let text = rule["annotations"][annotation].as_str().unwrap();
            assert!(text.contains("$labels.store"), "{name}: {annotation}");
        }
        assert!(
            GUIDE.contains(&format!("`{name}`")),
            "the guide lacks {name}"
        );
    }
    assert!(names.len() >= 4, "{names:?}");
}

#[test]
fn every_panel_of_the_dashboard_asks_for_figures() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    assert!(dashboard["uid"].is_string() && dashboard["schemaVersion"].is_u64());
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()));
        assert!(panel["title"].is_string());
        let place = &panel["gridPos"];
        let end = place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap();
        assert!(end <= 24, "{panel}");
        for target in panel["targets"].as_array().unwrap() {
            let asked = target["expr"].as_str().unwrap();
            assert!(!named(asked).is_empty(), "{asked}");
        }
    }
}

/// Path at which `scripts/setup-tests` installs promtool.
const PROMTOOL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/tools/promtool");

/// Runs promtool; `None`, with a message, if it is missing.
fn promtool(arguments: &[&str], stdin: &str) -> Option<String> {
    let fetched = Path::new(PROMTOOL).is_file();
    let mut command = Command::new(if fetched { PROMTOOL } else { "promtool" });
    command.args(arguments).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = command.spawn() else {
        eprintln!("SKIPPED: no promtool (scripts/setup-tests fetches it)");
        return None;
    };
    child
        .stdin
        .take()
        .unwrap()
        .write_all(stdin.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{said}");
    Some(said)
}

#[test]
fn promtool_finds_nothing_wrong_with_the_figures() {
    for status in [status(), Status::default()] {
        if let Some(said) = promtool(&["check", "metrics"], &prometheus_text::of(&status)) {
            assert_eq!(said, "");
        }
    }
}

#[test]
fn promtool_finds_nothing_wrong_with_the_alerts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("alerts.yml");
    fs::write(&file, ALERTS).unwrap();
    if let Some(said) = promtool(&["check", "rules", file.to_str().unwrap()], "") {
        assert!(said.contains("SUCCESS"), "{said}");
    }
}

#[test]
fn alerts_fire_for_their_cause_and_not_for_a_good_run() {
    let folder = tempfile::tempdir().unwrap();
    let (rules, test) = (
        folder.path().join("rules.yml"),
        folder.path().join("test.yml"),
    );
    fs::write(&rules, ALERTS).unwrap();
    let cases = include_str!("alerts-test.yml").replace("RULES", rules.to_str().unwrap());
    fs::write(&test, cases).unwrap();
    if let Some(said) = promtool(&["test", "rules", test.to_str().unwrap()], "") {
        assert!(said.contains("SUCCESS"), "{said}");
    }
}

#[test]
fn the_file_is_replaced_as_a_whole_and_stays_as_it_was_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.prom");
    let file = TextFile::new(path.clone());
    file.write(&status(), false);
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o644);
    assert!(
        fs::read_to_string(&path)
            .unwrap()
            .contains("state=\"running\"} 1")
    );
    let ended = Status {
        state: State::Finished,
        ..status()
    };
    file.write(&ended, true);
    file.write(&status(), false);
    assert!(
        fs::read_to_string(&path)
            .unwrap()
            .contains("state=\"finished\"} 1")
    );
    assert_eq!(
        fs::read_dir(folder.path()).unwrap().count(),
        1,
        "nothing else is left"
    );
}

#[test]
fn a_link_of_another_user_leads_root_nowhere() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: only root can give a link away");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (theirs, link) = (folder.path().join("etc"), folder.path().join("prom"));
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::symlink(&theirs, &link).unwrap();
    TextFile::new(link.join("ours.prom")).write(&status(), false);
    assert!(
        theirs.join("ours.prom").is_file(),
        "root's own link is followed"
    );
    std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
    TextFile::new(link.join("theirs.prom")).write(&status(), false);
    assert_eq!(fs::read_dir(&theirs).unwrap().count(), 1);
}

#[test]
fn a_file_put_in_place_of_the_new_one_keeps_its_mode() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    fs::write(&secret, "").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let prom = folder.path().join("prom");
    fs::create_dir(&prom).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Puts a link in place of each temporary file as soon as it sees one.
        scope.spawn(|| {
            let link = folder.path().join("link");
            while !stop.load(Ordering::Relaxed) {
                for entry in fs::read_dir(&prom).unwrap().flatten() {
                    let _ = std::os::unix::fs::symlink(&secret, &link);
                    let _ = fs::rename(&link, entry.path());
                }
            }
        });
        let file = TextFile::new(prom.join("run.prom"));
        for _ in 0..2000 {
            file.write(&status(), false);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let mode = fs::metadata(&secret).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
