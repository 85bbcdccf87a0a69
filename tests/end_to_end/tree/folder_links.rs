//! Folders that the job replaces by links to their new places.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::harness::{ON_REQUEST, Place, apply, as_root_and_user, wait_until};

/// Moves a folder and leaves a link, at an order each. At the end it removes the link.
const JOB: &str = r#"
import os, sys, time
def order(name):
    while not os.path.exists(os.path.join(sys.argv[1], name)): time.sleep(0.005)
def look():
    print({folder: sorted(os.listdir(folder)) for folder in sorted(os.listdir(".")) if folder in ("data", "moved")},
          os.path.islink("data"), open("data/deep/file").read(), flush=True)
os.makedirs("data/deep")
for name in "data/deep/file", "data/other": open(name, "w").write(name)
log = open("data/log", "ab", buffering=0); log.write(b"made ")
state = open("data/state", "w+b", buffering=0); state.write(b"old")
time.sleep(0.1) # the files are older than the image
look(); order("move")
os.rename("data", "moved"); os.symlink("moved", "data")
log.write(b"moved "); state.seek(0); state.write(b"new")
look(); order("remove")
os.remove("data")
log.write(b"removed")
print(sorted(os.listdir("moved")), open("moved/deep/file").read(), os.path.lexists("data"),
      open("moved/log").read(), open("moved/state").read(), flush=True)
order("end")
"#;

#[apply(as_root_and_user)]
fn a_folder_that_became_a_link_is_restored_as_it_was() {
    // Not in the job's folder: an image would be refused once these files change.
    let orders = tempfile::tempdir().unwrap();
    fs::set_permissions(orders.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let order = |name: &str| fs::write(orders.path().join(name), "").unwrap();
    let place = Place::new();
    fs::write(place.file("job.py"), JOB).unwrap();
    let folder = orders.path().display().to_string();
    let job = ["python3", "-u", "job.py", &folder];
    let mut run = place.start_with(&ON_REQUEST, &job, |run| {
        run.env("CKPT_RUN_RESTART_BACKOFF", "0s");
    });
    let all = "['deep', 'log', 'other', 'state']";
    let folders = format!("{{'data': {all}}} False data/deep/file\n");
    let linked = format!("{{'data': {all}, 'moved': {all}}} True data/deep/file\n");
    let removed = format!("{all} data/deep/file False made moved removed new\n");
    place.wait_for("out", &folders);
    let restored = || place.text("err").matches("ckpt-run: restored ").count();
    for (name, out) in [("move", &linked), ("remove", &removed)] {
        place.snapshot();
        let before = restored();
        order(name);
        place.wait_for("out", out);
        run.crash();
        wait_until("the restore", || restored() > before);
        place.wait_for("out", out);
    }
    // With wrong files, the job fails and is restored once more.
    assert_eq!(restored(), 2, "{}", place.text("err"));
    order("end");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), [folders, linked, removed].concat());
}
