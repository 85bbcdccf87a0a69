//! Execution of step-by-step pages: real binary, real CRIU, in the page's order.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::pages::{self, Block, Page};
use super::terminal::Terminal;
use crate::harness::{Place, apply, as_root, write_script};

/// Counts until there is a file `go`, then a little more.
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

/// Starts a run of `JOB` in the state that a reader of those pages has.
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

#[apply(as_root)]
fn first_hour_follows_the_page() {
    let page = pages::guide("first-hour.md");
    let blocks = runnable(&page);
    assert!(blocks.len() >= 8, "{}", blocks.len());
    let mut terminal = Terminal::new(Place::new(), "first-hour");
    for block in blocks {
        terminal.run(block);
    }
    let screen = terminal.screen();
    for said in ["PASS", "survived 1 crash", "exit code 75", "the same"] {
        assert!(screen.contains(said), "{said}: {screen}");
    }
}

#[apply(as_root)]
fn inspection_and_export_of_images_follow_the_page() {
    let page = pages::guide("images.md");
    let blocks = runnable(&page);
    assert!(blocks.len() >= 3, "{}", blocks.len());
    let mut terminal = begun();
    terminal.run(&block("ckpt-run snapshot\nckpt-run snapshot"));
    terminal.run(&block("kill -USR2 %1\nwait %1 || test $? = 75"));
    // The page lets an imported image continue to the job's end; the other host's folders are this host's.
    terminal.place().go();
    terminal.run(&block("export CKPT_RUN_FILES_ON_LOST=warn"));
    for block in blocks {
        terminal.run(block);
    }
}

#[apply(as_root)]
fn status_output_matches_the_page() {
    let page = pages::guide("status.md");
    let blocks = runnable(&page);
    assert!(blocks.len() >= 2, "{}", blocks.len());
    let mut terminal = begun();
    terminal.run(&block("ckpt-run snapshot"));
    for block in blocks {
        if block.info.contains("run=3") {
            // The page waits for the run's end.
            terminal.place().go();
        }
        terminal.run(block);
    }
}

#[apply(as_root)]
fn reported_costs_match_the_page() {
    let page = pages::guide("tuning.md");
    let meanwhile = runnable(&page);
    assert!(meanwhile.len() >= 2);
    let mut terminal = begun();
    // The page refers to image 11.
    terminal.run(&block("for image in $(seq 12); do ckpt-run snapshot; done"));
    for block in meanwhile {
        terminal.run(block);
    }
    terminal.run(&block("kill -USR2 %1\nwait %1 || test $? = 75"));
}

#[test]
fn key_generation_follows_the_page() {
    let page = pages::guide("security.md");
    let blocks = runnable(&page);
    assert!(!blocks.is_empty());
    for block in blocks {
        let mut terminal = Terminal::new(Place::new(), "");
        // The reader's home folder must not be changed.
        let (info, text) = (block.info.clone(), block.text.replace("~/", "./"));
        terminal.run(&Block { info, text });
        let key = terminal.place().file(".config/ckpt-run/key");
        let mode = fs::metadata(key).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

/// Job that prints a line and ends.
const TRAIN: &str = "import sys\nprint('trained', sys.argv[1:], flush=True)\n";
/// Programs on the pages that represent a reader's own, or that run on other machines.
const STAND_INS: [(&str, &str); 7] = [
    ("python", "#!/bin/sh\nexec python3 \"$@\"\n"),
    (
        "torchrun",
        "#!/bin/sh\nshift 2\nexec python3 \"$@\" a rank\n",
    ),
    ("train", "#!/bin/sh\necho trained\n"),
    ("docker", "#!/bin/sh\n"),
    ("kubectl", "#!/bin/sh\n"),
    ("sbatch", "#!/bin/sh\ntest -s \"$1\"\n"),
    ("systemctl", "#!/bin/sh\n"),
];
/// Replacements for the reader's own names, and for paths outside of the fresh folder.
const MEANT: [(&str, &str); 4] = [
    (" ID ", " latest "),
    ("CMD", "python train.py"),
    ("/etc/systemd/system/", ""),
    ("/var/lib/ckpt-run/train", "$PWD/elsewhere"),
];

fn lines_of(page: &str) -> Vec<String> {
    let page = pages::guide(page);
    let lines: Vec<String> = runnable(&page)
        .iter()
        .flat_map(|block| block.text.lines())
        .map(|line| {
            MEANT.iter().fold(line.to_owned(), |line, (word, meant)| {
                line.replace(word, meant)
            })
        })
        .collect();
    assert!(!lines.is_empty(), "{}", page.path.display());
    lines
}

/// Returns true if a line starts a job.
fn starts(line: &str) -> bool {
    line.contains(" -- ") && !line.contains(" template ")
}

fn put_stand_ins(place: &Place, train: &str) {
    for file in ["train.py", "model.py"] {
        fs::write(place.file(file), train).unwrap();
    }
    for (file, text) in STAND_INS {
        write_script(&place.file(file), text);
    }
}

#[apply(as_root)]
fn starts_of_programs_follow_the_pages() {
    let pages = [
        "intervals.md",
        "pytorch.md",
        "rehearse.md",
        "terminal.md",
        "troubleshooting.md",
    ];
    for page in pages {
        let lines: Vec<String> = lines_of(page)
            .into_iter()
            .filter(|line| starts(line))
            .collect();
        assert!(!lines.is_empty(), "{page}");
        for line in lines {
            let (train, sought) = if line.contains("rehearse") {
                (JOB, "PASS")
            } else {
                (TRAIN, "trained")
            };
            // Each command has a separate folder, because a finished run is not started again.
            let place = Place::new();
            put_stand_ins(&place, train);
            let mut terminal = Terminal::new(place, "");
            terminal.run(&block(&format!("PATH=$PWD:$PATH\n{line}")));
            let said = terminal.screen() + &terminal.place().text("log");
            assert!(said.contains(sought), "{page}: {line}: {said}");
        }
    }
}

#[apply(as_root)]
fn inspection_of_a_run_follows_the_pages() {
    let mut terminal = begun();
    put_stand_ins(terminal.place(), TRAIN);
    terminal.run(&block("ckpt-run snapshot\nPATH=$PWD:$PATH"));
    terminal.run(&block("kill -USR2 %1\nwait %1 || test $? = 75"));
    let pages = [
        "intervals.md",
        "kubernetes.md",
        "events.md",
        "slurm.md",
        "systemd.md",
        "troubleshooting.md",
    ];
    for page in pages {
        let lines: Vec<String> = lines_of(page)
            .into_iter()
            .filter(|line| !starts(line))
            .collect();
        assert!(!lines.is_empty(), "{page}");
        terminal.run(&block(&lines.join("\n")));
    }
    for made in [
        "run.html",
        "Dockerfile",
        "job.yaml",
        "train.sbatch",
        "train.service",
    ] {
        assert!(!terminal.place().text(made).is_empty(), "{made}");
    }
}
