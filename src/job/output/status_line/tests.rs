//! Tests of the line, by a terminal that is asked what it shows.

use super::*;
use proptest::prelude::*;

/// More rows than a test writes lines, so that nothing scrolls away.
const ROWS: u16 = 120;
const COLUMNS: u16 = 40;

/// A terminal, with or without the translation of `\n`, and what is written to it through a `Bottom`.
struct Terminal {
    parser: vt100::Parser,
    bottom: Bottom,
    raw: bool,
}

impl Terminal {
    fn new(raw: bool) -> Self {
        Self {
            parser: vt100::Parser::new(ROWS.try_into().unwrap(), COLUMNS.try_into().unwrap(), 0),
            bottom: Bottom::default(),
            raw,
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if *byte == b'\n' && !self.raw {
                self.parser.process(b"\r");
            }
            self.parser.process(&[*byte]);
        }
    }

    fn job(&mut self, bytes: &[u8]) {
        let erase = self.bottom.make_way_for(bytes, !self.raw);
        self.write(erase.as_bytes());
        self.write(bytes);
    }

    fn draw(&mut self, text: &str) -> bool {
        let drawn = self.bottom.draw(text, COLUMNS.into());
        if let Some(bytes) = &drawn {
            self.write(bytes.as_bytes());
        }
        drawn.is_some()
    }

    fn erase(&mut self) {
        let erase = self.bottom.erase();
        self.write(erase.as_bytes());
    }

    fn shows(&self) -> String {
        self.parser.screen().contents()
    }
}

#[test]
fn the_line_stands_below_the_jobs_lines_and_leaves_no_trace() {
    for (raw, end) in [(false, "\n"), (true, "\r\n")] {
        let mut terminal = Terminal::new(raw);
        terminal.job(format!("one{end}").as_bytes());
        assert!(terminal.draw("ckpt-run: snapshot: 10 %"));
        assert_eq!(terminal.shows(), "one\nckpt-run: snapshot: 10 %");
        assert!(terminal.draw("ckpt-run: 9 %"));
        assert_eq!(terminal.shows(), "one\nckpt-run: 9 %");
        terminal.job(format!("two{end}").as_bytes());
        assert_eq!(terminal.shows(), "one\ntwo");
        assert!(terminal.draw("ckpt-run: write"));
        terminal.erase();
        assert_eq!(terminal.shows(), "one\ntwo");
        assert_eq!(terminal.parser.screen().cursor_position(), (2, 0));
    }
}

#[test]
fn a_line_that_the_job_has_begun_is_left_alone() {
    for begun in [
        "half",
        "\r 50 %",
        "50 %\r",
        "\n\x1b[31",
        "\x1b]0;title",
        "\t",
    ] {
        let mut terminal = Terminal::new(false);
        terminal.job(b"one\n");
        terminal.job(begun.as_bytes());
        assert!(!terminal.draw("ckpt-run: snapshot"), "{begun:?}");
    }
    let mut terminal = Terminal::new(true);
    // It stands below the end of the line, not at a start.
    terminal.job(b"one\n");
    assert!(!terminal.draw("ckpt-run: snapshot"));
    terminal.job(b"\r");
    assert!(terminal.draw("ckpt-run: snapshot"));
}

#[test]
fn colours_and_titles_are_no_hindrance_but_a_moved_cursor_is_for_good() {
    let mut terminal = Terminal::new(false);
    terminal.job(b"\x1b[1;31mred\x1b(B\x1b[m\x1b[K\n\x1b]0;a title\x07");
    assert!(terminal.draw("ckpt-run: snapshot"));
    terminal.job(b"\x1b]0;another\x1b\\");
    assert!(terminal.draw("ckpt-run: snapshot"));
    for moves in ["\x1b[A", "\x1b[?1049h", "\x1bM", "\x1b7"] {
        let mut terminal = Terminal::new(false);
        terminal.job(b"bar 1\nbar 2\n");
        terminal.job(moves.as_bytes());
        terminal.job(b"done\n");
        assert!(!terminal.draw("ckpt-run: snapshot"), "{moves:?}");
    }
}

#[test]
fn a_text_that_is_too_long_stays_on_its_line() {
    let mut terminal = Terminal::new(false);
    terminal.job(b"one\n");
    assert!(terminal.draw(&"x".repeat(200)));
    terminal.job(b"two\n");
    assert_eq!(terminal.shows(), "one\ntwo");
}

proptest! {
    #[test]
    fn whatever_the_job_writes_its_screen_is_what_it_would_be_without_us(
        raw in any::<bool>(),
        pieces in proptest::collection::vec((
            prop_oneof![
                Just("loss 0.5\n"), Just("loss 0.5\r\n"), Just("\r 42 %"), Just("42 %\r"), Just("\n"), Just("é"),
                Just("\x1b[31mred"), Just("\x1b["), Just("0m"), Just("\x1b[2A"), Just("\t"), Just("\x08"),
                Just("\x1b]0;title\x07"), Just("\x1b[K"),
            ],
            any::<bool>(),
        ), 0..40),
    ) {
        let (mut with, mut without) = (Terminal::new(raw), Terminal::new(raw));
        for (piece, draw) in pieces {
            with.job(piece.as_bytes());
            without.write(piece.as_bytes());
            if draw {
                with.draw("ckpt-run: snapshot: dump, 1.0 GiB of 3.0 GiB, 1.1 GiB/s");
            }
        }
        with.erase();
        prop_assert_eq!(with.shows(), without.shows());
        let cursors = [&with, &without].map(|one| one.parser.screen().cursor_position());
        prop_assert_eq!(cursors[0], cursors[1]);
    }
}
