//! Kills (SIGKILL) of the supervisor at each of its requests to object storage in turn.
//!
//! A round starts or continues the job, uploads an image, and ends with another one by `stop`. The first round is ended
//! at its first request, the second at its second, and so on. The last round makes fewer requests.

use std::process::{Child, Stdio};

use nix::sys::signal::Signal;

use super::S3Server;
use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, lines, stderr, stdout, wait_until_or,
};

/// Job that counts into a file until the file `stop` exists, and compares its random memory with a checksum at its end.
const JOB: &str = r#"
import hashlib, os, time
memory = os.urandom(1 << 20)
checksum = hashlib.sha256(memory).hexdigest()
log, step = open("log", "w"), 0
while not os.path.exists("stop"):
    log.write(f"{step}\n"); log.flush()
    step += 1
    time.sleep(0.01)
assert hashlib.sha256(memory).hexdigest() == checksum
print("equal", step, flush=True)
"#;
const UPLOADED: &str = "the image is in the remote store";
/// Limit above the number of requests in a round.
const REQUESTS_MAX: usize = 100;

struct Scene {
    server: S3Server,
    /// The job's folder and the store of the supervisor that is killed.
    place: Place,
}

impl Scene {
    fn start(&self, store: &Place) -> Run {
        let script = self.place.file("job.py");
        if !script.exists() {
            std::fs::write(&script, JOB).unwrap();
        }
        let url = self.server.url();
        let options = [&ON_REQUEST[..], &["--remote", &url]].concat();
        store.start_with(&options, &["python3", "-u", "job.py"], |command| {
            self.server.is_used_by(command);
            command.env("CKPT_RUN_FILES_EXCLUDE", "stop");
        })
    }

    fn verb(&self, words: &[&str]) -> Child {
        let mut command = self.place.command(words);
        self.server.is_used_by(&mut command);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Runs a verb on the bucket, which must succeed; returns its output.
    fn in_bucket(&self, words: &[&str]) -> String {
        let url = self.server.url();
        let words = [&["--store", &url], words].concat();
        let done = self.verb(&words).wait_with_output().unwrap();
        assert!(done.status.success(), "{words:?}: {}", stderr(&done));
        stdout(&done)
    }

    fn count(&self, what: &str) -> usize {
        self.place.text("err").matches(what).count()
    }

    /// Waits for a condition. Returns false if the way to the server was cut before.
    fn reaches(&self, what: &str, mut holds: impl FnMut() -> bool) -> bool {
        let mut reached = false;
        wait_until_or(
            || format!("{what}: {}", self.place.text("err")),
            || {
                reached = holds();
                reached || self.server.gate().is_cut()
            },
        );
        reached
    }

    /// Performs the steps of a round. Returns false if the way to the server was cut before its end.
    fn round(&self, run: &mut Run) -> bool {
        let starts = || self.count(" started ") + self.count(" restored ");
        let (begun, uploaded) = (starts(), self.count(UPLOADED));
        let steps = || self.place.text("log").lines().count();
        if !self.reaches("a job", || starts() > begun) {
            return false;
        }
        let before = steps();
        if !self.reaches("progress", || steps() > before + 1) {
            return false;
        }
        let mut snapshot = self.verb(&["snapshot"]);
        let mut ended = None;
        let saved = self.reaches("an image", || {
            ended = snapshot.try_wait().unwrap();
            ended.is_some()
        });
        if let Some(status) = ended {
            assert!(status.success(), "{}", self.place.text("err"));
        }
        let saved = saved && self.reaches("an upload", || self.count(UPLOADED) > uploaded);
        let stopped = saved && {
            let mut stop = self.verb(&["stop"]);
            let stopped = self.reaches("the end", || run.has_ended());
            let _ = stop.kill();
            let _ = stop.wait();
            stopped
        };
        let _ = snapshot.kill();
        let _ = snapshot.wait();
        stopped
    }
}

fn kill_at_every_request(last_passes: bool) {
    let Some(server) = S3Server::start() else {
        return;
    };
    let scene = Scene {
        server,
        place: Place::new(),
    };
    let gate = scene.server.gate();
    for request in 1.. {
        assert!(request < REQUESTS_MAX, "{}", scene.place.text("err"));
        gate.cut_at(request, last_passes);
        let stops = || scene.count(" trigger=stop ");
        let before = stops();
        let mut run = scene.start(&scene.place);
        if scene.round(&mut run) {
            assert_eq!(run.wait(), 75, "{}", scene.place.text("err"));
            break;
        }
        run.signal(Signal::SIGKILL);
        // The end does not wait for the removal of old objects: it may come before the kill if the cut request was one
        // of those. That is after the image of a stop.
        let code = run.wait();
        assert!(
            code == 137 || code == 75 && stops() > before,
            "{code}: {}",
            scene.place.text("err")
        );
        gate.mend();
        if scene.count(UPLOADED) > 0 {
            // Committed images are whole.
            scene.in_bucket(&["verify"]);
        }
    }
    gate.mend();
    let mut writes = gate.pack_writes();
    let count = writes.len();
    writes.sort();
    writes.dedup();
    assert_eq!(writes.len(), count, "a pack was uploaded twice");

    // Another machine continues from the bucket, and nothing is left over there.
    let other = Place::new();
    let mut run = scene.start(&other);
    other.wait_for("err", " restored image=");
    std::fs::write(scene.place.file("stop"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", other.text("err"));
    let said = other.text("out");
    let steps = said
        .trim()
        .strip_prefix("equal ")
        .expect("the job's last line");
    assert_eq!(scene.place.text("log"), lines(steps.parse().unwrap()));
    scene.in_bucket(&["verify"]);
    let pruned = scene.in_bucket(&["prune"]);
    assert!(pruned.contains("packs removed: 0"), "{pruned}");
}

#[apply(as_root)]
fn lost_requests_leave_whole_images() {
    kill_at_every_request(false);
}

#[apply(as_root)]
fn lost_answers_leave_whole_images() {
    kill_at_every_request(true);
}
