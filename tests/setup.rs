//! `scripts/setup` takes CRIU from a newer suite by way of the sources that the machine has. Which
//! of them it takes, and with which keys, is checked here for the formats that apt knows.

use std::fs;
use std::process::Command;

/// What `scripts/setup` makes of apt sources: (file name, text), for a suite of a distribution.
fn derived(old: &str, new: &str, distribution: &str, sources: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let files = sources.iter().map(|(name, text)| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    });
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/setup");
    let output = Command::new("bash")
        // Its own name as $0 would make the script run.
        .args([
            "-c",
            "source \"$1\"; shift; derive_sources \"$@\"",
            "bash",
            script,
        ])
        .args([old, new, distribution])
        .args(files)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn suites_are_moved_and_keys_are_kept() {
    let text = "# a comment\n\
                Types: deb deb-src\n\
                URIs: http://mirror.example/debian\n\
                Suites: bookworm bookworm-updates bookworm-backports\n\
                Components: main contrib\n\
                Signed-By: /usr/share/keyrings/debian.gpg\n\
                \n\
                Types: deb\n\
                URIs: http://security.example\n\
                Suites: bookworm-security\n\
                Components: main\n";
    let expected = "Types: deb\n\
                    URIs: http://mirror.example/debian\n\
                    Suites: trixie trixie-updates\n\
                    Components: main\n\
                    Targets: Packages\n\
                    Signed-By: /usr/share/keyrings/debian.gpg\n\
                    \n\
                    Types: deb\n\
                    URIs: http://security.example\n\
                    Suites: trixie-security\n\
                    Components: main\n\
                    Targets: Packages\n\
                    \n";
    assert_eq!(
        derived("bookworm", "trixie", "debian", &[("debian.sources", text)]),
        expected
    );
}

#[test]
fn one_line_sources_become_the_same() {
    let text = "# deb http://commented.example noble main\n\
                deb [arch=amd64 signed-by=/k/a.gpg,/k/b.gpg] http://mirror.example/ubuntu noble main # tail\n\
                deb-src http://mirror.example/ubuntu noble main\n";
    let expected = "Types: deb\n\
                    URIs: http://mirror.example/ubuntu\n\
                    Suites: resolute\n\
                    Components: main universe\n\
                    Targets: Packages\n\
                    Signed-By: /k/a.gpg /k/b.gpg\n\
                    \n";
    assert_eq!(
        derived("noble", "resolute", "ubuntu", &[("sources.list", text)]),
        expected
    );
}

#[test]
fn embedded_keys_are_kept_whole() {
    let text = "Types: deb\nURIs: http://mirror.example\nSuites: noble\nComponents: main\n\
                Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n -----END PGP PUBLIC KEY BLOCK-----\n";
    let made = derived("noble", "plucky", "ubuntu", &[("ubuntu.sources", text)]);
    let key = "Signed-By: \n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n -----END PGP PUBLIC KEY BLOCK-----\n";
    assert!(made.contains(key), "{made}");
}

#[test]
fn sources_of_others_and_disabled_ones_are_left_out() {
    let others = "deb http://tools.example bookworm stable\n\
                  deb http://database.example bookworm-pgdg main\n\
                  deb http://cloud.example cloud-bookworm main\n";
    let disabled = "Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: bookworm\nComponents: main\n\n\
                    Types: deb-src\nURIs: http://source.example\nSuites: bookworm\nComponents: main\n";
    let sources = [("others.list", others), ("disabled.sources", disabled)];
    assert_eq!(derived("bookworm", "trixie", "debian", &sources), "");
}
