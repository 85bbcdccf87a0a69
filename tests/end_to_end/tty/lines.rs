//! Lines of ckpt-run between the job's output.

use std::fs;

use super::screen::Screen;
use crate::harness::{Place, apply, as_root};

/// Progress bar that redraws itself as fast as it can, until there is a file `go`.
const BAR: &str = r#"
import os, sys
i = 0
while not os.path.exists("go"):
    END
    i += 1
sys.stdout.write("\nend of the bar\n")
"#;

#[apply(as_root)]
fn our_lines_never_break_a_progress_bars_line() {
    // The carriage return comes first, as with tqdm, or last.
    for draw in [
        r#"sys.stdout.write(f"\r[{i:09d} of the bar]"); sys.stdout.flush()"#,
        r#"sys.stdout.write(f"[{i:09d} of the bar]\r"); sys.stdout.flush()"#,
    ] {
        let place = Place::new();
        let screen = Screen::new(24, 200);
        fs::write(place.file("job.py"), BAR.replace("END", draw)).unwrap();
        let mut run = screen.start(&place, &["--", "python3", "job.py"]);
        screen.wait_for("of the bar]");
        for _ in 0..3 {
            place.snapshot();
        }
        place.go();
        assert_eq!(run.wait(), 0, "{}", screen.text());
        screen.wait_for("end of the bar");
        let text = screen.text();
        let ours: Vec<&str> = text
            .lines()
            .filter(|line| line.contains("ckpt-run:"))
            .collect();
        assert!(ours.len() >= 3, "{ours:?}");
        for line in &ours {
            assert!(line.starts_with("ckpt-run: "), "{line:?}");
            assert!(!line.contains("of the bar"), "{line:?}");
        }
        // Each drawing of the bar is complete, too.
        for line in text.lines().filter(|line| line.contains("of the bar]")) {
            for drawn in line.split('\r').filter(|drawn| !drawn.is_empty()) {
                assert!(drawn.starts_with('[') && drawn.ends_with(']'), "{drawn:?}");
            }
        }
    }
}
