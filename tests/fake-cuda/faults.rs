//! Failures and hanging calls that a test requests.
//!
//! `FAKE_CUDA_FAIL` is `call[:nth[:code]]`, several separated by commas: the nth call of that name (from 1; 0, the
//! default, means every call) returns code (default 999) and has no effect. `FAKE_CUDA_HANG` is `call:nth:path`: the
//! call waits inside the driver until the file exists, and then continues; meanwhile a file `hangs-<call>` exists in
//! the GPUs' folder. Both count the calls in each process separately and apply to jobs; `FAKE_CUDA_CALLER_FAIL` and
//! `FAKE_CUDA_CALLER_HANG` apply to programs whose name begins with `ckpt`, whose `cuCheckpointProcess...` calls can
//! fail as well.
//!
//! With `token` for nth, a rule applies as often as there are files `token-<call>-<any>` in the GPUs' folder; each use
//! in any process removes one.
//!
//! The same specifications are read from the files `fail`, `hang`, `caller-fail`, `caller-hang` of the GPUs' folder at
//! each call, for failures in the middle of a run; there, after a restore, only nth 0 is useful.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::card;
use super::code::{Answer, Code, UNKNOWN};

/// Time between two checks for a file.
const POLL: Duration = Duration::from_millis(2);

/// Counts the call, and makes it hang or fail as requested.
pub fn meet(call: &str) -> Answer {
    let count = count(call)?;
    for path in applying("HANG", call, count) {
        hang(call, Path::new(&path));
    }
    let code = applying("FAIL", call, count).into_iter().next();
    code.map_or(Ok(()), |code| Err(code.parse().unwrap_or(UNKNOWN)))
}

/// Returns the number of calls of this name, including this one.
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

/// Announces the hanging call, and returns when the file exists.
pub fn hang(call: &str, path: &Path) {
    let _ = std::fs::write(card::folder().join(format!("hangs-{call}")), "");
    while !path.exists() {
        std::thread::sleep(POLL);
    }
}

/// Returns the third words of the rules for this call; empty if there is none.
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
    // If several processes want the same token, only one can remove it.
    tokens.any(|token| std::fs::remove_file(token.path()).is_ok())
}

/// Returns the rules in the environment and the file for this kind of program.
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
