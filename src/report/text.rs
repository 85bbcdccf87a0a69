//! Conversion of strings and numbers for display.

use jiff::Timestamp;

/// Maximum length of a displayed command line or reason; more would not help a reader.
const CHARS_MAX: usize = 1000;
/// Maximum displayed duration, far beyond any run: a larger value comes from a damaged log and would overflow charts.
const SECONDS_MAX: f64 = 1e9;

/// Replaces characters that control a display or change the direction of the following text, and limits the length.
pub(super) fn clean(text: &str) -> String {
    let visible = |c: char| match c {
        '\n' | '\t' => ' ',
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}' => '\u{fffd}',
        c if c.is_control() => '\u{fffd}',
        c => c,
    };
    let mut shown: String = text.chars().take(CHARS_MAX).map(visible).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        shown.push('…');
    }
    shown
}

/// Formats a command line as one line.
pub(super) fn command(words: &[String]) -> String {
    clean(&words.join(" "))
}

/// Returns a duration that can be drawn.
pub(super) fn finite(seconds: f64) -> f64 {
    if seconds.is_finite() {
        seconds.clamp(0.0, SECONDS_MAX)
    } else {
        0.0
    }
}

/// Formats a time: `2026-11-21 10:15:03`, UTC.
pub(super) fn utc(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misleading_characters_are_removed() {
        assert_eq!(
            clean("a\u{1b}[31m\u{202e}b\nc\0"),
            "a\u{fffd}[31m\u{fffd}b c\u{fffd}"
        );
        assert_eq!(clean(&"x".repeat(5000)).chars().count(), CHARS_MAX + 1);
    }

    #[test]
    fn no_number_breaks_a_chart() {
        for (given, shown) in [
            (f64::NAN, 0.0),
            (-1.0, 0.0),
            (1e300, SECONDS_MAX),
            (2.5, 2.5),
        ] {
            assert!((finite(given) - shown).abs() < 1e-9, "{given}");
        }
    }
}
