//! Main purpose: a supervised job is snapshotted, killed, and restored without any difference.

use std::fs;
use std::time::SystemTime;

use crate::harness::{
    COUNT, ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, lines, stderr,
};

/// Starts the counting job, and waits until it counts.
fn counting(place: &Place) -> Run {
    let run = place.start_python(&ON_REQUEST, COUNT);
    place.wait_for("log", "5\n");
    run
}

#[apply(as_root_and_user)]
fn killed_job_is_restored_and_completes() {
    let place = Place::new();
    let mut run = counting(&place);
    place.snapshot();
    place.wait_for("log", "15\n");
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

/// Fills memory shared with its child, and private memory, both in huge pages if available.
const HUGE: &str = r#"
import mmap, os, time
def area(letter):
    memory = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(letter * (32 << 20))
    return memory
def wait():
    while not os.path.exists("go"):
        time.sleep(0.01)
shared = area(b"s")
child = os.fork()
own = area(b"o") if child else b""
if child:
    # Otherwise the kernel makes one mapping of both, of which CRIU does not know that a part is shared.
    own.madvise(mmap.MADV_DONTDUMP)
    print("ready", flush=True)
wait()
assert shared[:] == b"s" * (32 << 20) and own[:] == b"o" * len(own)
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("done", flush=True)
"#;

/// Returns the huge pages of a process, in MiB.
fn huge_mib(pid: i32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let huge = maps
        .lines()
        .filter_map(|line| line.strip_prefix("AnonHugePages:"));
    let kib = huge.filter_map(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.sum::<u64>() >> 10
}

#[apply(as_root)]
fn a_restored_job_has_the_huge_pages_back_that_were_its_own() {
    let place = Place::new();
    let mut run = place.start_python_with(&ON_REQUEST, HUGE, |command| {
        command.env("CKPT_RUN_LOG_LEVEL", "debug");
    });
    place.wait_for("out", "ready");
    let before = huge_mib(run.job());
    if before < 56 {
        eprintln!("skipped: the kernel has no huge pages to give ({before} MiB)");
        return;
    }
    place.snapshot();
    assert!(huge_mib(run.job()) >= before, "a snapshot takes none away");
    run.crash();
    // The kernel alone would need 10 s for 16 MiB. Memory shared with the child stays in small pages.
    place.wait_for("err", "requested huge pages");
    let after = huge_mib(run.job());
    assert!((24..56).contains(&after), "{after} MiB");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(place.text("out").ends_with("done\n"));
}

#[apply(as_root_and_user)]
fn a_store_is_looked_for_again_when_it_was_away_at_a_crash() {
    let place = Place::new();
    let settings = "[restart]\nbackoff = '10s'\n";
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    let mut run = counting(&place);
    place.snapshot();
    let (there, away) = (place.file(".ckpt-run/images"), place.file("away"));
    fs::rename(&there, &away).unwrap();
    run.crash();
    place.wait_for("err", "the job crashed");
    fs::rename(&away, &there).unwrap();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

#[apply(as_root)]
fn unreadable_newest_image_is_reported_and_skipped() {
    let place = Place::new();
    let mut run = counting(&place);
    place.snapshot();
    place.wait_for("log", "15\n");
    place.snapshot();
    let manifest = place.file(".ckpt-run/images/000002.manifest");
    fs::rename(&manifest, place.file("manifest")).unwrap();
    fs::create_dir(&manifest).unwrap();
    run.crash();
    place.wait_for("err", "restored image=000001");
    let said = place.text("err");
    let warning = "warning: the image cannot be read, an older one is restored: cannot read the manifest: Is a directory";
    let told = said.lines().find(|line| line.contains(warning));
    assert!(told.is_some_and(|line| line.contains("000002")), "{said}");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
}

#[apply(as_root_and_user)]
fn cleaned_temporary_folder_does_not_end_a_run() {
    let place = Place::new();
    let mut run = counting(&place);
    place.snapshot();
    // Removed as by an age-based cleaner, and by a copy of the store as a folder.
    fs::remove_dir_all(fs::read_link(place.file(".ckpt-run/work")).unwrap()).unwrap();
    for copy in fs::read_dir(place.file(".ckpt-run/bin")).unwrap() {
        let copy = fs::File::open(copy.unwrap().path()).unwrap();
        copy.set_modified(SystemTime::now()).unwrap();
    }
    run.crash();
    place.wait_for("err", "restored image=000001");
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
}

#[apply(as_root_and_user)]
fn a_supervisor_has_as_many_descriptors_as_it_may() {
    let place = Place::new();
    let mut run = counting(&place);
    let limits = |pid: i32| {
        let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = text.lines().find(|line| line.starts_with("Max open files"));
        let words: Vec<String> = line
            .unwrap()
            .split_whitespace()
            .map(str::to_owned)
            .collect();
        (words[3].clone(), words[4].clone())
    };
    let own = limits(i32::try_from(std::process::id()).unwrap());
    let (soft, hard) = limits(run.pid());
    assert!(soft == hard || soft == "1048576", "{soft} of {hard}");
    assert_eq!(limits(run.job()), own);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn unrestorable_eventfd_fails_the_snapshot_only() {
    let place = Place::new();
    let job = r#"
import os, time
fd = os.eventfd(3, os.EFD_SEMAPHORE)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print(os.eventfd_read(fd), flush=True)
"#;
    let mut run = place.start_python(&ON_REQUEST, job);
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    assert_eq!(refused.status.code(), Some(125));
    let reason = stderr(&refused);
    assert!(reason.contains("EFD_SEMAPHORE"), "{reason}");
    place.go();
    assert_eq!(run.wait(), 0);
    assert_eq!(place.text("out"), "ready\n1\n");
}

#[apply(as_root_and_user)]
fn file_being_rewritten_is_completed_after_a_restore() {
    let place = Place::new();
    // Saved as frameworks do: written to a temporary file and renamed, or in place. Each file has 3 blocks of its
    // number.
    let job = "import os, time\n\
        def wait(name):\n    while not os.path.exists(name): time.sleep(0.02)\n\
        for number in range(1, 6):\n\
        \x20   beside, same = open('model.tmp', 'wb', 0), open('same', 'wb', 0)\n\
        \x20   for block in range(3):\n\
        \x20       for file in (beside, same): file.write(bytes([number]) * 70000)\n\
        \x20       if (number, block) == (2, 1): print('half', flush=True); wait('go-on')\n\
        \x20   beside.close(); same.close(); os.rename('model.tmp', f'model-{number}')\n\
        \x20   print('saved', number, flush=True)\n\
        wait('go')";
    let mut run = place.start_python(&[], job);
    place.wait_for("out", "half");
    place.snapshot();
    fs::write(place.file("go-on"), "").unwrap();
    place.wait_for("out", "saved 5");
    fs::remove_file(place.file("model-2")).unwrap();
    fs::remove_file(place.file("go-on")).unwrap();
    run.crash();
    place.wait_for("err", "restored image=000001");
    fs::write(place.file("go-on"), "").unwrap();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    for number in 1..=5 {
        let saved = fs::read(place.file(&format!("model-{number}"))).unwrap();
        assert_eq!(saved, vec![number; 210_000], "{number}");
    }
    assert_eq!(fs::read(place.file("same")).unwrap(), vec![5; 210_000]);
}
