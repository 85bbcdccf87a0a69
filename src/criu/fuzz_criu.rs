//! CRIU's words for fuzzing, where they have no public way in.

use super::Version;

/// The answer to `criu --version`.
pub(crate) fn version(answer: &str) -> bool {
    let Some(version) = Version::parse(answer) else {
        return false;
    };
    let again = Version::parse(&format!("Version: {version}\n"));
    assert_eq!(again, Some(version));
    true
}
