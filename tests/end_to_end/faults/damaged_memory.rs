//! Damaged shared memory. CRIU (4.2.1) ignores failed reads of it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use ckpt_run::store::{Content, ImageId, Store};

use super::counter_job::{said, start_with};
use crate::harness::{Place, apply, as_root, wait_until_or};

/// Size of the shared memory. No other memory of the job has the same.
const SHARED_BYTES: u64 = 5 << 20;

/// Changes its shared memory now and then, and compares it all the time with a copy in its own memory. A difference is
/// recorded in a file that no restore takes back.
const JOB: &str = r#"
import mmap, os, time
shared = mmap.mmap(-1, 5 << 20)
while not os.path.exists("stop"):
    own = os.urandom(5 << 20)
    shared[:] = own
    print("changed", flush=True)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        if shared[:8192] != own[:8192]:
            open("differs", "w").close()
"#;

/// Flips a bit in the first chunk of the job's shared memory in an image.
fn damage_shared_memory(place: &Place, image: &str) {
    let store = Store::open(&place.file(".ckpt-run")).expect("a store");
    let image: ImageId = image.parse().expect("an ID");
    let reader = store.read(image).expect("an image");
    let manifest = reader.manifest();
    let mut streams = manifest.streams.iter();
    let stream = streams.find(|one| one.name.contains("pages-") && one.raw_len == SHARED_BYTES);
    let chunk = stream.expect("the shared memory").chunks[0];
    let Content::Stored(stored) = manifest.chunks[chunk as usize].content else {
        panic!("the shared memory is not zero");
    };
    let name = manifest.packs[stored.pack as usize].name.to_string();
    let path = store.path().join("packs").join(name);
    let pack = File::options().read(true).write(true).open(path);
    let pack = pack.expect("a pack");
    let (mut byte, at) = ([0], stored.offset + u64::from(stored.len) / 2);
    pack.read_exact_at(&mut byte, at).expect("read");
    pack.write_all_at(&[byte[0] ^ 1], at).expect("written");
}

#[apply(as_root)]
fn no_process_runs_with_damaged_shared_memory() {
    let place = Place::new();
    let mut run = start_with(&place, JOB, |command| {
        command.env("CKPT_RUN_FILES_EXCLUDE", "differs,stop");
    });
    let changes = |place: &Place| place.text("out").lines().count();
    let next = |place: &Place| {
        let before = changes(place);
        wait_until_or(|| place.text("err"), || changes(place) > before + 1);
    };
    next(&place);
    let older = place.snapshot();
    next(&place);
    let newer = place.snapshot();
    damage_shared_memory(&place, &newer);
    run.crash();
    let is_back = || said(&place, &format!("restored image={older}")) == 1;
    wait_until_or(|| place.text("err"), is_back);
    assert_eq!(said(&place, &format!("restored image={newer}")), 0);
    next(&place);
    assert!(!place.file("differs").exists(), "{}", place.text("err"));
    std::fs::write(place.file("stop"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
