//! Entry points of the fuzz targets in `fuzz/`: decoders of untrusted bytes.
//!
//! A target is a function of bytes. The first byte, a letter, selects the decoder for the rest, so one target covers a
//! family of decoders. Each target returns true if the input was accepted. A seed whose name begins with `valid` must
//! be accepted, which shows that the target still reaches the code under test. A target fails by a panic, a failed
//! assertion, a hang, or memory out of proportion to the input.
//!
//! The module is compiled for fuzzing and for tests only; a test runs the corpus through the same functions.

mod talk;
#[cfg(test)]
mod tests;

use std::cell::OnceCell;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;

use tempfile::TempDir;

use crate::config::{self, Loaded, Override, ProjectFile, Sources};
use crate::doctor::space_checks::cgroup_headroom;
use crate::gpu::mapping;
use crate::history::{self, Account, Entry};
use crate::run::RunState;
use crate::run::image_facts::{ImageFacts, run_of};
use crate::store::ImageEntry;
use crate::store::tests::fuzz_store::Kind;
use crate::supervisor::control::fuzz_control;
use crate::{cli, criu, cuda, job, store};

/// Fuzz target: its name (also that of its binary and its corpus) and its function.
pub type Target = (&'static str, fn(&[u8]) -> bool);

/// Every target.
pub const TARGETS: [Target; 4] = [
    ("manifest", manifest),
    ("pack", pack),
    ("protocol", protocol),
    ("metadata", metadata),
];

/// Runs a target and waits until the threads that it started have exited. A resource that such a thread still holds
/// would be reported as leaked.
pub fn run(target: fn(&[u8]) -> bool, input: &[u8]) {
    let before = threads();
    let _ = target(input);
    while threads() > before {
        thread::yield_now();
    }
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

thread_local! {
    static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
}

/// Returns this thread's folder for files and sockets.
fn folder() -> PathBuf {
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| tempfile::tempdir().unwrap());
        folder.path().to_owned()
    })
}

/// Decodes a manifest. First byte: `f` for a file unchanged, `s` for a file with corrected checksums, `m` for two
/// messages, `k` for two messages of an encrypted store.
#[must_use]
pub fn manifest(input: &[u8]) -> bool {
    match input.split_first() {
        Some((b'f', file)) => {
            let (accepted, entries) = store::tests::fuzz_store::manifest(Kind::Plain, file);
            entries.iter().for_each(cli::fuzz_cli::listed);
            accepted
        }
        Some((b's', file)) => store::tests::fuzz_store::resealed_manifest(file),
        Some((b'm', messages)) => {
            store::tests::fuzz_store::manifest_messages(Kind::Plain, messages)
        }
        Some((b'k', messages)) => {
            store::tests::fuzz_store::manifest_messages(Kind::Encrypted, messages)
        }
        Some(_) | None => false,
    }
}

/// Decodes a pack or a small file of the store. First byte: `f` file, `c` chunk, `x` chunk of an encrypted store, `e`
/// encoding and decoding, `n` name, `o` the store's format, `r` reason, `k` key, `h` key check, `p` portable file, `q`
/// portable file with corrected checksums.
#[must_use]
pub fn pack(input: &[u8]) -> bool {
    match input.split_first() {
        Some((b'f', file)) => store::tests::fuzz_store::pack_file(file),
        Some((b'c', chunk)) => store::tests::fuzz_store::chunk(Kind::Plain, chunk),
        Some((b'x', chunk)) => store::tests::fuzz_store::chunk(Kind::Encrypted, chunk),
        Some((b'k', text)) => store::tests::fuzz_store::key(text),
        Some((b'h', text)) => store::tests::fuzz_store::key_check_file(text),
        Some((b'p', file)) => store::tests::fuzz_store::portable(file),
        Some((b'q', file)) => store::tests::fuzz_store::resealed_portable(file),
        Some((b'e', raw)) => store::tests::fuzz_store::round_trip(raw),
        Some((b'n', name)) => store::tests::fuzz_store::file_name(&String::from_utf8_lossy(name)),
        Some((b'o', text)) => store::tests::fuzz_store::format_file(text),
        Some((b'r', text)) => store::tests::fuzz_store::reason(text),
        Some(_) | None => false,
    }
}

/// Decodes messages. First byte: `d` for a conversation (see `talk`) with the receiver of a dump, `r` with the sender
/// of a restore, `q` and `e` for requests to the sandbox and its events, `c` for plain bytes to the control socket, `a`
/// for its answer.
#[must_use]
pub fn protocol(input: &[u8]) -> bool {
    match input.split_first() {
        Some((b'd', talk)) => without_leak(|| talk::dump(&folder(), talk)),
        Some((b'r', talk)) => without_leak(|| talk::restore(&folder(), talk)),
        Some((b'q', talk)) => without_leak(|| talk::requests(talk)),
        Some((b'e', talk)) => without_leak(|| talk::events(talk)),
        Some((b'c', bytes)) => fuzz_control::client_says(bytes),
        Some((b'a', line)) => fuzz_control::supervisor_says(&String::from_utf8_lossy(line)),
        Some(_) | None => false,
    }
}

/// Decodes metadata. First byte: `l` CRIU's log, `v` CRIU's version, `i` an image's facts, `r` a run's state, `h` a
/// run's history, `c` a configuration file, `e` environment and flags, `n` netlink; from /proc: `t` a timer, `g` a GPU,
/// `d` the driver, `o` control groups.
#[must_use]
pub fn metadata(input: &[u8]) -> bool {
    let Some((letter, bytes)) = input.split_first() else {
        return false;
    };
    let text = || String::from_utf8_lossy(bytes);
    match letter {
        b'l' => criu_log(bytes),
        b'v' => criu::fuzz_criu::version(&text()),
        b'i' => image_facts(bytes),
        b'r' => run_state(bytes),
        b'h' => event_log(bytes),
        b'c' => config_file(bytes),
        b'e' => settings(&text()),
        b't' => job::fuzz_job::timer(&text()),
        b'n' => job::fuzz_job::netlink(bytes),
        b'g' => cuda::fuzz_cuda::information(&text()),
        b'd' => mapping::branch(&text()).is_some(),
        b'o' => cgroup_headroom(&folder(), &text()).is_some(),
        _ => false,
    }
}

fn criu_log(bytes: &[u8]) -> bool {
    let path = file("criu.log", bytes);
    criu::reason_in(&path).is_some_and(|reason| !reason.to_string().is_empty())
}

fn image_facts(meta: &[u8]) -> bool {
    let number = |index: usize| u64::from(meta.get(index).copied().unwrap_or(0));
    cli::fuzz_cli::listed(&ImageEntry {
        id: store::ImageId::new(1 + number(0)).unwrap(),
        created_unix_ms: u64::MAX >> (number(1) % 64),
        raw_bytes: u64::MAX >> (number(2) % 64),
        stored_bytes: u64::MAX >> (number(3) % 64),
        meta: meta.to_vec(),
        damaged: None,
        pinned: None,
    });
    let run = run_of(meta);
    let Ok(facts) = serde_json::from_slice::<ImageFacts>(meta) else {
        return false;
    };
    assert_eq!(run, Some(facts.run));
    let text = serde_json::to_vec(&facts).unwrap();
    let again: ImageFacts = serde_json::from_slice(&text).unwrap();
    assert_eq!(serde_json::to_vec(&again).unwrap(), text);
    true
}

fn run_state(bytes: &[u8]) -> bool {
    file("run.json", bytes);
    let Ok(state) = RunState::load(&folder()) else {
        return false;
    };
    let state = state.unwrap();
    let text = serde_json::to_vec(&state).unwrap();
    file("run.json", &text);
    assert_eq!(RunState::load(&folder()).unwrap(), Some(state));
    true
}

fn event_log(bytes: &[u8]) -> bool {
    let path = file("events.ndjson", bytes);
    let entries: Vec<Entry> = history::entries(&path).collect();
    let accepted = !entries.is_empty();
    cli::fuzz_cli::watched(&entries);
    let account = Account::of(entries);
    let summary = account.summary_then();
    assert!(summary.survived <= summary.crashes);
    assert!(account.at_risk(0.0) >= 0.0);
    assert!(summary.in_words().starts_with("ran "));
    accepted
}

fn config_file(bytes: &[u8]) -> bool {
    let sources = Sources {
        project: ProjectFile::Named(file("ckpt-run.toml", bytes)),
        ..no_sources()
    };
    config::load(&sources).is_ok_and(|loaded| round_trips(&loaded, &loaded.to_toml()))
}

/// Loads settings from lines, one setting each: `NAME=VALUE` for a variable, with `--` before it for a flag.
fn settings(text: &str) -> bool {
    let mut sources = no_sources();
    for (name, value) in text.lines().filter_map(|line| line.split_once('=')) {
        let value = value.to_owned();
        if let Some(flag) = name.strip_prefix("--") {
            let known = [
                "snapshot.interval",
                "snapshot.cron",
                "retention.keep_last",
                "restart.policy",
            ];
            sources
                .overrides
                .extend(known.iter().find(|key| **key == flag).map(|key| Override {
                    key,
                    flag: "--flag",
                    value,
                }));
        } else {
            sources.environment.push((name.to_owned(), value));
        }
    }
    config::load(&sources).is_ok_and(|loaded| round_trips(&loaded, &loaded.to_toml_with_origins()))
}

fn no_sources() -> Sources {
    Sources {
        system: PathBuf::from("/nonexistent"),
        user: None,
        project: ProjectFile::InWorkingDirectory(PathBuf::from("/nonexistent")),
        environment: Vec::new(),
        overrides: Vec::new(),
    }
}

/// Checks that printed settings load as the same settings.
fn round_trips(loaded: &Loaded, text: &str) -> bool {
    let sources = Sources {
        project: ProjectFile::Named(file("again.toml", text.as_bytes())),
        ..no_sources()
    };
    let again = config::load(&sources).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(again.config, loaded.config);
    true
}

/// Checks that every received descriptor is closed again. Other tests open descriptors at the same time, so only the
/// fuzzer makes the check.
fn without_leak(talk: impl FnOnce() -> bool) -> bool {
    let lowest_free = || {
        let free = nix::unistd::dup(std::io::stderr()).unwrap();
        cfg!(fuzzing).then(|| free.as_raw_fd())
    };
    let before = lowest_free();
    let accepted = talk();
    assert_eq!(lowest_free(), before, "a descriptor was left open");
    accepted
}

fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(&folder()).join(name);
    fs::write(&path, bytes).unwrap();
    path
}
