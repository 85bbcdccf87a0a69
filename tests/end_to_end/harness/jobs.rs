//! Python jobs shared by many tests.

/// Options of a run that takes snapshots only when asked to.
pub const ON_REQUEST: [&str; 2] = ["--interval", "never"];

/// Counts to 40 into a log opened in mode `w` and onto stdout. Halfway it waits for a file `go`, so that it does not
/// end before the test's actions.
pub const COUNT: &str = r#"
import os, time
log = open("log", "w")
for i in range(40):
    print(i, flush=True)
    log.write(f"{i}\n"); log.flush()
    time.sleep(0.02)
    while i == 20 and not os.path.exists("go"):
        time.sleep(0.02)
"#;

/// Prints `ready` and computes until there is a file `go`, then runs the following code.
pub const UNTIL_GO: &str = r#"
import os, signal, sys, time
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"#;

/// Returns `0` to `count - 1`, one per line.
pub fn lines(count: usize) -> String {
    (0..count).map(|i| format!("{i}\n")).collect()
}
