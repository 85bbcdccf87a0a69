//! `ckpt-run doctor`: prints the results of the checks of this machine.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use super::global::Failure;
use super::print::{print, print_json};
use crate::criu::Search;
use crate::doctor::{Check, Status, examine};

/// Width of the longest status name.
const STATUS_WIDTH: usize = 7;

/// Runs all checks and prints them to standard output, as lines or as a JSON array.
///
/// Succeeds if there is no problem; notes are not problems.
pub(super) fn run(json: bool, store: &Path, search: &Search) -> Result<ExitCode, Failure> {
    let checks = examine(store, search);
    let printed = if json {
        print_json(&checks)?
    } else {
        let mut lines = Vec::new();
        write_lines(&mut lines, &checks)?;
        print(&String::from_utf8_lossy(&lines))?
    };
    Ok(match count(&checks, Status::Problem) {
        0 => printed,
        _ => ExitCode::FAILURE,
    })
}

fn write_lines(out: &mut impl Write, checks: &[Check]) -> io::Result<()> {
    let names = checks
        .iter()
        .map(|check| check.name.len())
        .max()
        .unwrap_or(0);
    for check in checks {
        let status = word(check.status);
        writeln!(
            out,
            "{status:STATUS_WIDTH$}  {:names$}  {}",
            check.name, check.detail
        )?;
        if let Some(remedy) = &check.remedy {
            writeln!(out, "{:STATUS_WIDTH$}  {:names$}  -> {remedy}", "", "")?;
        }
    }
    match (count(checks, Status::Problem), count(checks, Status::Note)) {
        (0, 0) => writeln!(out, "all is well"),
        (0, notes) => writeln!(out, "no problems, notes: {notes}"),
        (problems, notes) => writeln!(out, "problems: {problems}, notes: {notes}"),
    }
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Note => "note",
        Status::Problem => "PROBLEM",
    }
}

fn count(checks: &[Check], status: Status) -> usize {
    checks.iter().filter(|check| check.status == status).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &'static str, status: Status, remedy: Option<&str>) -> Check {
        Check {
            name,
            status,
            detail: format!("about {name}"),
            remedy: remedy.map(str::to_owned),
        }
    }

    fn text(checks: &[Check]) -> String {
        let mut out = Vec::new();
        write_lines(&mut out, checks).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn shortcomings_are_followed_by_their_remedy() {
        let checks = [
            check("kernel", Status::Ok, None),
            check("criu", Status::Problem, Some("get one")),
        ];
        let expected = "ok       kernel  about kernel\n\
                        PROBLEM  criu    about criu\n\
                        \u{20}                -> get one\n\
                        problems: 1, notes: 0\n";
        assert_eq!(text(&checks), expected);
    }

    #[test]
    fn closing_line_counts_what_is_not_ok() {
        let fine = check("a", Status::Ok, None);
        let noted = check("b", Status::Note, Some("x"));
        assert!(text(std::slice::from_ref(&fine)).ends_with("\nall is well\n"));
        assert!(text(&[fine, noted]).ends_with("\nno problems, notes: 1\n"));
    }

    #[test]
    fn json_is_an_array_of_checks() {
        let checks = [check("criu", Status::Problem, Some("get one"))];
        let value = serde_json::to_value(checks).unwrap();
        let expected = serde_json::json!([
            {"name": "criu", "status": "problem", "detail": "about criu", "remedy": "get one"}
        ]);
        assert_eq!(value, expected);
    }
}
