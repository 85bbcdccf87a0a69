//! Tests: every cause is reached by real messages of CRIU and the driver, and the guide agrees with the table.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::examples::LINES;
use super::*;

/// Results of the driver: call, code, and a part of the meaning (codes as measured, driver 580).
const ANSWERS: &[(&str, i32, &str)] = &[
    ("checkpoint", 801, "managed memory"),
    ("restore", 801, "managed memory"),
    ("lock", 801, "profiler"),
    ("restore", 1, "GPU map lacks one"),
    ("restore", 2, "less free memory"),
    ("checkpoint", 2, "the host has too little"),
    ("lock", 600, "did not finish in time"),
    ("query", 3, "does not use CUDA"),
    ("query", 100, "sees no GPU"),
    ("query", 304, "has ended"),
    ("unlock", 401, "another program"),
    ("lock", 800, "does not let this user"),
    ("query", 803, "different versions"),
];

fn cause(symptom: Symptom<'_>) -> Option<&'static Cause> {
    find(&[symptom]).map(|(cause, _)| cause)
}

#[test]
fn messages_are_explained_and_every_cause_is_reached() {
    let (mut reached, mut provoked) = (HashSet::new(), HashSet::new());
    let lines = LINES
        .iter()
        .map(|(line, part)| (Symptom::Criu(line), *part));
    let answers = ANSWERS
        .iter()
        .map(|(call, code, part)| (Symptom::Cuda(call, *code), *part));
    for (symptom, part) in lines.chain(answers) {
        let cause = cause(symptom).unwrap_or_else(|| panic!("{symptom:?}"));
        assert!(cause.cause.contains(part), "{symptom:?}: {}", cause.cause);
        reached.insert(std::ptr::from_ref(cause));
        if !matches!(symptom, Symptom::Criu(line) if line.starts_with('(')) {
            provoked.insert(std::ptr::from_ref(cause));
        }
    }
    let missed = CAUSES
        .iter()
        .filter(|one| !reached.contains(&std::ptr::from_ref(*one)));
    let missed: Vec<_> = missed.map(|cause| &cause.sign).collect();
    assert!(missed.is_empty(), "{missed:?}");
    assert!(provoked.len() >= 25, "{}", provoked.len());
}

#[test]
fn unknown_errors_are_not_explained() {
    for symptom in [
        Symptom::Criu("Error (a.c:1): something new"),
        Symptom::Criu("801"),
        Symptom::Cuda("unlock", 801),
        Symptom::Cuda("restore", 9),
        Symptom::Cuda("has bad size", 0),
    ] {
        assert_eq!(cause(symptom), None, "{symptom:?}");
    }
}

#[test]
fn more_specific_line_has_precedence() {
    let lines = ["Can't dump file 1 of that type", "File x has bad size 1"];
    let (cause, symptom) = find(&lines.map(Symptom::Criu)).unwrap();
    assert!(cause.cause.contains("changed its size"));
    assert!(matches!(symptom, Symptom::Criu(line) if line == lines[1]));
}

/// Checks that the table's texts occur in the CRIU program, except for texts of the C library.
#[test]
fn criu_has_the_texts_that_it_is_known_by() {
    const OF_THE_KERNEL: [&str; 14] = [
        "Input/output error",
        "Network is unreachable",
        "Too many levels of symbolic links",
        "Invalid cross-device link",
        "anon_inode:[io_uring]",
        "anon_inode:[userfaultfd]",
        "anon_inode:[perf_event]",
        "anon_inode:bpf",
        "/secretmem",
        "Address already in use",
        "File exists",
        "No space left on device",
        "Cannot allocate memory",
        "Operation not permitted",
    ];
    // Texts with the numbers that CRIU fills in; the program contains the format strings.
    const FILLED_IN: [(&str, &str); 6] = [
        ("mapping with 0xfffffffffffffff4", "mapping with %lx"),
        ("Can't get 1:16 opt", "Can't get %d:%d opt"),
        ("send_fds failed (-22)", "send_fds failed (%d)"),
        ("chr 10:229", "of that type"),
        (
            "Can't splice pages to pipe (-1/",
            "Can't splice pages to pipe (%d/",
        ),
        ("state D", "state %c"),
    ];
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join(".criu/usr/sbin/criu");
    let Some(program) = [here, PathBuf::from("/usr/sbin/criu")]
        .iter()
        .find_map(|path| fs::read(path).ok())
    else {
        eprintln!("SKIPPED: no CRIU to compare its texts with");
        return;
    };
    let has = |text: &str| {
        program
            .windows(text.len())
            .any(|part| part == text.as_bytes())
    };
    let texts = CAUSES.iter().flat_map(|cause| match cause.sign {
        Sign::Criu(texts) => texts,
        Sign::Cuda(..) => &[],
    });
    for text in texts.filter(|text| !OF_THE_KERNEL.contains(text)) {
        let filled_in = FILLED_IN.iter().find(|(filled_in, _)| filled_in == text);
        let text = filled_in.map_or(*text, |(_, text)| *text);
        assert!(has(text), "{text:?} is not in CRIU");
    }
}

const MARK: &str =
    "<!-- below: the table of src/known_errors/mod.rs, written by the test write_the_guide -->";

fn guide() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/troubleshooting.md")
}

fn tables() -> String {
    let row =
        |says: String, cause: &Cause| format!("| {says} | {} | {} |\n", cause.cause, cause.remedy);
    let (mut criu, mut cuda) = (String::new(), String::new());
    for cause in CAUSES {
        match cause.sign {
            Sign::Criu(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| format!("`{text}`")).collect();
                criu += &row(texts.join(" … "), cause);
            }
            Sign::Cuda(calls, code) => {
                let calls = if calls.is_empty() {
                    "any call".to_owned()
                } else {
                    calls.join(", ")
                };
                cuda += &row(format!("{code}, {calls}"), cause);
            }
        }
    }
    format!(
        "\n## What CRIU says\n\n| in its log | means | what to do |\n|---|---|---|\n{criu}\n\
         ## What the CUDA driver answers\n\n| code, to which call | means | what to do |\n|---|---|---|\n{cuda}"
    )
}

#[test]
fn guide_matches_the_table() {
    let guide = fs::read_to_string(guide()).unwrap();
    let (_, below) = guide.split_once(MARK).unwrap();
    assert_eq!(
        below.trim(),
        tables().trim(),
        "cargo test --lib write_the_guide -- --ignored"
    );
}

#[test]
#[ignore = "writes into the source tree, when the table has changed"]
fn write_the_guide() {
    let text = fs::read_to_string(guide()).unwrap();
    let (above, _) = text.split_once(MARK).unwrap();
    fs::write(guide(), format!("{above}{MARK}\n{}", tables())).unwrap();
}
