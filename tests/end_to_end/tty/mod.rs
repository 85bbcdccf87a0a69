//! Jobs in a terminal: what they see of it, keys, snapshots and restores, and what is left of the caller's terminal.

mod keys;
mod lines;
mod modes;
mod progress;
mod screen;
mod terminal_snapshots;
mod terminal_streams;

/// Counts onto its terminal until it is killed.
const COUNT: &str = r#"
import time
i = 0
while True:
    print("count", i, flush=True)
    i += 1
    time.sleep(0.05)
"#;

/// Says what it is told to and ends at `end`.
const ECHO: &str = r#"
import os, sys
print("ready", flush=True)
for line in sys.stdin:
    print("heard", line.strip(), flush=True)
    if line.strip() == "end":
        sys.exit(0)
"#;
