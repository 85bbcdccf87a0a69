//! The checks that show if snapshots and restores can work on this machine, and how to fix the problems found.
//!
//! Each check examines one subject, independently of the others. No check changes the machine. A check that cannot
//! examine its subject reports that. The checks do not know how their results are shown.

use std::path::Path;
use std::thread;

use nix::sched::CloneFlags;
use serde::Serialize;

use super::user_sandbox::UserSandbox;
use super::{gpu_checks, host_checks, space_checks};
use crate::criu::{CheckError, Criu, Search};
use crate::known_errors::{self, Symptom};

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Subject of the check, in one or two words.
    pub name: &'static str,
    /// Severity of the result.
    pub status: Status,
    /// The finding.
    pub detail: String,
    /// The recommended fix; `None` if nothing needs to be done.
    pub remedy: Option<String>,
}

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Everything is in order.
    Ok,
    /// Snapshots and restores work, with limits or worse than they could.
    Note,
    /// Snapshots or restores will fail.
    Problem,
}

/// Checks everything that a run with this store and this CRIU would need.
///
/// Blocks for as long as CRIU takes to check the kernel, 40 seconds at most.
#[must_use]
pub fn examine(store: &Path, search: &Search) -> Vec<Check> {
    let (mut checks, sandbox) = host_checks::checks();
    checks.extend(criu_checks(search, sandbox.as_ref()));
    checks.extend(gpu_checks::gpu_checks());
    checks.extend(space_checks::checks(store));
    checks
}

impl Check {
    pub(super) fn ok(name: &'static str, detail: impl Into<String>) -> Check {
        Check {
            name,
            status: Status::Ok,
            detail: detail.into(),
            remedy: None,
        }
    }

    pub(super) fn note(
        name: &'static str,
        detail: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Check {
        Check {
            name,
            status: Status::Note,
            detail: detail.into(),
            remedy: Some(remedy.into()),
        }
    }

    pub(super) fn problem(
        name: &'static str,
        detail: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Check {
        Check {
            name,
            status: Status::Problem,
            detail: detail.into(),
            remedy: Some(remedy.into()),
        }
    }
}

fn criu_checks(search: &Search, sandbox: Option<&UserSandbox>) -> Vec<Check> {
    const FOUND: &str = "criu";
    const CHECKED: &str = "criu check";
    const PRIVILEGES: &str =
        "run as root; in a container with the options of `ckpt-run template docker`";
    let criu = match Criu::find(search) {
        Ok(criu) => criu,
        Err(error) => {
            let detail = error.finding() + &sources_of(&error);
            return vec![Check::problem(FOUND, detail, error.remedy())];
        }
    };
    let program = criu.argv().pop().unwrap_or_default();
    let found = format!("CRIU {} at {}", criu.version, program.display());
    let answer = match sandbox {
        Some(sandbox) => sandbox.check(&criu),
        None => {
            checked_in_namespace(&criu).map_err(|error| error.to_string() + &sources_of(&error))
        }
    };
    let checked = match answer {
        Ok(()) => Check::ok(CHECKED, "kernel and privileges suffice"),
        Err(reason) => {
            let known = known_errors::find(&[Symptom::Criu(&reason)]);
            let remedy = known.map_or(PRIVILEGES, |(known, _)| known.remedy);
            Check::problem(CHECKED, reason, remedy)
        }
    };
    vec![Check::ok(FOUND, found), checked]
}

/// Runs CRIU's check with a /proc like the one CRIU has in the sandbox; if that is impossible, with the /proc of
/// ckpt-run.
fn checked_in_namespace(criu: &Criu) -> Result<(), CheckError> {
    let check = || {
        // A separate check reports a refusal here.
        let _ = host_checks::enter(CloneFlags::empty());
        criu.check()
    };
    let checked = thread::scope(|scope| scope.spawn(check).join());
    checked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Returns the causes of an error, to be appended to its message.
pub(super) fn sources_of(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_shortcomings_have_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let search = Search {
            explicit: Some(dir.path().join("no-criu")),
            prefixes: vec![],
        };
        let checks = examine(&dir.path().join("store"), &search);
        for check in &checks {
            assert_eq!(
                check.remedy.is_none(),
                check.status == Status::Ok,
                "{check:?}"
            );
        }
        let names: std::collections::HashSet<_> = checks.iter().map(|check| check.name).collect();
        assert_eq!(names.len(), checks.len(), "a name twice: {checks:?}");
    }

    #[test]
    fn missing_criu_is_a_problem_and_is_not_asked_further() {
        let search = Search {
            explicit: Some("/no/such/criu".into()),
            prefixes: vec![],
        };
        let checks = criu_checks(&search, None);
        assert_eq!(checks.len(), 1);
        assert_eq!(checks[0].status, Status::Problem);
        assert!(checks[0].detail.contains("/no/such/criu"), "{checks:?}");
        assert!(checks[0].detail.contains("No such file"), "{checks:?}");
    }
}
