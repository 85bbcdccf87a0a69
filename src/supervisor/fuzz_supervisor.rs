//! Seams for fuzzing: the supervisor's readers of files and sockets.

use std::path::Path;

use super::control::fuzz_control;
use crate::doctor::space_checks::cgroup_headroom;
use crate::gpu::mapping;
use crate::run::image_facts::{ImageFacts, run_of};

/// Parses the facts of an image.
pub(crate) fn image_facts(meta: &[u8]) -> bool {
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

/// A client of the control socket says this.
pub(crate) fn control_request(bytes: &[u8]) -> bool {
    fuzz_control::client_says(bytes)
}

/// The supervisor at the control socket says this.
pub(crate) fn control_answer(line: &str) -> bool {
    fuzz_control::supervisor_says(line)
}

/// A release of the driver, such as an image or the machine names.
pub(crate) fn driver_version(text: &str) -> bool {
    mapping::branch(text).is_some()
}

/// `/proc/self/cgroup`, below an empty folder.
pub(crate) fn cgroups(root: &Path, text: &str) -> bool {
    cgroup_headroom(root, text).is_some()
}
