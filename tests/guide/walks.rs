//! Pages that walk through something, walked through: real binary, real CRIU, in the page's order.

use std::fs;

use super::common::{Place, can_run};
use super::pages::{self, Block, Page};
use super::terminal::Terminal;

/// Counts until there is a file `go`, then some more.
const JOB: &str = "\
import os, time
step = 0
while not os.path.exists('go') or step % 20:
    print(step, flush=True)
    step += 1
    time.sleep(0.05)
";

fn runnable(page: &Page) -> Vec<&Block> {
    let marked = |block: &&Block| {
        let mut words = block.info.split_whitespace();
        words.any(|word| word == "run" || word.starts_with("run="))
    };
    page.blocks.iter().filter(marked).collect()
}

/// A run of `JOB`, begun as a reader of those pages has one.
fn begun() -> Terminal {
    let place = Place::new();
    fs::write(place.file("job.py"), JOB).unwrap();
    let mut terminal = Terminal::new(place, "");
    terminal.run(&block(
        "ckpt-run --interval never -- python3 -u job.py >> out &",
    ));
    terminal
}

fn block(text: &str) -> Block {
    let (info, text) = ("sh run".to_owned(), text.to_owned() + "\n");
    Block { info, text }
}

#[test]
fn the_first_hour_goes_as_the_page_says() {
    if !can_run() {
        return;
    }
    let page = pages::guide("first-hour.md");
    let blocks = runnable(&page);
    assert!(blocks.len() >= 8, "{}", blocks.len());
    let mut terminal = Terminal::new(Place::new(), "first-hour");
    for block in blocks {
        // Twice the page's pace: its reader needs the time, we do not.
        let text = block.text.replace("job.py 0.1", "job.py 0.05");
        let info = block.info.clone();
        terminal.run(&Block { info, text });
    }
    let screen = terminal.screen();
    for said in ["PASS", "survived 1 crash", "exit code 75", "the same"] {
        assert!(screen.contains(said), "{said}: {screen}");
    }
}

#[test]
fn images_are_looked_into_and_carried_as_the_page_says() {
    if !can_run() {
        return;
    }
    let page = pages::guide("images.md");
    let blocks = runnable(&page);
    assert!(blocks.len() >= 3, "{}", blocks.len());
    let mut terminal = begun();
    terminal.run(&block("ckpt-run snapshot\nckpt-run snapshot"));
    terminal.run(&block("kill -USR2 %1\nwait %1 || test $? = 75"));
    // The page lets an imported image go on to the job's end.
    terminal.place().go();
    for block in blocks {
        terminal.run(block);
    }
}

#[test]
fn status_tells_what_the_page_says() {
    if !can_run() {
        return;
    }
    let page = pages::guide("status.md");
    let blocks = runnable(&page);
    assert!(blocks.len() >= 2, "{}", blocks.len());
    let mut terminal = begun();
    terminal.run(&block("ckpt-run snapshot"));
    for block in blocks {
        if block.info.contains("run=3") {
            // It waits for the run's end.
            terminal.place().go();
        }
        terminal.run(block);
    }
}
