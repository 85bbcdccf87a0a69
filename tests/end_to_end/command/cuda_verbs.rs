//! Tests of `ckpt-run cuda` without a GPU, and of its refusals. `tests/real_gpu` has the tests with a GPU.

use std::path::Path;

use crate::harness::{Place, code, skip, stderr, stdout};

const GPU: &str = "GPU-6d1c2d4e-7d8a-41f3-9d0e-1c2d3e4f5a6b";

fn has_gpu() -> bool {
    let found = Path::new("/dev/nvidiactl").exists() || Path::new("/dev/nvidia0").exists();
    if found {
        skip("this machine has a GPU");
    }
    found
}

#[test]
fn every_verb_reports_a_missing_gpu() {
    if has_gpu() {
        return;
    }
    let place = Place::new();
    let map = format!("{GPU}={GPU}");
    for arguments in [
        &["gpus"][..],
        &["state", "--pid", "1"],
        &["tid", "--pid", "1", "--json"],
        &["lock", "--pid", "1", "--timeout", "1s"],
        &["checkpoint", "--pid", "1"],
        &["restore", "--pid", "1", "--gpu-map", &map],
        &["unlock", "-p", "1"],
        &["toggle", "--pid", "1", "--pid", "2"],
        &["suspend", "--pid", "1"],
        &["resume", "--pid", "1"],
    ] {
        let output = place.verb(&[&["cuda"], arguments].concat());
        assert_eq!(code(output.status), 1, "{arguments:?}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{arguments:?}");
        assert_eq!(
            stderr(&output),
            "ckpt-run: error: cannot find an NVIDIA GPU: neither /dev/nvidiactl nor /dev/nvidia0 exists\n"
        );
    }
}

#[test]
fn a_wrong_line_is_one_on_every_machine() {
    let place = Place::new();
    let double = format!("{GPU}={GPU},{GPU}={GPU}");
    let instance = format!("{GPU}=MIG-{}", &GPU[4..]);
    for (arguments, words) in [
        (&["state"][..], "--pid"),
        (&["state", "--pid", "0"], "0 is not in 1.."),
        (&["lock", "--pid", "1", "--timeout", "10"], "10"),
        (
            &["resume", "--pid", "1", "--gpu-map", "auto"],
            "--from OLD,OLD",
        ),
        (&["resume", "--pid", "1", "--gpu-map", &double], "twice"),
        (
            &["restore", "--pid", "1", "--gpu-map", &instance],
            "MIG instance",
        ),
        (
            &["restore", "--pid", "1", "--gpu-map", "0=1"],
            "ckpt-run cuda gpus",
        ),
    ] {
        let output = place.verb(&[&["cuda"], arguments].concat());
        assert_eq!(code(output.status), 125, "{arguments:?}");
        assert!(
            stderr(&output).contains(words),
            "{arguments:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn help_explains_maps_and_exit_codes() {
    let place = Place::new();
    let output = place.verb(&["cuda", "--help"]);
    let text = stdout(&output);
    for words in ["--gpu-map auto --from", "Exit codes:", "suspend", "Ctrl-C"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}
