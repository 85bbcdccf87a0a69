//! Completions in their shells: the offers for the beginning of a line.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::harness::{Place, code, installed, program, stderr, stdout};

/// Runs zsh at a terminal (`zpty`), which completes each given line and prints the result in angle brackets.
const ZSH: &str = r#"
zmodload zsh/zpty
zpty shell 'env TERM=dumb zsh -f -i'
zpty -w shell "PS1=; stty cols 200; fpath=($PWD/functions \$fpath); autoload -Uz compinit; compinit -u -d $PWD/dump
tell() { zle -I; print -r -- \"<\$BUFFER>\"; BUFFER= }; zle -N tell; bindkey '^T' tell; print RE''ADY"
zpty -r shell told '*READY*' || exit 1
for line in "$@"; do
    zpty -w -n shell "$line"$'\t\x14'
    zpty -r shell told '*<*>*' || exit 1
    print -r -- "$told"
done
"#;

/// Calls bash's completion function as bash does.
const BASH: &str = r#"
source ./script
words=($1)
[[ $1 == *' ' ]] && words+=('')
COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1)) COMPREPLY=()
function=$(complete -p ckpt-run | sed 's/.*-F \([^ ]*\).*/\1/')
"$function" ckpt-run "${words[COMP_CWORD]}" "${words[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// Lines, the expected completions of each, and an option that must not be offered.
const LINES: [(&str, &[&str], &str); 12] = [
    ("ckpt-run sn", &["snapshot"], "snice"),
    ("ckpt-run --store here stat", &["status"], "stat "),
    (
        "ckpt-run forget --keep-",
        &[
            "--keep-last",
            "--keep-within",
            "--keep-hourly",
            "--keep-daily",
        ],
        "--keep_",
    ),
    (
        "ckpt-run resume --max-r",
        &["--max-restarts"],
        "--max-overhead",
    ),
    ("ckpt-run config sh", &["show"], "check"),
    ("ckpt-run template kub", &["kubernetes"], "docker"),
    ("ckpt-run --restart on-f", &["on-failure"], "on-abnormal"),
    ("ckpt-run restore --isolation na", &["namespaces"], "auto"),
    ("ckpt-run run --restart al", &["always"], "never"),
    ("ckpt-run gpu-cop", &[], "gpu-copier"),
    // The job's arguments are completed by the shell.
    ("ckpt-run -i 5m -- mktem", &["mktemp"], "--store"),
    ("ckpt-run -- rehears", &[], "rehearse"),
];

fn check(shell: &str, line: &str, offered: &str) {
    let (_, wanted, unwanted) = LINES.iter().find(|(given, ..)| *given == line).unwrap();
    for word in *wanted {
        assert!(offered.contains(word), "{shell}: {line}: {offered}");
    }
    assert!(!offered.contains(unwanted), "{shell}: {line}: {offered}");
}

/// Writes the script for a shell to a file in a folder.
fn install(place: &Place, shell: &str, file: &str) {
    let path = place.file(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, place.verb(&["completions", shell]).stdout).unwrap();
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
        if !installed(shell) {
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
fn bash_completes_lines() {
    if !installed("bash") {
        return;
    }
    let place = Place::new();
    install(&place, "bash", "script");
    for (line, ..) in LINES {
        let done = Command::new("bash")
            .args(["-c", BASH, "bash", line])
            .current_dir(place.path())
            .output()
            .unwrap();
        assert!(done.stderr.is_empty(), "{}", stderr(&done));
        check("bash", line, &stdout(&done));
    }
}

#[test]
fn zsh_completes_lines() {
    if !installed("zsh") {
        return;
    }
    let place = Place::new();
    install(&place, "zsh", "functions/_ckpt-run");
    let done = Command::new("timeout")
        .args(["60", "zsh", "-f", "-c", ZSH, "zsh"])
        .args(LINES.map(|(line, ..)| line))
        .current_dir(place.path())
        .env("HOME", place.path())
        .output()
        .unwrap();
    let told = stdout(&done);
    assert!(done.status.success(), "{told} {}", stderr(&done));
    let mut told = told.split_inclusive('>');
    for (line, ..) in LINES {
        // The input is echoed; the completed line is the last one.
        let offered = told.next().unwrap();
        check("zsh", line, offered);
    }
}

#[test]
fn fish_completes_lines() {
    if !installed("fish") {
        return;
    }
    let place = Place::new();
    install(&place, "fish", "fish/completions/ckpt-run.fish");
    // The shell loads the completions of programs that it finds.
    let program = Path::new(program()).parent().unwrap();
    let path = format!(
        "{}:{}",
        program.display(),
        std::env::var("PATH").unwrap_or_default()
    );
    for (line, ..) in LINES {
        let done = Command::new("fish")
            .args(["-c", "complete -C $argv[1]", line])
            .env("XDG_CONFIG_HOME", place.path())
            .env("HOME", place.path())
            .env("PATH", &path)
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", stderr(&done));
        check("fish", line, &stdout(&done));
    }
}
