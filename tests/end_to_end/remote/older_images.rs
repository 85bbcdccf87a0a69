//! Restores of older images from the remote store, if the newest one there cannot be restored.

use std::fs;
use std::path::PathBuf;

use nix::sys::signal::Signal;

use super::{RemoteFolder, StepsJob};
use crate::harness::{Place, Run, apply, as_root, wait_until_gone};

/// Place of a byte in the memory of the job, in a pack: what accompanies the image follows.
const IN_MEMORY: usize = 2 << 20;

/// Object that a test damages.
struct Damage {
    path: PathBuf,
    good: Vec<u8>,
}

impl Damage {
    /// Changes a byte of a pack.
    fn of(remote: &RemoteFolder, pack: &str, offset: usize) -> Self {
        let path = remote.file(pack);
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[offset] ^= 1;
        fs::write(&path, bad).unwrap();
        Self { path, good }
    }

    fn repair(self) {
        fs::write(self.path, self.good).unwrap();
    }
}

fn kill(mut run: Run) {
    let job = run.job();
    run.signal(Signal::SIGKILL);
    run.wait();
    wait_until_gone(&[job]);
}

/// Has a run upload two images and kills it.
fn leave_two_images(job: &StepsJob<'_>, remote: &RemoteFolder) {
    let run = job.start_with_image();
    job.place.snapshot();
    let done = "the image is in the remote store image=000002";
    job.place.wait_for("err", done);
    assert_eq!(remote.images().len(), 2);
    kill(run);
}

/// Returns whether each image of the state is abandoned.
fn abandoned(state: &serde_json::Value) -> Vec<bool> {
    let images = state["images"].as_array().unwrap().iter();
    images
        .map(|image| image["abandoned"].as_bool().unwrap())
        .collect()
}

#[apply(as_root)]
fn an_older_image_is_tried_and_the_newer_abandoned() {
    let (place, other, third) = (Place::new(), Place::new(), Place::new());
    let remote = RemoteFolder::new();
    let url = remote.url();
    let job = StepsJob::new(&place, &url);
    leave_two_images(&job, &remote);
    let images = remote.images();
    let [first, second] = [0, 1].map(|image| remote.packs_of(&images[image]));
    let only_second = second.difference(&first).next().expect("a pack of its own");
    let damage = Damage::of(&remote, only_second, 1000);
    let elsewhere = |place| StepsJob { place, ..job };

    let run = elsewhere(&other).start(&["--take-over"]);
    other.wait_for("err", "restored image=000001");
    let said = other.text("err");
    let reason = format!("the object {only_second} is damaged: a chunk has changed");
    assert!(said.contains(&reason), "{said}");
    assert_eq!(abandoned(&remote.state()), [false, true]);
    let list = place.json(&["--store", &url, "list"]);
    let lives = [&list[0]["life"], &list[1]["life"]];
    assert_eq!(lives, ["present", "given-up"], "{list}");
    kill(run);

    // The newest image would be good now, but the job has run from the older one since.
    damage.repair();
    let third = elsewhere(&third);
    let mut run = third.start(&["--take-over"]);
    third.assert_result(&mut run, &place, &job.checksum());
    let said = third.place.text("err");
    assert!(!said.contains("000002"), "{said}");
}

#[apply(as_root)]
fn newer_images_are_taken_up_if_no_older_one_runs() {
    let (place, other, remote) = (Place::new(), Place::new(), RemoteFolder::new());
    let url = remote.url();
    let job = StepsJob::new(&place, &url);
    leave_two_images(&job, &remote);
    // The memory, which both images have, is in the largest pack.
    let packs = remote.packs_of(&remote.images()[0]).into_iter();
    let size = |pack: &String| fs::metadata(remote.file(pack)).unwrap().len();
    let shared = packs.max_by_key(size).unwrap();
    let damage = Damage::of(&remote, &shared, IN_MEMORY);
    let (log, state) = (place.text("log"), place.text("state"));

    let other = StepsJob {
        place: &other,
        ..job
    };
    let code = other.start(&["--take-over"]).wait();
    let said = other.place.text("err");
    assert_eq!(code, 125, "{said}");
    for image in ["000001", "000002"] {
        let tried = format!("restoring image={image}");
        assert_eq!(said.matches(&tried).count(), 1, "{said}");
    }
    let entries = remote.entries();
    let returned = entries
        .iter()
        .any(|entry| abandoned(entry) == [false, true]);
    assert!(returned, "{entries:?}");
    assert_eq!(abandoned(&remote.state()), [false, false]);
    assert_eq!((place.text("log"), place.text("state")), (log, state));

    damage.repair();
    let mut run = other.start(&[]);
    other.place.wait_for("err", "restored image=000002");
    place.go();
    assert_eq!(run.wait(), 0, "{}", other.place.text("err"));
    let out = other.place.text("out");
    assert_eq!(out, format!("result {}\n", job.checksum()), "{said}");
}
