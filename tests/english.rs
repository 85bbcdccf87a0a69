//! English of the sources: words that doc comments must not begin with, and the length of names.
//!
//! The rules are those of CONTRIBUTING.md. Lower the limits with every improvement.

use std::fs;
use std::path::{Path, PathBuf};

/// Words that introduce a clause instead of naming a thing or an action.
const CLAUSE_OPENERS: [&str; 18] = [
    "As", "By", "How", "It", "None", "Not", "Nothing", "Of", "One", "That", "Those", "What",
    "When", "Where", "Whether", "Which", "Who", "Why",
];
/// Doc comments in `src/` that begin with such a word.
const OPENERS_MAX: usize = 10;
/// Largest share of doc comments that may ever begin with such a word, percent.
const OPENERS_MAX_PERCENT: usize = 2;
/// Longest name of a function, characters.
const NAME_LENGTH_MAX: usize = 60;

#[test]
fn doc_comments_begin_with_a_noun_or_a_verb() {
    let mut comments = 0;
    let mut found = Vec::new();
    for file in sources(&["src"]) {
        let text = fs::read_to_string(&file).unwrap();
        let mut previous = None;
        for (number, line) in text.lines().enumerate() {
            let marker = doc_marker(line);
            if let Some(marker) = marker.filter(|_| marker != previous) {
                comments += 1;
                let rest = line.trim_start()[marker.len()..].trim_start();
                let word = rest.split(|c: char| !c.is_ascii_alphabetic()).next();
                if word.is_some_and(|word| CLAUSE_OPENERS.contains(&word)) {
                    found.push(format!("{}:{}: {rest}", file.display(), number + 1));
                }
            }
            previous = marker;
        }
    }
    assert!(comments > 5000, "only {comments} comments were found");
    assert_limit(
        &found,
        OPENERS_MAX.min(comments * OPENERS_MAX_PERCENT / 100),
    );
}

#[test]
fn names_of_functions_are_short() {
    let mut functions = 0;
    let mut found = Vec::new();
    for file in sources(&["src", "tests", "fuzz", "benches"]) {
        let text = fs::read_to_string(&file).unwrap();
        for (number, line) in text.lines().enumerate() {
            let Some((_, rest)) = line.split_once("fn ") else {
                continue;
            };
            functions += 1;
            let name = rest
                .split(|c: char| c != '_' && !c.is_ascii_alphanumeric())
                .next()
                .unwrap_or_default();
            if name.len() > NAME_LENGTH_MAX {
                found.push(format!("{}:{}: {name}", file.display(), number + 1));
            }
        }
    }
    assert!(functions > 5000, "only {functions} functions were found");
    assert_limit(&found, 0);
}

/// Fails when more places break a rule than the limit allows.
fn assert_limit(found: &[String], limit: usize) {
    assert!(
        found.len() <= limit,
        "{} places where the limit is {limit}:\n{}",
        found.len(),
        found.join("\n")
    );
}

/// Marker of the doc comment that a line belongs to.
fn doc_marker(line: &str) -> Option<&'static str> {
    let line = line.trim_start();
    ["///", "//!"]
        .into_iter()
        .find(|marker| line.starts_with(marker))
}

/// All source files below folders of the repository.
fn sources(folders: &[&str]) -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    let mut folders: Vec<PathBuf> = folders.iter().map(|folder| root.join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}
