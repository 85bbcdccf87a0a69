//! Fuzzing entry points for parsers of CRIU's output that are not public.

use super::Version;

/// Parses the output of `criu --version`.
pub(crate) fn version(answer: &str) -> bool {
    let Some(version) = Version::parse(answer) else {
        return false;
    };
    let again = Version::parse(&format!("Version: {version}\n"));
    assert_eq!(again, Some(version));
    true
}
