//! Escaping of text that other programs control, before it reaches the user's terminal. Command lines, process names
//! and paths come from the job and could hold sequences that move the cursor, set the title or hide text.
//!
//! All output for people passes through this module where it is written, so no message can omit the escaping.

use std::borrow::Cow;
use std::error::Error;
use std::fmt::Write;

use bytesize::ByteSize;

/// Returns an error with its causes, on one line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let more = next.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = next.source();
    }
    text
}

/// Formats a number of bytes, as in `1.5 GiB`.
#[must_use]
pub fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// Terminal control characters to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Line ends and tabs, for text of several lines.
    Lines,
    /// No control characters, for text of one line.
    Nothing,
}

/// Escapes characters that could control a terminal as `\u001b`, which is also valid in JSON.
pub(crate) fn escaped(text: &str, keep: Keep) -> Cow<'_, str> {
    let is_kept = |c: char| keep == Keep::Lines && matches!(c, '\n' | '\t');
    let is_shown = |c: char| !controls(c) || is_kept(c);
    if text.chars().all(is_shown) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        // Writing into a String does not fail.
        let _ = match c {
            _ if is_shown(c) => shown.write_char(c),
            '\n' => shown.write_str("\\n"),
            _ => write!(shown, "\\u{:04x}", u32::from(c)),
        };
    }
    Cow::Owned(shown)
}

/// Returns true for control characters and for characters that change the text direction.
fn controls(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn control_characters_are_shown_as_numbers() {
        for (text, line, lines) in [
            (
                "train.py --name ä",
                "train.py --name ä",
                "train.py --name ä",
            ),
            ("a\u{1b}[2Jb", "a\\u001b[2Jb", "a\\u001b[2Jb"),
            ("a\u{9b}2J", "a\\u009b2J", "a\\u009b2J"),
            ("a\nb\tc\r", "a\\nb\\u0009c\\u000d", "a\nb\tc\\u000d"),
            ("a\u{202e}b", "a\\u202eb", "a\\u202eb"),
        ] {
            assert_eq!(escaped(text, Keep::Nothing), line);
            assert_eq!(escaped(text, Keep::Lines), lines);
        }
    }

    proptest! {
        #[test]
        fn escaped_json_keeps_its_value(text in ".*") {
            let json = serde_json::to_string(&text).unwrap();
            let again: String = serde_json::from_str(&escaped(&json, Keep::Lines)).unwrap();
            prop_assert_eq!(again, text);
        }
    }
}
