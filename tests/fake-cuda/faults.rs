//! Failures and hanging calls that a test asks for.
//!
//! `FAKE_CUDA_FAIL` `call[:nth[:code]]`, several separated by commas: the nth call of that name (from 1; 0 is every
//! one, and without it) answers code (999) and does nothing. `FAKE_CUDA_HANG` `call:nth:path`: it waits until the
//! file exists, inside the driver, and goes on; that it does, a file `hangs-<call>` in the GPUs' folder says. Both count in each process on its own and are for jobs;
//! `FAKE_CUDA_CALLER_FAIL` and `FAKE_CUDA_CALLER_HANG` are for programs whose name begins with `ckpt`, whose
//! `cuCheckpointProcess...` calls can fail as well.
//!
//! With `token` for nth, a rule applies as often as there are files `token-<call>-<any>` in the GPUs' folder, of which
//! each time removes one, whichever process it is in.
//!
//! The same specifications are read from the files `fail`, `hang`, `caller-fail`, `caller-hang` of the GPUs' folder
//! at each call, for failures in the midst of a run; there only nth 0 makes sense after a restore.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::card;
use super::code::{Answer, Code, UNKNOWN};

/// Time between two looks for a file.
const POLL: Duration = Duration::from_millis(2);

/// Counts the call, lets it hang, lets it fail.
pub fn meet(call: &str) -> Answer {
    let count = count(call)?;
    for path in applying("HANG", call, count) {
        hang(call, Path::new(&path));
    }
    let code = applying("FAIL", call, count).into_iter().next();
    code.map_or(Ok(()), |code| Err(code.parse().unwrap_or(UNKNOWN)))
}

/// How often a call of this name was made, with this one.
fn count(call: &str) -> Result<u64, Code> {
    static COUNTS: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);
    let mut counts = COUNTS.lock().map_err(|_| UNKNOWN)?;
    let count = counts
        .get_or_insert_default()
        .entry(call.to_owned())
        .or_default();
    *count += 1;
    Ok(*count)
}

/// Tells who waits for that, and returns when the file exists.
pub fn hang(call: &str, path: &Path) {
    let _ = std::fs::write(card::folder().join(format!("hangs-{call}")), "");
    while !path.exists() {
        std::thread::sleep(POLL);
    }
}

/// The third words of the rules for this call; empty where there is none.
fn applying(kind: &str, call: &str, count: u64) -> Vec<String> {
    let third = |rule: String| {
        let mut words = rule.trim().splitn(3, ':');
        let name = words.next()?;
        let nth = words.next().unwrap_or("0");
        let applies = name == call
            && match nth {
                "token" => take_token(call),
                nth => nth.parse().is_ok_and(|nth: u64| nth == 0 || nth == count),
            };
        applies.then(|| words.next().unwrap_or_default().to_owned())
    };
    rules(kind).into_iter().filter_map(third).collect()
}

fn take_token(call: &str) -> bool {
    let prefix = format!("token-{call}-");
    let entries = std::fs::read_dir(card::folder())
        .into_iter()
        .flatten()
        .flatten();
    let mut tokens =
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    // Of several that want the same one, one can remove it.
    tokens.any(|token| std::fs::remove_file(token.path()).is_ok())
}

/// What the environment and the file say for this kind of program.
fn rules(kind: &str) -> Vec<String> {
    let name = if is_caller() {
        format!("CALLER_{kind}")
    } else {
        kind.to_owned()
    };
    let set = std::env::var(format!("FAKE_CUDA_{name}")).unwrap_or_default();
    let file = name.to_lowercase().replace('_', "-");
    let written = std::fs::read_to_string(card::folder().join(file)).unwrap_or_default();
    [set, written]
        .iter()
        .flat_map(|text| text.split(','))
        .map(str::to_owned)
        .collect()
}

fn is_caller() -> bool {
    static CALLER: OnceLock<bool> = OnceLock::new();
    *CALLER.get_or_init(|| {
        let program = std::env::current_exe().unwrap_or_default();
        program
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"ckpt"))
    })
}
