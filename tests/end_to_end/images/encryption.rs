//! Run with an encrypted store, from the key's file to the restored job.

use std::fs;

use crate::harness::{Place, UNTIL_GO, apply, as_root_and_user, holds, stderr, stdout};

const FILE: &str = "CKPT_RUN_ENCRYPTION_KEY_FILE";
const COMMAND: &str = "CKPT_RUN_ENCRYPTION_KEY_COMMAND";

#[apply(as_root_and_user)]
fn job_restored_from_an_encrypted_store_never_has_the_key() {
    let place = Place::new();
    let made = place.verb(&["key", "generate", "key"]);
    assert!(made.status.success(), "{}", stderr(&made));
    let key = place.text("key");
    let script = format!(
        "secret = 'sword' + 'fish' * 3\n{UNTIL_GO}\n\
         print(secret, [name for name in os.environ if 'KEY' in name], os.listdir('/proc/self/fd'))\n"
    );
    fs::write(place.file("job.py"), script).unwrap();
    let command = format!("cat '{}'", place.file("key").display());
    let mut run = place.start_with(&[], &["python3", "-u", "job.py"], |run| {
        run.env(COMMAND, &command);
        run.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    });
    place.wait_for("out", "ready");
    let keyed = |arguments: &[&str]| {
        let output = place
            .command(arguments)
            .env(FILE, place.file("key"))
            .output();
        output.unwrap()
    };
    let snapshot = keyed(&["snapshot"]);
    assert!(snapshot.status.success(), "{}", stderr(&snapshot));
    run.crash();
    place.wait_for("err", "ckpt-run: restored");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let out = place.text("out");
    assert!(
        out.ends_with("swordfishfishfish [] ['0', '1', '2', '3']\n"),
        "{out}"
    );

    let store = place.file(".ckpt-run");
    for text in [key.trim().as_bytes(), b"swordfishfishfish"] {
        assert!(!holds(&store, text), "{}", String::from_utf8_lossy(text));
    }
    let verified = keyed(&["verify"]);
    assert!(stdout(&verified).contains("good"), "{}", stderr(&verified));
    let listed = place.verb(&["list"]);
    assert_eq!(listed.status.code(), Some(125));
    assert!(
        stderr(&listed).contains("encryption.key_file"),
        "{}",
        stderr(&listed)
    );
    let again = place.verb(&["-q", "--", "python3", "-u", "job.py"]);
    assert_eq!(again.status.code(), Some(125), "{}", stderr(&again));
}
