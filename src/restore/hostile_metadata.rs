//! Tests of images with forged metadata: their examination does not panic and changes nothing, and an accepted image
//! has no values that a snapshot does not record.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::restore_image::examine;
use crate::config::{Config, OnLost};
use crate::criu::find::tests::write_script;
use crate::criu::{Criu, Search};
use crate::files::KeptFiles;
use crate::gpu::resident::Standby;
use crate::run::image_facts::{ImageFacts, KEPT_LIST};
use crate::run::run_context::{Moved, RunContext};
use crate::store::{ImageId, Store, WriteOptions};

/// A run whose CRIU is never started, because an examination ends before that.
struct Scene {
    folder: TempDir,
    context: RunContext,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let criu = write_script(&folder.path().join("criu"), "echo Version: 4.2.1");
        let criu = Criu::find(&Search::new(Some(criu))).unwrap();
        let store = Store::create_or_open(&folder.path().join("store")).unwrap();
        let lock = store.lock().unwrap();
        let job = folder.path().join("job");
        fs::create_dir_all(job.join("sub")).unwrap();
        fs::write(job.join("log"), "twenty bytes of log\n").unwrap();
        fs::write(job.join("state"), "changed since").unwrap();
        let mut config = Config::default();
        // The examination would otherwise stop at the first file that cannot be restored.
        config.files.on_lost = OnLost::Warn;
        let context = RunContext::new(
            config,
            store,
            lock,
            criu,
            vec!["true".into()],
            job,
            Moved::default(),
        );
        Self {
            context: context.unwrap(),
            folder,
        }
    }

    fn job(&self, name: &str) -> PathBuf {
        self.folder.path().join("job").join(name)
    }

    fn log(&self) -> fs::Metadata {
        fs::metadata(self.job("log")).unwrap()
    }

    /// Returns owner and group of the job's files: those of the user that runs the tests.
    fn owner(&self) -> [u32; 2] {
        [self.log().uid(), self.log().gid()]
    }

    /// Returns the facts of an image of a job on this machine.
    fn facts(&self, cuda: bool) -> Value {
        let (log, owner) = (self.log(), self.owner());
        let pids = json!({"driver": "580.95.05", "gpus": [{"uuid": "GPU-0", "memory_bytes": 5}], "pids": [301],
            "moved": [302], "standing": [{"pid": 301, "threads": [301, 305]}],
            "resident": {"processes": [{"pid": 301, "segments": [{"address": 4096, "len": 8, "gpu": "GPU-0"}]}]}});
        json!({
            "trigger": "request", "command": ["bash", "job.sh"], "directory": self.job(""), "host": "node-1",
            "kernel": "6.12.0", "criu": "4.2.1", "run": 1_795_263_810_716_u64, "instance": "24858-1795263811028",
            "freeze_seconds": 0.25, "phases": [{"name": "admit", "seconds": 0.03}], "processes": 2,
            "process_tree": [{"pid": 300, "parent": 0, "threads": 1, "name": "bash", "arguments": ["bash"],
                "memory": {"anonymous": 4096, "file": 0, "shared": 0, "swapped": 0}}],
            "pids": {"root": 300, "job": 301}, "isolated": true,
            "cuda": if cuda { pids } else { Value::Null },
            "stdin": {"pipe": 0, "position": 0}, "stdout": {"pipe": 7, "position": 20, "file": {"inode": 7, "offset": 20}},
            "stderr": {"pipe": 7, "position": 0, "file": null},
            "files": [{"path": self.job("log"), "access": "write", "inode": log.ino(), "size": 5,
                "modified_ns": 1_795_263_814_116_503_641_i64, "mode": 0o644, "owner": owner, "in_memory": false,
                "links": [self.job("link_remap.1")]}],
            "nodes": [{"path": self.job("sub"), "kind": "folder", "mode": 0o755, "owner": owner}],
            "moved_sockets": [{"bound": self.job("s.tmp"), "paths": [self.job("s")], "owner": owner[0]}],
            "sockets": {"listening": ["127.0.0.1:29500"], "connections": [["127.0.0.1:29500", "127.0.0.1:40000"]]},
            "timers": [{"pid": 301, "descriptor": 7}],
        })
    }

    /// Returns the lines of the list of kept files.
    fn list(&self) -> Vec<Value> {
        let rest = json!({"identity": [1, 2], "born_ns": 0, "modified_ns": 1, "changed_ns": 1, "mode": 0o644,
            "owner": self.owner(), "attributes": [["user.a", [1]]], "writer": "job"});
        let with = |kind: Value| {
            let mut all = rest.as_object().unwrap().clone();
            all.extend(kind.as_object().unwrap().clone());
            Value::Object(all)
        };
        let kept = json!({"kept": {"stream": "kept/1", "offset": 0}});
        let held = json!({"held": {"name": "1/2", "is_clone": true}});
        vec![
            json!({"frozen_ns": 1_795_263_814_116_503_641_i64}),
            json!([
                self.job("state"),
                with(json!({"kind": "file", "size": 4, "content": kept}))
            ]),
            json!([
                self.job("large"),
                with(json!({"kind": "file", "size": 9, "content": held}))
            ]),
            json!([self.job("sub"), with(json!({"kind": "folder"}))]),
            json!([
                self.job("link"),
                with(json!({"kind": "link", "target": "log"}))
            ]),
        ]
    }

    fn write(&self, facts: &Value, list: &[Value]) -> ImageId {
        self.write_with(facts, list, &[])
    }

    fn write_with(&self, facts: &Value, list: &[Value], more: &[(&str, &[u8])]) -> ImageId {
        let options = WriteOptions {
            buffer: 8 << 20,
            workers: 1,
            level: 1,
        };
        let writer = self
            .context
            .store
            .begin(&self.context.lock, options)
            .unwrap();
        let lines: Vec<String> = list.iter().map(|line| format!("{line}\n")).collect();
        let lines = lines.concat();
        let own = [(KEPT_LIST, lines.as_bytes()), ("kept/1", b"kept")];
        for (name, mut bytes) in own.into_iter().chain(more.iter().copied()) {
            let mut stream = writer.stream(name).unwrap();
            stream.copy_from(&mut bytes).unwrap();
            stream.finish().unwrap();
        }
        let manifest = writer.commit(facts.to_string().as_bytes()).unwrap();
        manifest.id
    }

    /// Returns everything outside of the store.
    fn outside(&self) -> BTreeMap<PathBuf, (u32, i64, Vec<u8>)> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let about = fs::symlink_metadata(&path).unwrap();
                if about.is_dir() && path != self.folder.path().join("store") {
                    folders.push(path.clone());
                }
                let content = fs::read(&path).unwrap_or_default();
                found.insert(path, (about.mode(), about.ctime_nsec(), content));
            }
        }
        found.retain(|path, _| *path != self.folder.path().join("store"));
        found
    }
}

/// Values that snapshots do not record, at least not in most places.
fn odd() -> impl Strategy<Value = Value> {
    let texts = [
        "",
        "..",
        "/..",
        "/srv/../etc/passwd",
        "etc/passwd",
        "/a\0b",
        "\u{1b}]0;x\u{7}",
        "/",
        "1/../2",
    ];
    let numbers = [
        -1,
        0,
        1,
        2,
        i64::from(i32::MIN),
        i64::from(i32::MAX),
        i64::from(u32::MAX),
        i64::MIN,
        i64::MAX,
    ];
    prop_oneof![
        prop::sample::select(numbers.to_vec())
            .prop_map(|number| json!(number))
            .boxed(),
        prop::sample::select(texts.map(Value::from).to_vec()).boxed(),
        Just(json!(u64::MAX)).boxed(),
        Just(json!(0o10_000)).boxed(),
        Just(json!(1e300)).boxed(),
        Just(json!(-0.5)).boxed(),
        Just(Value::Null).boxed(),
        Just(json!([])).boxed(),
        Just(json!({})).boxed(),
        any::<i64>().prop_map(|number| json!(number)).boxed(),
    ]
}

/// Collects pointers to all parts of a value.
fn places(value: &Value, here: &str, found: &mut Vec<String>) {
    found.push(here.to_owned());
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                places(value, &format!("{here}/{}", name.replace('/', "~1")), found);
            }
        }
        Value::Array(values) => {
            for (number, value) in values.iter().enumerate() {
                places(value, &format!("{here}/{number}"), found);
            }
        }
        _ => {}
    }
}

fn change(value: &mut Value, place: Index, to: Value) {
    let mut found = Vec::new();
    places(value, "", &mut found);
    if let Some(there) = value.pointer_mut(place.get(&found[..]).as_str()) {
        *there = to;
    }
}

fn is_plain(path: &Path) -> bool {
    path.is_absolute()
        && !path
            .components()
            .any(|part| part == std::path::Component::ParentDir)
}

/// Asserts the properties in docs/guide/security.md for an image that is not refused.
fn nothing_is_odd_in(facts: &ImageFacts) {
    let cuda = facts.cuda.iter();
    let threads = cuda.flat_map(|cuda| {
        let resident = cuda.resident.iter().flat_map(|facts| &facts.processes);
        let standing = cuda
            .standing
            .iter()
            .flat_map(|one| one.threads.iter().chain([&one.pid]));
        let all = cuda.pids.iter().chain(&cuda.moved).chain(standing);
        all.copied().chain(resident.map(|process| process.pid))
    });
    let timers = facts.timers.iter().map(|timer| timer.pid);
    let tree = facts.process_tree.iter().map(|process| process.pid);
    for pid in threads
        .chain(timers)
        .chain(tree)
        .chain([facts.pids.root, facts.pids.job])
    {
        assert!(pid > 1, "pid {pid}");
    }
    for file in &facts.files {
        assert!(is_plain(&file.path) && file.links.iter().all(|link| is_plain(link)));
        assert!(file.mode <= 0o7777 && file.owner.0 != u32::MAX && file.owner.1 != u32::MAX);
    }
    for node in &facts.nodes {
        assert!(is_plain(&node.path) && node.mode <= 0o7777 && node.owner.0 != u32::MAX);
    }
    assert!(facts.freeze_seconds >= 0.0 && facts.freeze_seconds.is_finite());
}

#[test]
fn the_image_that_the_tests_change_is_accepted() {
    let scene = Scene::new();
    let id = scene.write(&scene.facts(false), &scene.list());
    let candidate = examine(&scene.context, &Standby::default(), id);
    let candidate = candidate.unwrap_or_else(|error| panic!("{error:?}"));
    nothing_is_odd_in(&candidate.facts);
    let whole = scene.facts(true).to_string();
    nothing_is_odd_in(&serde_json::from_str(&whole).unwrap());
}

#[test]
fn pids_paths_and_modes_that_no_snapshot_records_are_refused() {
    let scene = Scene::new();
    for (place, value) in [
        ("/pids/root", json!(-1)),
        ("/pids/job", json!(1)),
        ("/cuda/pids/0", json!(0)),
        ("/cuda/standing/0/threads/1", json!(-1)),
        ("/cuda/resident/processes/0/pid", json!(1)),
        ("/timers/0/pid", json!(1)),
        ("/timers/0/descriptor", json!(-100)),
        ("/files/0/path", json!("/srv/../etc/passwd")),
        ("/files/0/mode", json!(0o104_755)),
        ("/files/0/owner/0", json!(u32::MAX)),
        ("/files/0/links/0", json!("link_remap.1")),
        ("/nodes/0/path", json!("../x")),
        ("/moved_sockets/0/bound", json!("/srv/../x")),
        ("/moved_sockets/0/paths/0", json!("x")),
        ("/freeze_seconds", json!(-1.0)),
        ("/directory", json!("job")),
    ] {
        let mut facts = scene.facts(true);
        *facts.pointer_mut(place).unwrap() = value;
        let read = serde_json::from_value::<ImageFacts>(facts);
        assert!(read.is_err(), "{place} is accepted");
    }
    for (line, place, value) in [
        (0, "/frozen_ns", json!(i64::MIN)),
        (1, "/0", json!("/srv/../etc/passwd")),
        (1, "/1/mode", json!(0o10_000)),
        (1, "/1/content/kept/offset", json!(u64::MAX)),
        (1, "/1/attributes/0/0", json!("trusted.overlay.opaque")),
        (3, "/1/owner/1", json!(u32::MAX)),
    ] {
        let mut list = scene.list();
        *list[line].pointer_mut(place).unwrap() = value;
        let lines: Vec<String> = list.iter().map(|line| format!("{line}\n")).collect();
        assert!(
            KeptFiles::read(lines.concat().as_bytes()).is_err(),
            "{place} is accepted"
        );
    }
}

#[test]
fn parts_are_created_in_private_folders_under_own_names() {
    let scene = Scene::new();
    let hash = blake3::hash(b"part").to_hex();
    let (right, wrong) = (
        format!("ckpt-run-{}", &hash[..16]),
        "ckpt-run-0123456789abcdef",
    );
    let elsewhere = scene.folder.path().join("elsewhere");
    fs::create_dir_all(elsewhere.join("open/bin")).unwrap();
    fs::set_permissions(
        elsewhere.join("open/bin"),
        fs::Permissions::from_mode(0o755),
    )
    .unwrap();
    fs::create_dir(elsewhere.join("for-all")).unwrap();
    fs::set_permissions(elsewhere.join("for-all"), fs::Permissions::from_mode(0o777)).unwrap();
    std::os::unix::fs::symlink(elsewhere.join("target"), elsewhere.join("for-all/bin")).unwrap();
    fs::create_dir(elsewhere.join("target")).unwrap();
    for (folder, name, is_made) in [
        ("open/bin", right.as_str(), false),
        ("for-all/bin", &right, false),
        ("new/store/bin", wrong, false),
        ("new/store/bin", &right, true),
    ] {
        let path = elsewhere.join(folder).join(name);
        let mut facts = scene.facts(false);
        facts["files"][0]["path"] = json!(path);
        facts["files"][0]["access"] = json!("map");
        let stream = format!("program/{name}");
        let id = scene.write_with(&facts, &scene.list(), &[(&stream, b"part")]);
        let examined = examine(&scene.context, &Standby::default(), id);
        assert_eq!(path.exists(), is_made, "{folder}/{name}: {examined:?}");
    }
    assert_eq!(fs::read_dir(elsewhere.join("target")).unwrap().count(), 0);
    let made = fs::metadata(elsewhere.join("new")).unwrap();
    assert_eq!(made.mode() & 0o777, 0o700);
}

#[test]
fn forged_metadata_is_examined_without_panic_or_changes() {
    let scene = Scene::new();
    let facts_changes = prop::collection::vec((any::<Index>(), odd()), 0..3);
    let list_changes = prop::collection::vec((any::<Index>(), any::<Index>(), odd()), 0..3);
    let config = ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(cuda in any::<bool>(), facts_changes in facts_changes, list_changes in list_changes)| {
        let (mut facts, mut list) = (scene.facts(cuda), scene.list());
        for (place, value) in facts_changes {
            change(&mut facts, place, value);
        }
        for (line, place, value) in list_changes {
            let line = line.index(list.len());
            change(&mut list[line], place, value);
        }
        let before = scene.outside();
        let id = scene.write(&facts, &list);
        if let Ok(candidate) = examine(&scene.context, &Standby::default(), id) {
            nothing_is_odd_in(&candidate.facts);
        }
        prop_assert_eq!(before, scene.outside());
    });
}
