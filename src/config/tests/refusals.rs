//! Tests of the messages for refused settings.

use super::*;

#[test]
fn refusals_name_file_line_key_and_a_way_out() {
    for (text, expected) in [
        (
            "\n[snapshot]\n# c\n\nlevel = 1\n\nintervall = '15m'",
            "ckpt-run.toml:7: snapshot.intervall: unknown key; did you mean `interval`?",
        ),
        (
            "interval = '15m'",
            "ckpt-run.toml:1: interval: unknown key; did you mean `snapshot.interval`?",
        ),
        (
            "[snapshots]\nlevel = 1",
            "ckpt-run.toml:1: snapshots: unknown key; did you mean `snapshot`?",
        ),
        (
            "[restart]\nkeep_last = 3",
            "ckpt-run.toml:2: restart.keep_last: unknown key; did you mean `retention.keep_last`?",
        ),
        ("xyzzy = 1", "ckpt-run.toml:1: xyzzy: unknown key"),
        ("\"a\\nb\" = 1", "ckpt-run.toml:1: a\\nb: unknown key"),
        (
            "[snapshot]\ninterval = 15",
            "ckpt-run.toml:2: snapshot.interval: 15 has no unit; write for example \"15s\"",
        ),
        (
            "[snapshot]\ninterval = '15'",
            "ckpt-run.toml:2: snapshot.interval: 15 has no unit; write for example \"15s\"",
        ),
        (
            "[snapshot]\ninterval = 'nevr'",
            "ckpt-run.toml:2: snapshot.interval: \"nevr\" is not a duration such as \"90s\" or \
             \"1h 30m\", nor is it \"never\" or \"auto\"",
        ),
        (
            "[snapshot]\ninterval = '10ms'",
            "ckpt-run.toml:2: snapshot.interval: 10ms is not between 1s and 8760h",
        ),
        (
            "[snapshot]\nbuffer = '1MiB'",
            "ckpt-run.toml:2: snapshot.buffer: 1MiB is not between 16MiB and 1024TiB",
        ),
        (
            "[snapshot]\nlevel = 20",
            "ckpt-run.toml:2: snapshot.level: 20 is not between -7 and 19",
        ),
        (
            "[snapshot]\nlevel = 99999999999999999999",
            "ckpt-run.toml:2: snapshot.level: a number is too large",
        ),
        (
            "isolation = 'ful'",
            "ckpt-run.toml:1: isolation: unknown variant `ful`, expected one of `auto`, `namespaces`, `user`, `none`",
        ),
        (
            "[snapshot]\ncron = '* * *'",
            "ckpt-run.toml:2: snapshot.cron: \"* * *\" is not a cron expression: 3 fields instead \
             of 5 (minute hour day month weekday), 6 (second first) or 7 (year last)",
        ),
        (
            "[restart]\nprevent = ['SIGFOO']",
            "ckpt-run.toml:2: restart.prevent: \"SIGFOO\" is not an exit code (0 to 255) \
             or a signal such as SIGILL",
        ),
        (
            "[restart]\nbackoff_factor = nan",
            "ckpt-run.toml:2: restart.backoff_factor: NaN is not between 1 and 100",
        ),
        (
            "[preemption]\nwatch = 'on'",
            "ckpt-run.toml:2: preemption.watch: unknown variant `on`, expected one of `off`, `auto`, `aws`, `gcp`, `azure`",
        ),
        (
            "[preemption]\nendpoint = '169.254.169.254'",
            "ckpt-run.toml:2: preemption.endpoint: \"169.254.169.254\" is not an address such as \"http://127.0.0.1:8080\"",
        ),
        (
            "store = '~/images'",
            "ckpt-run.toml:1: store: `~` in \"~/images\" is not expanded; write the path of the home folder",
        ),
        (
            "snapshot = true",
            "ckpt-run.toml:1: snapshot: expected a table of settings, `[snapshot]`",
        ),
        (
            "[store]\nx = 1",
            "ckpt-run.toml:1: store: invalid type: map, expected a string",
        ),
    ] {
        assert_eq!(Machine::new().project(text).refusal(), expected, "{text}");
    }
}

#[test]
fn refusals_name_variables_and_flags() {
    for (name, value, expected) in [
        (
            "CKPT_RUN_SNAPSHOT_INTERVAL",
            "900",
            "environment CKPT_RUN_SNAPSHOT_INTERVAL: snapshot.interval: 900 has no unit; \
             write for example \"900s\"",
        ),
        (
            "CKPT_RUN_INTERVAL",
            "15m",
            "environment CKPT_RUN_INTERVAL: no such setting; \
             did you mean `CKPT_RUN_SNAPSHOT_INTERVAL`?",
        ),
        (
            "CKPT_RUN_SNAPSHOT_LEVEL",
            "best",
            "environment CKPT_RUN_SNAPSHOT_LEVEL: snapshot.level: \"best\" is not a number",
        ),
    ] {
        assert_eq!(Machine::new().variable(name, value).refusal(), expected);
    }
    let machine = Machine::new().flag("--interval", "snapshot.interval", "15x");
    assert!(
        machine
            .refusal()
            .starts_with("--interval: snapshot.interval: \"15x\" is not a duration")
    );
}

#[test]
fn a_file_that_is_not_toml_is_refused_with_its_line() {
    let refusal = Machine::new().project("store = 'x'\n[snapshot\n").refusal();
    assert!(refusal.starts_with("ckpt-run.toml:2: "), "{refusal}");
    let refusal = Machine::new()
        .project("store = 'x'\nstore = 'y'\n")
        .refusal();
    assert!(
        refusal.starts_with("ckpt-run.toml:2: duplicate key"),
        "{refusal}"
    );
}

#[test]
fn a_check_tells_all_that_is_wrong_place_by_place() {
    let machine = Machine::new()
        .file("system.toml", "[snapshot]\nlevle = 1\ninterval = 15")
        .file("user.toml", "not toml\n[also\n")
        .project("isolation = 'ful'\n[restart]\nbackoff = '2m'\n[log]\nlevel = 'info'")
        .variable("CKPT_RUN_STOER", "x")
        .flag("--store", "store", "");
    let found: Vec<String> = check(&machine.sources)
        .iter()
        .map(ToString::to_string)
        .collect();
    let folder = machine.path("").display().to_string();
    let found: Vec<String> = found.iter().map(|line| line.replace(&folder, "")).collect();
    assert_eq!(found.len(), 8, "{found:#?}");
    assert!(found[0].starts_with("system.toml:2: snapshot.levle: unknown key; did you mean"));
    assert!(found[1].starts_with("system.toml:3: snapshot.interval: 15 has no unit"));
    assert!(found[2].starts_with("user.toml:1: ") && found[3].starts_with("user.toml:2: "));
    assert!(
        found[4].starts_with("ckpt-run.toml:1: isolation: unknown variant `ful`, expected one of")
    );
    assert!(found[5].starts_with("environment CKPT_RUN_STOER: no such setting; did you mean"));
    assert!(found[6].starts_with("--store: store: "));
    assert!(found[7].contains("restart.backoff") && found[7].starts_with("ckpt-run.toml:3: "));
    let first = load(&machine.sources).unwrap_err();
    assert!(first.to_string().contains("snapshot.levle"), "{first}");
}

#[test]
fn a_check_reports_every_contradiction_of_a_place() {
    let machine = Machine::new().project(
        "[snapshot]\ncron = '@daily'\ninterval = '15m'\n\
         [encryption]\nkey_file = '/k'\nkey_command = 'pass show k'",
    );
    let found = check(&machine.sources);
    let is_contradiction = |error: &ConfigError| matches!(error, ConfigError::Contradiction { .. });
    assert!(found.iter().all(is_contradiction), "{found:?}");
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn a_check_of_good_settings_tells_nothing() {
    let machine = Machine::new().project("[snapshot]\nlevel = 3");
    assert!(check(&machine.sources).is_empty());
    assert!(load(&machine.sources).is_ok());
}
