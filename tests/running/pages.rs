//! What is made from the definitions of the command line: completions and manual pages.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::common::{Place, code};
use super::{stderr, stdout};

fn is_installed(program: &str) -> bool {
    let asked = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    asked.is_ok()
}

/// Whether the program is there; says aloud what is skipped without.
fn can_check(program: &str, what: &str) -> bool {
    let there = is_installed(program);
    if !there {
        eprintln!("SKIPPED: {what}: {program} is not installed");
    }
    there
}

#[test]
fn shells_understand_their_completions() {
    let place = Place::new();
    for (shell, check) in [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute")] {
        let script = place.verb(&["completions", shell]);
        assert!(
            script.status.success() && script.stdout.len() > 1000,
            "{shell}"
        );
        if !can_check(shell, "parsing the completions") {
            continue;
        }
        fs::write(place.file(shell), &script.stdout).unwrap();
        let parsed = Command::new(shell)
            .args([check.as_ref(), place.file(shell).as_os_str()])
            .output()
            .unwrap();
        assert!(parsed.status.success(), "{shell}: {}", stderr(&parsed));
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&place.verb(&["completions", shell]));
        assert!(
            script.contains("rehearse") && script.contains("max-restarts"),
            "{shell}"
        );
        for hidden in ["gpu-copier", "end-with-parent", "messages"] {
            assert!(!script.contains(hidden), "{shell}: {hidden}");
        }
    }
    let refused = place.verb(&["completions", "no-shell"]);
    assert_eq!(code(refused.status), 125);
}

#[test]
fn bash_completes_verbs_and_options() {
    if !can_check("bash", "completing") {
        return;
    }
    let place = Place::new();
    fs::write(
        place.file("script"),
        place.verb(&["completions", "bash"]).stdout,
    )
    .unwrap();
    let complete = |words: &str| {
        let last = words.split(' ').count() - 1;
        let line = format!(
            "source ./script; COMP_WORDS=({words}); COMP_CWORD={last}; \
             _ckpt__run ckpt-run \"${{COMP_WORDS[{last}]}}\" ''; echo \"${{COMPREPLY[@]}}\""
        );
        let done = Command::new("bash")
            .args(["-c", &line])
            .current_dir(place.path())
            .output()
            .unwrap();
        assert!(done.stderr.is_empty(), "{}", stderr(&done));
        stdout(&done).trim().to_owned()
    };
    assert_eq!(complete("ckpt-run verif"), "verify");
    assert_eq!(complete("ckpt-run export --plai"), "--plaintext");
}

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
    let verbs = verbs.filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next());
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
        if !can_check("groff", "checking the manual pages") {
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
