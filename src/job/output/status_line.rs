//! One line of ours at the bottom of a terminal, below what the job has written, while there is something to tell.
//!
//! It is drawn only where the cursor stands on a line of its own, and goes away before any byte of the job's or any other
//! line of ours is written. So the job's lines are whole on the screen, and its next byte stands where it would have
//! stood. A job that moves the cursor about (nested progress bars, editors) has the screen to itself from then on.

use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::super::terminal::{line_end, window};
use super::super::waiting::write_out;
use super::Shared;

/// To the line's start, and everything right of it away.
const ERASE: &str = "\r\x1b[K";

/// What to do when somebody else is writing to the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Wait for the end of that.
    Wait,
    /// Leave it for another time.
    Skip,
}

/// What became of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// It is on the screen.
    Drawn,
    /// There is no place for it now.
    Hidden,
    /// There is nothing to show any more.
    Over,
}

/// A way to show the line. It takes no room and writes nothing until it is used.
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

    /// Shows what `compose` says, as far as it fits; where that is nothing, takes the line away. It is asked when
    /// nobody else can write to the terminal any more, so what it says is not outdated by a later line.
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
        // As with the job's output, a terminal that went away is told nothing.
        let _ = write_out(&self.shared.sink, bytes.as_bytes());
        self.shared.lock().delivering = false;
        self.shared.delivered.notify_all();
        shown
    }
}

/// The width of a terminal whose foreground we are in: in its background we would draw over somebody else's lines.
fn columns(sink: BorrowedFd<'_>) -> Option<usize> {
    let foreground = nix::unistd::tcgetpgrp(sink).ok()?;
    (foreground == nix::unistd::getpgrp()).then_some(())?;
    Some(window(sink)?.ws_col.into())
}

/// The place below what was written to a terminal.
#[derive(Debug, Default)]
pub(super) struct Bottom {
    cursor: Cursor,
    shown: bool,
}

impl Bottom {
    /// These bytes are written next: what must be written before.
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

    /// What shows the text in this many columns; `None` where the cursor is not on a line of its own.
    fn draw(&mut self, text: &str, columns: usize) -> Option<String> {
        if !self.cursor.is_on_own_line() {
            return None;
        }
        self.shown = true;
        // In the last column a terminal may go on to the next line.
        let fits = text.chars().take(columns.saturating_sub(1));
        Some(format!("\r{}\x1b[K", fits.collect::<String>()))
    }
}

/// Where the cursor is, as far as lines are concerned.
#[derive(Debug)]
struct Cursor {
    /// Nothing was written to its line.
    blank: bool,
    /// It is at the line's start.
    first: bool,
    /// The job has moved it by other means than lines.
    moved: bool,
    escape: Escape,
}

/// Where in an escape sequence the bytes are (ECMA-48).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    /// In none.
    Outside,
    /// After ESC.
    Begun,
    /// In a control sequence: ESC [.
    Control,
    /// One more byte: ESC (.
    Charset,
    /// In a title or the like: ESC ].
    Command,
    /// After ESC in one.
    CommandEnds,
}

impl Default for Cursor {
    fn default() -> Self {
        // A shell starts us on a line of our own.
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
            // Colours, and what erases within the line.
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
mod tests;
