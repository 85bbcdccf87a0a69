//! Verbs that check, repair and copy images, on stores written through the library.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use ckpt_run::store::{ImageId, Manifest, Store, StoreLock, WriteOptions};
use serde_json::Value;

use crate::harness::{Place, code, flip, stderr, stdout};

const OPTIONS: WriteOptions = WriteOptions {
    buffer: 1 << 20,
    workers: 1,
    level: 1,
};

/// Returns a chunk that does not compress.
fn noise(seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[0]
    };
    (0..9000).map(|_| next()).collect()
}

fn store(place: &Place, name: &str) -> Store {
    Store::create_or_open(&place.file(name)).unwrap()
}

fn write(store: &Store, lock: &StoreLock, streams: &[(&str, &[u8])]) -> Manifest {
    let writer = store.begin(lock, OPTIONS).unwrap();
    for (name, bytes) in streams {
        let mut stream = writer.stream(name).unwrap();
        stream.write_all(bytes).unwrap();
        stream.finish().unwrap();
    }
    Arc::unwrap_or_clone(writer.commit(b"{}").unwrap())
}

/// Creates a store of three images in `.ckpt-run`; the second shares chunks with the first.
fn three_images(place: &Place) -> (Store, [Manifest; 3]) {
    let store = store(place, ".ckpt-run");
    let lock = store.lock().unwrap();
    let images = [
        write(&store, &lock, &[("pages", &noise(1))]),
        write(&store, &lock, &[("pages", &noise(1)), ("core", &noise(2))]),
        write(&store, &lock, &[("pages", &noise(3))]),
    ];
    (store, images)
}

fn pack_file(store: &Store, image: &Manifest) -> PathBuf {
    let own = |pack: &&ckpt_run::store::Pack| pack.name.image == image.id;
    let name = image.packs.iter().find(own).unwrap().name;
    store.path().join("packs").join(name.to_string())
}

/// Runs a verb that must exit with `expected`; returns its output.
fn run(place: &Place, expected: i32, arguments: &[&str]) -> String {
    let output = place.verb(arguments);
    assert_eq!(code(output.status), expected, "{}", stderr(&output));
    stdout(&output)
}

fn json(place: &Place, expected: i32, arguments: &[&str]) -> Value {
    let text = run(place, expected, &[arguments, &["--json"]].concat());
    serde_json::from_str(&text).unwrap()
}

/// Runs a verb that must fail; returns its message.
fn refused(place: &Place, arguments: &[&str]) -> String {
    let output = place.verb(arguments);
    assert_eq!(code(output.status), 125, "{}", stdout(&output));
    stderr(&output)
}

fn files(store: &Store) -> Vec<PathBuf> {
    let entries = |folder: &str| fs::read_dir(store.path().join(folder)).unwrap();
    let both = entries("images").chain(entries("packs"));
    let mut files: Vec<PathBuf> = both.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn verify_reports_all_faults_of_every_image() {
    let place = Place::new();
    let (store, images) = three_images(&place);
    assert!(run(&place, 0, &["verify"]).starts_with("000001 good (8.8 KiB)\n000002 good"));

    flip(&pack_file(&store, &images[0]), 5000);
    fs::remove_file(pack_file(&store, &images[2])).unwrap();
    let text = run(&place, 1, &["verify"]);
    for part in [
        "000001 DAMAGED: pages: chunk 0 (bytes 0 to 8999) in 000001-00.pack: its stored bytes have changed\n",
        "000002 DAMAGED: pages: chunk 0 (bytes 0 to 8999) in 000001-00.pack",
        "000003 DAMAGED: cannot read ",
        "       pages: chunk 0 (bytes 0 to 8999) in 000003-00.pack: it is lost\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("core"), "{text}");

    let found = json(&place, 1, &["verify", "2", "3"]);
    assert_eq!(found.as_array().unwrap().len(), 2);
    assert_eq!(
        (&found[0]["good"], &found[0]["verdict"]),
        (&false.into(), &"damaged".into())
    );
    let run = &found[0]["streams"][0]["runs"][0];
    assert_eq!(
        (&run["first_byte"], &run["end_byte"]),
        (&0.into(), &9000.into())
    );
    assert_eq!(run["pack"], "000001-00.pack");
    assert_eq!(found[1]["packs"].as_array().unwrap().len(), 1);
}

#[test]
fn verify_distinguishes_newer_from_damaged_images() {
    let place = Place::new();
    let (store, _) = three_images(&place);
    let manifest = |id: &str| store.path().join(format!("images/{id}.manifest"));
    let mut newer = fs::read(manifest("000001")).unwrap();
    newer[12] = 99;
    fs::write(manifest("000001"), newer).unwrap();
    fs::write(manifest("000002"), "nonsense").unwrap();
    let text = run(&place, 1, &["verify"]);
    assert!(
        text.contains("000001 UNKNOWN: the image needs a newer ckpt-run"),
        "{text}"
    );
    assert!(
        text.contains("000002 DAMAGED: the manifest is damaged"),
        "{text}"
    );
    assert!(text.contains("000003 good"), "{text}");
}

#[test]
fn verify_reports_a_good_image_that_was_set_aside() {
    let place = Place::new();
    let (store, images) = three_images(&place);
    let lock = store.lock().unwrap();
    store.set_aside(&lock, images[1].id, "criu failed").unwrap();
    let text = run(&place, 0, &["verify", "2"]);
    assert!(
        text.ends_with(")\n       set aside: criu failed\n"),
        "{text}"
    );
    let said = refused(&place, &["verify", "9"]);
    assert!(said.contains("there is no image 000009"), "{said}");
}

#[test]
fn repair_prints_its_plan_and_then_does_it() {
    let place = Place::new();
    let (store, images) = three_images(&place);
    assert_eq!(
        run(&place, 0, &["repair"]),
        "000001 keep\n000002 keep\n000003 keep\nnothing to repair\n"
    );
    flip(&pack_file(&store, &images[1]), 5000);
    let before = files(&store);
    let plan = run(&place, 0, &["repair", "--dry-run"]);
    assert!(
        plan.contains("000001 keep\n000002 drop\n       core: chunk 0"),
        "{plan}"
    );
    assert!(
        plan.contains("remove 1 packs that no image needs ("),
        "{plan}"
    );
    assert_eq!(files(&store), before, "nothing was done");
    let planned = json(&place, 0, &["repair", "--dry-run"]);
    let actions: Vec<&Value> = planned["images"]
        .as_array()
        .unwrap()
        .iter()
        .map(|image| &image["action"])
        .collect();
    assert_eq!(actions, ["keep", "drop", "keep"]);
    assert_eq!(planned["dry_run"], true);

    assert_eq!(run(&place, 0, &["repair"]), plan, "what was planned");
    assert_eq!(files(&store).len(), before.len() - 2);
    let verified = run(&place, 0, &["verify"]);
    assert!(!verified.contains("000002"), "{verified}");
    assert_eq!(
        json(&place, 0, &["repair"])["removed_packs"],
        serde_json::json!([])
    );
}

#[test]
fn repair_heals_from_another_image() {
    let place = Place::new();
    let store = store(&place, ".ckpt-run");
    let lock = store.lock().unwrap();
    let first = write(&store, &lock, &[("pages", &noise(1))]);
    store.set_aside(&lock, first.id, "criu failed").unwrap();
    write(&store, &lock, &[("pages", &noise(1))]);
    drop(lock);
    flip(&pack_file(&store, &first), 5000);
    assert!(run(&place, 1, &["verify"]).contains("000001 DAMAGED"));
    let done = run(&place, 0, &["repair"]);
    let healed = "000001 heal, 1 chunks from intact copies, still set aside\n";
    assert!(done.starts_with(healed), "{done}");
    assert!(run(&place, 0, &["verify"]).contains("000001 good"));
    let cleared = run(&place, 0, &["repair", "--clear-marks"]);
    assert!(
        cleared.starts_with("000001 keep, no longer set aside\n"),
        "{cleared}"
    );
    assert!(!run(&place, 0, &["verify"]).contains("set aside"));
}

#[test]
fn repair_names_the_holder_of_the_store() {
    let place = Place::new();
    let (store, _) = three_images(&place);
    let _lock = store.lock().unwrap();
    for arguments in [&["repair"][..], &["repair", "--dry-run"]] {
        let said = refused(&place, arguments);
        let holder = format!("is in use by process {}", std::process::id());
        assert!(said.contains(&holder), "{said}");
    }
    run(&place, 0, &["verify"]);
}

#[test]
fn copy_makes_the_same_image_in_another_store() {
    let place = Place::new();
    let (source, images) = three_images(&place);
    // A supervisor may write there at the same time.
    let _lock = source.lock().unwrap();
    assert_eq!(
        run(&place, 0, &["copy", "2", "--to", "far/away"]),
        "000001\n"
    );
    let told = json(&place, 0, &["copy", "latest", "--to", "far/away"]);
    assert_eq!(
        (&told["id"], &told["source"]),
        (&"000002".into(), &"000003".into())
    );
    assert_eq!(told["raw_bytes"], 9000);
    let other = store(&place, "far/away");
    let copy = other.manifest(ImageId::new(1).unwrap()).unwrap();
    assert_eq!(copy.created_unix_ms, images[1].created_unix_ms);
    let bytes = other
        .read(copy.id)
        .unwrap()
        .read_to_vec("core", 9000)
        .unwrap();
    assert!(bytes == noise(2));
    let verified = run(&place, 0, &["verify", "--store", "far/away"]);
    assert_eq!(verified.lines().count(), 2, "{verified}");
}

#[test]
fn failed_copy_leaves_no_partial_image() {
    let place = Place::new();
    let (source, images) = three_images(&place);
    let said = refused(&place, &["copy", "9", "--to", "other"]);
    assert!(said.contains("there is no image 000009"), "{said}");
    assert!(!place.file("other").exists(), "no store for nothing");
    let said = refused(&place, &["copy", "1", "--to", ".ckpt-run"]);
    assert!(
        said.contains("the image is already in this store"),
        "{said}"
    );

    flip(&pack_file(&source, &images[1]), 5000);
    let said = refused(&place, &["copy", "2", "--to", "other"]);
    assert!(
        said.contains("stream \"core\": its stored bytes have changed"),
        "{said}"
    );
    let other = store(&place, "other");
    assert!(files(&other).is_empty(), "{:?}", files(&other));
    let lock = other.lock().unwrap();
    let said = refused(&place, &["copy", "1", "--to", "other"]);
    assert!(said.contains("is in use by process"), "{said}");
    drop(lock);
    run(&place, 0, &["copy", "1", "--to", "other"]);
}
