//! Tests of loading as a whole: layers, origins, refusals and their messages.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

use super::layer::KEYS;
use super::*;

mod refusals;

/// A simulated machine: a folder with the three files, all missing at first.
struct Machine {
    folder: TempDir,
    sources: Sources,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let sources = Sources {
            system: folder.path().join("system.toml"),
            user: Some(folder.path().join("user.toml")),
            project: ProjectFile::InWorkingDirectory(folder.path().join("ckpt-run.toml")),
            environment: Vec::new(),
            overrides: Vec::new(),
        };
        Self { folder, sources }
    }

    fn file(self, name: &str, text: &str) -> Self {
        fs::write(self.path(name), text).unwrap();
        fs::set_permissions(self.path(name), PermissionsExt::from_mode(0o644)).unwrap();
        self
    }

    fn project(self, text: &str) -> Self {
        self.file("ckpt-run.toml", text)
    }

    fn variable(mut self, name: &str, value: &str) -> Self {
        let variable = (name.to_owned(), value.to_owned());
        self.sources.environment.push(variable);
        self
    }

    fn flag(mut self, flag: &'static str, key: &'static str, value: &str) -> Self {
        let value = value.to_owned();
        self.sources.overrides.push(Override { key, flag, value });
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn load(&self) -> Loaded {
        load(&self.sources).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the refusal's message without the folder's name.
    fn refusal(&self) -> String {
        let error = load(&self.sources).expect_err("was not refused");
        let folder = format!("{}/", self.folder.path().display());
        error.to_string().replace(&folder, "")
    }
}

#[test]
fn the_embedded_file_is_the_default() {
    let loaded = Machine::new().load();
    assert_eq!(loaded.config, Config::default());
    assert!(
        loaded
            .origins
            .values()
            .all(|origin| *origin == Origin::Default)
    );
}

#[test]
fn every_key_of_the_embedded_file_is_explained() {
    let mut explained = false;
    for line in DEFAULT_TOML.lines() {
        match line.split_once(" = ") {
            _ if line.starts_with('#') => explained = true,
            // Keys that share a paragraph are directly below each other.
            Some((key, _)) => assert!(explained, "{key} has no comment"),
            None => explained = false,
        }
    }
}

#[test]
fn later_places_win_and_are_remembered() {
    let machine = Machine::new()
        .file(
            "system.toml",
            "[snapshot]\nlevel = 2\ngrace = '2s'\ntimeout = '2m'\ncpus = 2",
        )
        .file(
            "user.toml",
            "[snapshot]\nlevel = 3\ngrace = '3s'\ntimeout = '3m'",
        )
        .project("[snapshot]\nlevel = 4\ngrace = '4s'")
        .variable("CKPT_RUN_SNAPSHOT_LEVEL", "5");
    let snapshot = machine.load().config.snapshot;
    assert_eq!(snapshot.cpus, Cpus::Count(2.try_into().unwrap()));
    assert_eq!(snapshot.timeout, Duration::from_secs(180));
    assert_eq!(snapshot.grace, Duration::from_secs(4));
    assert_eq!(snapshot.level, 5);

    let machine = machine.flag("--level", "snapshot.level", "6");
    let loaded = machine.load();
    assert_eq!(loaded.config.snapshot.level, 6);
    let origin = |key: &str| loaded.origins[key].to_string();
    assert_eq!(origin("snapshot.level"), "--level");
    assert!(origin("snapshot.grace").ends_with("/ckpt-run.toml:3"));
    assert!(origin("snapshot.cpus").ends_with("/system.toml:5"));
    assert_eq!(origin("log.level"), "default");
}

#[test]
fn every_key_can_be_set_by_file_variable_and_flag() {
    for key in KEYS.iter() {
        let words = match &key.value {
            toml::Value::String(text) => text.clone(),
            toml::Value::Array(items) => {
                let items: Vec<&str> = items.iter().filter_map(|item| item.as_str()).collect();
                items.join(",")
            }
            other => other.to_string(),
        };
        let machine = Machine::new()
            .project(&format!("{} = {}", key.path, key.value))
            .variable(&key.variable(), &words)
            .flag("--flag", &key.path, &words);
        let loaded = machine.load();
        assert_eq!(loaded.config, Config::default(), "{}", key.path);
        assert_eq!(loaded.origins[&key.path].to_string(), "--flag");
    }
}

#[test]
fn shown_settings_load_to_themselves() {
    let text = "store = '/s\"1'\nisolation = 'none'\n[snapshot]\ncron = '*/5 * * * mon'\n\
        buffer = '1.5GiB'\ncpus = 3\n[restart]\nmax = -1\nbackoff_factor = 3\n\
        prevent = ['SIGILL', '7']\n[files]\nkeep_content = '1000B'\n[criu]\npath = '/x y/criu'\n\
        [hooks]\non_hang = ['notify', 'a b']";
    let loaded = Machine::new()
        .project(text)
        .variable("CKPT_RUN_SNAPSHOT_LEVEL", "7")
        .variable("CKPT_RUN_FILES_INCLUDE", "a, b")
        .variable("CKPT_RUN_TTY", "true")
        .load();
    let again = Machine::new().project(&loaded.to_toml()).load();
    assert_eq!(again.config, loaded.config);
    let json = serde_json::to_value(loaded.to_table()).unwrap();
    assert_eq!(json["store"], "/s\"1");
    assert_eq!(json["restart"]["prevent"][0], "SIGILL");
    assert_eq!(json["snapshot"]["level"], 7);
    assert_eq!(json["files"]["include"][1], "b");
}

#[test]
fn origins_are_shown_behind_the_values() {
    let text = Machine::new()
        .variable("CKPT_RUN_CRIU", "/opt/criu")
        .load()
        .to_toml_with_origins();
    assert!(
        text.contains("path = \"/opt/criu\"  # environment CKPT_RUN_CRIU\n"),
        "{text}"
    );
    assert!(
        text.contains("\n[log]\nlevel = \"info\"  # default\n"),
        "{text}"
    );
}

#[test]
fn a_terminal_is_wanted_refused_or_left_to_us() {
    let tty = |text: &str| Machine::new().project(text).load().config.tty;
    assert_eq!(tty("tty = true"), Tty::Always);
    assert_eq!(tty("tty = false"), Tty::Never);
    assert_eq!(tty("tty = 'auto'"), Tty::Auto);
    let machine = Machine::new().variable("CKPT_RUN_TTY", "true");
    assert_eq!(machine.load().config.tty, Tty::Always);
    for refused in ["tty = 'yes'", "tty = 1"] {
        let refusal = Machine::new().project(refused).refusal();
        assert!(
            refusal.contains("auto") && refusal.contains("true or false"),
            "{refusal}"
        );
    }
}

#[test]
fn a_bare_interval_means_seconds_on_the_command_line_only() {
    let machine = Machine::new().flag("--interval", "snapshot.interval", "900");
    let interval = machine.load().config.snapshot.interval;
    assert_eq!(interval, Interval::Every(Duration::from_secs(900)));
    let machine = Machine::new().flag("--grace", "snapshot.grace", "900");
    assert!(machine.refusal().contains("has no unit"));
}

#[test]
fn one_place_with_interval_and_cron_contradicts_itself() {
    let both = "[snapshot]\ncron = '@daily'\ninterval = '15m'";
    assert_eq!(
        Machine::new().project(both).refusal(),
        "ckpt-run.toml:3: snapshot.interval and ckpt-run.toml:2: snapshot.cron: \
         only one can be given; remove the other"
    );
    let flags = Machine::new()
        .flag("--interval", "snapshot.interval", "5m")
        .flag("--cron", "snapshot.cron", "@daily");
    assert!(
        flags
            .refusal()
            .starts_with("--interval: snapshot.interval and --cron: snapshot.cron")
    );
    let off = "[snapshot]\ncron = ''\ninterval = '20m'";
    assert_eq!(
        Machine::new().project(off).load().config.snapshot.cron,
        None
    );
}

#[test]
fn the_later_place_decides_between_interval_and_cron() {
    let machine = Machine::new()
        .file("user.toml", "[snapshot]\ninterval = '20m'")
        .project("[snapshot]\ncron = '@daily'");
    let loaded = machine.load();
    assert_eq!(
        loaded.config.snapshot.cron,
        CronExpression::parse("@daily").ok()
    );

    let machine = machine.flag("--interval", "snapshot.interval", "5m");
    let loaded = machine.load();
    assert_eq!(loaded.config.snapshot.cron, None);
    assert_eq!(loaded.origins["snapshot.cron"].to_string(), "--interval");
}

#[test]
fn the_later_place_decides_between_key_file_and_key_command() {
    let machine = Machine::new()
        .file("user.toml", "encryption.key_file = '/k'")
        .project("encryption.key_command = 'pass show k'");
    let loaded = machine.load();
    let command = Encryption::KeyCommand("pass show k".to_owned());
    assert_eq!(loaded.config.encryption, command);
    let origin = loaded.origins["encryption.key_file"].to_string();
    assert!(origin.ends_with("ckpt-run.toml:1"), "{origin}");

    let machine = machine.variable("CKPT_RUN_ENCRYPTION_KEY_FILE", "/v");
    let file = Encryption::KeyFile(PathBuf::from("/v"));
    assert_eq!(machine.load().config.encryption, file);
    let machine = machine.flag("--none", "encryption.key_file", "");
    assert_eq!(machine.load().config.encryption, Encryption::Off);
}

#[test]
fn an_empty_key_ends_only_itself() {
    let machine = Machine::new()
        .file("user.toml", "encryption.key_file = '/k'")
        .project("encryption.key_command = ' '");
    let file = Encryption::KeyFile(PathBuf::from("/k"));
    assert_eq!(machine.load().config.encryption, file);
}

#[test]
fn one_place_with_key_file_and_key_command_contradicts_itself() {
    let both = "[encryption]\nkey_file = '/k'\nkey_command = 'pass show k'";
    let refusal = Machine::new().project(both).refusal();
    for part in [
        "ckpt-run.toml:2: encryption.key_file",
        "ckpt-run.toml:3: encryption.key_command",
        "only one can be given",
    ] {
        assert!(refusal.contains(part), "{refusal}");
    }
    let one = "[encryption]\nkey_file = '/k'\nkey_command = ''";
    let file = Encryption::KeyFile(PathBuf::from("/k"));
    assert_eq!(Machine::new().project(one).load().config.encryption, file);
}

#[test]
fn one_key_by_two_variables_is_a_contradiction() {
    let machine = Machine::new()
        .variable("CKPT_RUN_CRIU", "/a")
        .variable("CKPT_RUN_CRIU_PATH", "/b");
    assert!(
        machine
            .refusal()
            .ends_with("both set the same key; keep one")
    );
}

#[test]
fn a_first_wait_longer_than_the_longest_is_refused() {
    assert_eq!(
        Machine::new().project("restart.backoff = '2m'").refusal(),
        "ckpt-run.toml:1: restart.backoff and default: restart.backoff_max: \
         the first wait is longer than the maximum"
    );
}

#[test]
fn memory_that_gpus_share_is_not_left_to_the_driver() {
    let peer =
        |memory| Machine::new().project(&format!("[cuda]\nnccl = 'peer'\nmemory = '{memory}'"));
    assert_eq!(peer("auto").load().config.cuda.nccl, Nccl::Peer);
    assert_eq!(
        peer("driver").refusal(),
        "ckpt-run.toml:2: cuda.nccl and ckpt-run.toml:3: cuda.memory: the driver alone cannot restore memory that \
         GPUs share: set cuda.memory = \"auto\" or \"resident\""
    );
}

#[test]
fn variables_told_to_the_job_set_only_the_store() {
    let loaded = Machine::new()
        .variable("CKPT_RUN_JOB", "7")
        .variable("CKPT_RUN_SOCKET", "/s")
        .variable("CKPT_RUN_STORE", "/images")
        .variable("UNRELATED", "x")
        .load();
    assert_eq!(loaded.config.store, Path::new("/images"));
}

#[test]
fn a_named_file_must_be_there_and_replaces_the_project_file() {
    let mut machine = Machine::new().project("[snapshot]\nlevel = 7");
    let named = machine.path("other.toml");
    machine.sources.project = ProjectFile::Named(named.clone());
    assert_eq!(
        machine.refusal(),
        "cannot read configuration file other.toml (named by --config or CKPT_RUN_CONFIG)"
    );
    fs::write(&named, "store = '/other'").unwrap();
    let config = machine.load().config;
    assert_eq!(
        (config.snapshot.level, config.store),
        (1, PathBuf::from("/other"))
    );
}

#[test]
fn a_project_file_that_others_can_write_is_refused() {
    let machine = Machine::new().project("store = 'x'");
    let file = machine.path("ckpt-run.toml");
    fs::set_permissions(&file, PermissionsExt::from_mode(0o666)).unwrap();
    assert_eq!(
        machine.refusal(),
        "ckpt-run.toml: refused: everybody may write to it, so others could choose the commands that ckpt-run executes; \
         `chmod o-w ckpt-run.toml`, or trust it by `--config ckpt-run.toml`"
    );
}

#[test]
fn a_file_too_large_to_be_a_configuration_is_refused() {
    let machine = Machine::new().project(&"#".repeat((1 << 20) + 1));
    assert!(machine.refusal().contains("limit 1048576 bytes"));
}

#[test]
fn a_fifo_instead_of_the_project_file_does_not_hang() {
    let machine = Machine::new();
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o600);
    nix::unistd::mkfifo(&machine.path("ckpt-run.toml"), mode).unwrap();
    assert_eq!(machine.load().config, Config::default());
}

proptest! {
    #[test]
    fn no_file_makes_loading_panic(text in "(\\[?[a-z_.]{0,12}\\]?( = )?['\"0-9a-z\\[\\]{}-]{0,8}\n){0,6}") {
        let _ = load(&Machine::new().project(&text).sources);
    }

    #[test]
    fn no_variable_makes_loading_panic(key in 0..KEYS.len(), value in "\\PC{0,20}") {
        let _ = load(&Machine::new().variable(&KEYS[key].variable(), &value).sources);
    }
}
