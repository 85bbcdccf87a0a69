//! Damaged images and stores.

use std::fs;
use std::path::{Path, PathBuf};

use super::counter_job::{
    COUNTER, counted, counting, finish_counter, said, start, start_counter, wait_for_progress,
    wait_for_the_first_line,
};
use crate::harness::{Place, apply, as_root, flip, stdout, wait_until};

/// Takes two images, damages the newer one's manifest or packs, and kills the job.
fn the_older_image_is_restored_after(damage: impl FnOnce(&Path, &[PathBuf]), reason: &str) {
    let place = Place::new();
    // Each image has content of its own.
    let script = COUNTER.replace("i += 1\n", "i += 1\n    ballast = os.urandom(1 << 20)\n");
    let mut run = start(&place, &script);
    wait_for_the_first_line(&place);
    let older = place.snapshot();
    wait_for_progress(&place);
    let newer = place.snapshot();
    wait_for_progress(&place);
    let store = place.file(".ckpt-run");
    let packs: Vec<PathBuf> = fs::read_dir(store.join("packs"))
        .expect("packs")
        .map(|entry| entry.expect("a pack").path())
        .filter(|path| path.to_string_lossy().contains(&newer))
        .collect();
    assert!(!packs.is_empty(), "the newer image has no pack of its own");
    damage(&store.join(format!("images/{newer}.manifest")), &packs);
    run.crash();
    wait_until(
        &format!("a restore of {older}; {}", place.text("err")),
        || said(&place, &format!("restored image={older}")) == 1,
    );
    wait_for_progress(&place);
    finish_counter(&place, &mut run);

    let images = place.images();
    let told: Vec<&str> = images
        .iter()
        .map(|image| image["damaged"].as_str().unwrap_or(""))
        .collect();
    assert!(told[0].is_empty(), "{told:?}");
    assert!(told[1].contains(reason), "{told:?}");
    let verified = place.verb(&["verify"]);
    let text = stdout(&verified);
    assert_eq!(verified.status.code(), Some(1), "{text}");
    assert!(text.contains(&format!("{older} good")), "{text}");
    assert!(text.contains(&format!("{newer} DAMAGED")), "{text}");
}

#[apply(as_root)]
fn a_flipped_bit_in_a_pack_costs_one_image_only() {
    the_older_image_is_restored_after(
        |_, packs| {
            for pack in packs {
                flip_every(pack, 64 << 10);
            }
        },
        "damaged",
    );
}

#[apply(as_root)]
fn a_truncated_pack_costs_one_image_only() {
    the_older_image_is_restored_after(
        |_, packs| {
            let pack = fs::File::options()
                .write(true)
                .open(&packs[0])
                .expect("opens");
            let length = pack.metadata().expect("metadata").len();
            pack.set_len(length - 1).expect("truncated");
        },
        "bytes instead of",
    );
}

#[apply(as_root)]
fn a_missing_pack_costs_one_image_only() {
    the_older_image_is_restored_after(
        |_, packs| fs::remove_file(&packs[0]).expect("removed"),
        "No such file",
    );
}

#[apply(as_root)]
fn a_forged_manifest_costs_one_image_only() {
    the_older_image_is_restored_after(|manifest, _| flip_every(manifest, 1 << 20), "checksum");
}

/// Flips a bit in the middle of the file, and one in every `distance` bytes.
fn flip_every(path: &Path, distance: u64) {
    let length = fs::metadata(path).expect("metadata").len();
    let middle = std::iter::once(length / 2);
    let others = (distance..length).step_by(usize::try_from(distance).expect("fits"));
    for at in middle.chain(others) {
        flip(path, at);
    }
}

#[apply(as_root)]
fn run_with_damaged_images_only_ends_with_125() {
    let (place, mut run) = counting();
    let image = place.snapshot();
    let manifest = place.file(&format!(".ckpt-run/images/{image}.manifest"));
    fs::write(&manifest, "nonsense").expect("written");
    run.crash();
    assert_eq!(run.wait(), 137, "{}", place.text("err"));
    // The run exists and has images: nothing starts from the beginning without the user's consent.
    let mut again = start_counter(&place);
    assert_eq!(again.wait(), 125, "{}", place.text("err"));
    assert_eq!(said(&place, "--fresh"), 1, "{}", place.text("err"));
}

#[apply(as_root)]
fn a_store_of_another_owner_is_not_used() {
    let (place, mut run) = counting();
    place.snapshot();
    run.kill_supervisor();
    let store = place.file(".ckpt-run");
    std::os::unix::fs::chown(&store, Some(12345), None).expect("given away");
    let before = counted(&place);
    assert_eq!(start_counter(&place).wait(), 125);
    assert_eq!(said(&place, "belongs to user 12345"), 1);
    assert_eq!(counted(&place), before);
    std::os::unix::fs::chown(&store, Some(0), None).expect("taken back");
    let mut again = start_counter(&place);
    wait_for_progress(&place);
    finish_counter(&place, &mut again);
}
