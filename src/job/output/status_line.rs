//! Status line of ckpt-run at the bottom of a terminal, below the job's output.
//!
//! It is drawn only if the cursor is on an empty line, and erased before the job or ckpt-run writes anything else. So
//! the job's lines stay intact on the screen, and its next byte appears where it would have appeared without the status
//! line. If a job moves the cursor (nested progress bars, editors), the line is not drawn any more.

use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::super::terminal::{line_end, window};
use super::Shared;
use super::write_out;

/// Moves the cursor to the start of the line and erases the line.
const ERASE: &str = "\r\x1b[K";

/// Behavior while another thread writes to the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Wait until the writer has finished.
    Wait,
    /// Do not draw the line this time.
    Skip,
}

/// The result of drawing a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// The line is on the screen.
    Drawn,
    /// The line cannot be shown now.
    Hidden,
    /// The status has ended; the line is removed.
    Over,
}

/// Handle of the status line. It writes nothing until it is used.
#[derive(Debug)]
pub struct StatusLine {
    shared: Arc<Shared>,
}

impl StatusLine {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
        }
    }

    /// Shows the text of `compose`, truncated to the width; removes the line if there is no text. `compose` is called
    /// once no other thread can write to the terminal, so a later line cannot make its text outdated.
    pub fn show(&self, patience: Patience, compose: impl FnOnce() -> Option<String>) -> Shown {
        let mut state = match patience {
            Patience::Wait => self.shared.settled(),
            Patience::Skip => self.shared.lock(),
        };
        if state.delivering {
            return Shown::Hidden;
        }
        let sink = self.shared.sink.as_fd();
        let (bytes, shown) = match compose() {
            None => (state.bottom.erase().to_owned(), Shown::Over),
            Some(text) => match columns(sink).and_then(|columns| state.bottom.draw(&text, columns))
            {
                Some(bytes) => (bytes, Shown::Drawn),
                None => return Shown::Hidden,
            },
        };
        if bytes.is_empty() {
            return shown;
        }
        state.delivering = true;
        drop(state);
        // As for the job's output, a closed terminal is ignored.
        let _ = write_out(&self.shared.sink, bytes.as_bytes());
        self.shared.lock().delivering = false;
        self.shared.delivered.notify_all();
        shown
    }
}

/// Returns the width of a terminal if ckpt-run is in its foreground. In the background, ckpt-run would draw over the
/// lines of other programs.
fn columns(sink: BorrowedFd<'_>) -> Option<usize> {
    let foreground = nix::unistd::tcgetpgrp(sink).ok()?;
    (foreground == nix::unistd::getpgrp()).then_some(())?;
    Some(window(sink)?.ws_col.into())
}

/// The line below the output of a terminal.
#[derive(Debug, Default)]
pub(super) struct Bottom {
    cursor: Cursor,
    shown: bool,
}

impl Bottom {
    /// Records the bytes to be written next. Returns the bytes that must be written before them.
    pub fn make_way(&mut self, sink: BorrowedFd<'_>, bytes: &[u8]) -> &'static [u8] {
        if !sink.is_terminal() {
            return b"";
        }
        let newline_returns = line_end(sink) == "\n";
        self.make_way_for(bytes, newline_returns).as_bytes()
    }

    fn make_way_for(&mut self, bytes: &[u8], newline_returns: bool) -> &'static str {
        self.cursor.pass(bytes, newline_returns);
        self.erase()
    }

    fn erase(&mut self) -> &'static str {
        if std::mem::take(&mut self.shown) {
            ERASE
        } else {
            ""
        }
    }

    /// Returns the bytes that draw the text within this width; `None` if the cursor is not on an empty line.
    fn draw(&mut self, text: &str, columns: usize) -> Option<String> {
        if !self.cursor.is_on_own_line() {
            return None;
        }
        self.shown = true;
        // A terminal may continue on the next line after the last column.
        let fits = text.chars().take(columns.saturating_sub(1));
        Some(format!("\r{}\x1b[K", fits.collect::<String>()))
    }
}

/// The cursor's position relative to the lines.
#[derive(Debug)]
struct Cursor {
    /// True if the cursor's line is empty.
    blank: bool,
    /// True if the cursor is at the start of the line.
    first: bool,
    /// True if the job has moved the cursor other than by writing lines.
    moved: bool,
    escape: Escape,
}

/// Parser state within escape sequences (ECMA-48).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    /// Outside of a sequence.
    Outside,
    /// After ESC.
    Begun,
    /// In a control sequence: ESC [.
    Control,
    /// In a sequence with one more byte: ESC (.
    Charset,
    /// In a title or similar command: ESC ].
    Command,
    /// After ESC in such a command.
    CommandEnds,
}

impl Default for Cursor {
    fn default() -> Self {
        // A shell starts ckpt-run on an empty line.
        Self {
            blank: true,
            first: true,
            moved: false,
            escape: Escape::Outside,
        }
    }
}

impl Cursor {
    fn is_on_own_line(&self) -> bool {
        self.blank && self.first && !self.moved && self.escape == Escape::Outside
    }

    fn pass(&mut self, bytes: &[u8], newline_returns: bool) {
        for byte in bytes {
            self.pass_byte(*byte, newline_returns);
        }
    }

    fn pass_byte(&mut self, byte: u8, newline_returns: bool) {
        self.escape = match (self.escape, byte) {
            (Escape::Outside, 0x1b) => Escape::Begun,
            (Escape::Outside, _) => {
                self.pass_text(byte, newline_returns);
                Escape::Outside
            }
            (Escape::Begun, b'[') | (Escape::Control, b' '..=b'?') => Escape::Control,
            (Escape::Begun, b'(' | b')') => Escape::Charset,
            // Colors, and sequences that erase within the line.
            (Escape::Control, b'm' | b'K') | (Escape::Charset, _) | (Escape::Command, 7) => {
                Escape::Outside
            }
            (Escape::Command, 0x1b) => Escape::CommandEnds,
            (Escape::Begun, b']') | (Escape::Command, _) => Escape::Command,
            (Escape::CommandEnds, b'\\') => Escape::Outside,
            (Escape::Begun | Escape::Control | Escape::CommandEnds, _) => {
                self.moved = true;
                Escape::Outside
            }
        };
    }

    fn pass_text(&mut self, byte: u8, newline_returns: bool) {
        match byte {
            b'\n' => {
                self.blank = true;
                self.first |= newline_returns;
            }
            b'\r' => self.first = true,
            // The bell.
            7 => {}
            _ => {
                self.blank = false;
                self.first = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Tests of the line with a terminal whose screen can be read.

    use super::*;
    use proptest::prelude::*;

    /// Rows of the terminal, more than the lines that a test writes, so that no line scrolls away.
    const ROWS: u16 = 120;
    const COLUMNS: u16 = 40;

    /// A terminal, with or without the translation of `\n`, and the output written to it through a `Bottom`.
    struct Terminal {
        parser: vt100::Parser,
        bottom: Bottom,
        raw: bool,
    }

    impl Terminal {
        fn new(raw: bool) -> Self {
            Self {
                parser: vt100::Parser::new(
                    ROWS.try_into().unwrap(),
                    COLUMNS.try_into().unwrap(),
                    0,
                ),
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
    fn the_line_is_below_the_jobs_lines_and_leaves_no_trace() {
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
    fn an_unfinished_line_of_the_job_is_left_alone() {
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
        // The cursor is below the end of the line, not at its start.
        terminal.job(b"one\n");
        assert!(!terminal.draw("ckpt-run: snapshot"));
        terminal.job(b"\r");
        assert!(terminal.draw("ckpt-run: snapshot"));
    }

    #[test]
    fn only_a_moved_cursor_prevents_the_line() {
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
        fn the_jobs_screen_is_the_same_as_without_the_line(
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
}
