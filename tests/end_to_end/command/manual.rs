//! Manual pages, as groff and mandoc process them.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::harness::{Place, installed, stderr, stdout};

fn pages(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn every_verb_has_a_manual_page_that_groff_takes() {
    let place = Place::new();
    let written = place.verb(&["man", "pages/man1"]);
    assert!(written.status.success(), "{}", stderr(&written));
    let folder = place.file("pages/man1");
    let names = pages(&folder);
    for name in ["ckpt-run", "ckpt-run-export", "ckpt-run-cuda-suspend"] {
        assert!(names.contains(&format!("{name}.1")), "{name}: {names:?}");
    }
    assert!(
        !names.iter().any(|name| name.contains("gpu-copier")),
        "{names:?}"
    );
    let help = stdout(&place.verb(&["--help"]));
    let verbs = help.split("Commands:\n").nth(1).unwrap().lines();
    let verbs = verbs.take_while(|line| line.starts_with("  "));
    // Lines with more indentation continue the line before.
    let verbs = verbs.filter(|line| !line.starts_with("   "));
    let verbs = verbs.filter_map(|line| line.split_whitespace().next());
    for verb in verbs.filter(|verb| *verb != "help") {
        assert!(
            names.contains(&format!("ckpt-run-{verb}.1")),
            "{verb}: {names:?}"
        );
    }
    for name in &names {
        let page = fs::read_to_string(folder.join(name))
            .unwrap()
            .replace('\\', "");
        for hidden in ["gpu-copier", "end-with-parent", "messages"] {
            assert!(!page.contains(hidden), "{name}: {hidden}");
        }
    }
    let main = place.verb(&["man"]);
    assert_eq!(main.stdout, fs::read(folder.join("ckpt-run.1")).unwrap());
    for name in &names {
        if !installed("groff") {
            return;
        }
        let checked = Command::new("groff")
            .args(["-man", "-ww", "-Tutf8", "-z", name])
            .current_dir(&folder)
            .output()
            .unwrap();
        assert!(checked.status.success(), "{name}");
        assert_eq!(stderr(&checked), "", "{name}");
    }
}

#[test]
fn mandoc_reports_only_the_missing_date() {
    if !installed("mandoc") {
        return;
    }
    let place = Place::new();
    assert!(place.verb(&["man", "pages"]).status.success());
    let folder = place.file("pages");
    let checked = Command::new("mandoc")
        .args(["-Tlint", "-W", "warning"])
        .args(pages(&folder))
        .current_dir(&folder)
        .output()
        .unwrap();
    assert!(checked.stderr.is_empty(), "{}", stderr(&checked));
    // A page is generated on request, so a date would be that day's, or one that nobody maintains.
    let said = stdout(&checked);
    let said: Vec<&str> = said
        .lines()
        .filter(|line| !line.ends_with("WARNING: missing date, using \"\": TH"))
        .collect();
    assert!(said.is_empty(), "{said:#?}");
    let title = fs::read_to_string(folder.join("ckpt-run-list.1")).unwrap();
    assert!(title.contains(".TH \"ckpt-run-list\" \"1\""), "{title}");
}
