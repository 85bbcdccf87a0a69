//! Durations, sizes and exit statuses in text form: parsing and printing.
//!
//! Every printed text parses to the same value.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bytesize::ByteSize;
use jiff::fmt::friendly::{SpanParser, SpanPrinter};
use nix::sys::signal::Signal;

use super::Invalid;

/// Units of [`format_size`], largest first.
const SIZE_UNITS: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

/// Parses a duration with units, "1h 30m".
pub(crate) fn parse_duration(text: &str) -> Result<Duration, Invalid> {
    let text = text.trim();
    if is_bare_number(text) {
        return Err(no_unit(text, "s"));
    }
    SpanParser::new()
        .parse_unsigned_duration(text)
        .map_err(|_| not(text, "a duration such as \"90s\" or \"1h 30m\""))
}

/// Formats a duration in its shortest form.
pub(super) fn format_duration(duration: Duration) -> String {
    SpanPrinter::new().unsigned_duration_to_string(&duration)
}

/// Parses a size with a unit; returns bytes.
pub(super) fn parse_size(text: &str) -> Result<u64, Invalid> {
    let text = text.trim();
    if is_bare_number(text) {
        return Err(no_unit(text, "MiB"));
    }
    text.parse::<ByteSize>()
        .map(|size| size.as_u64())
        .map_err(|_| not(text, "a size such as \"512MiB\" or \"8GiB\""))
}

/// Formats a size in the largest unit that divides it.
pub(super) fn format_size(bytes: u64) -> String {
    let fitting = SIZE_UNITS
        .iter()
        .find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit));
    match fitting {
        Some((name, unit)) => format!("{}{name}", bytes / unit),
        None => format!("{bytes}B"),
    }
}

/// Parses "1%" as 0.01.
pub(super) fn parse_percent(text: &str) -> Result<f64, Invalid> {
    let number = text.trim().strip_suffix('%');
    let percent = number.and_then(|number| number.trim().parse::<f64>().ok());
    percent
        .filter(|percent| percent.is_finite())
        .map(|percent| percent / 100.0)
        .ok_or_else(|| not(text, "a percentage such as \"1%\""))
}

/// Formats 0.01 as "1%", with as many digits as needed.
pub(crate) fn format_percent(share: f64) -> String {
    // A number divided by 100 does not always multiply back exactly; no user writes more digits.
    let rounded = (share * 100.0 * 1e9).round() / 1e9;
    format!("{rounded}%")
}

/// The exit status of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExitStatus {
    /// The job exited with this code.
    Exited(u8),
    /// A signal of this number killed it.
    Signaled(i32),
}

impl ExitStatus {
    /// Returns the exit code that reports the same to ckpt-run's parent: 128+n for signal n.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Exited(code) => code,
            Self::Signaled(number) => {
                u8::try_from(number).map_or(u8::MAX, |number| number.saturating_add(128))
            }
        }
    }

    /// Returns true if the job reports success.
    #[must_use]
    pub fn is_success(self) -> bool {
        self == Self::Exited(0)
    }
}

impl fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Signaled(number) => match Signal::try_from(*number) {
                Ok(signal) => f.write_str(signal.as_str()),
                Err(_) => write!(f, "signal {number}"),
            },
        }
    }
}

impl FromStr for ExitStatus {
    type Err = Invalid;

    /// Parses an exit code or a signal's name.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        if let Ok(code) = text.parse::<u8>() {
            return Ok(Self::Exited(code));
        }
        text.parse::<Signal>()
            .map(|signal| Self::Signaled(signal as i32))
            .map_err(|_| not(text, "an exit code (0 to 255) or a signal such as SIGILL"))
    }
}

/// Returns the text as a message quotes it: never longer than a line.
pub(super) fn shown(text: &str) -> String {
    const CHARACTERS_MAX: usize = 60;
    let mut kept: String = text.chars().take(CHARACTERS_MAX).collect();
    if kept.len() < text.len() {
        kept.push('…');
    }
    kept
}

/// Returns true for a number with nothing after it, signed or not.
fn is_bare_number(text: &str) -> bool {
    text.parse::<f64>().is_ok_and(f64::is_finite)
}

/// Returns the refusal of text that has another form.
pub(super) fn not(text: &str, expected: &'static str) -> Invalid {
    Invalid::Form {
        given: shown(text),
        expected,
    }
}

fn no_unit(text: &str, unit: &'static str) -> Invalid {
    Invalid::NoUnit {
        given: shown(text),
        unit,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn printed_durations_parse_to_themselves(ms in 0..=86_400_000_u64 * 366) {
            let duration = Duration::from_millis(ms);
            prop_assert_eq!(parse_duration(&format_duration(duration)).unwrap(), duration);
        }

        #[test]
        fn printed_sizes_parse_to_themselves(bytes: u64, shift in 0..64_u32) {
            let bytes = bytes >> shift << (shift / 2);
            prop_assert_eq!(parse_size(&format_size(bytes)).unwrap(), bytes);
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text in "\\PC*") {
            let _ = (parse_duration(&text), parse_size(&text), text.parse::<ExitStatus>());
        }
    }

    #[test]
    fn durations_take_the_ways_people_write_them() {
        for (text, seconds) in [
            ("15m", 900),
            ("1h 30m", 5400),
            ("1h30m", 5400),
            ("90 seconds", 90),
            (" 0s ", 0),
        ] {
            let parsed = parse_duration(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(parsed, Duration::from_secs(seconds), "{text}");
        }
    }

    #[test]
    fn bare_numbers_ask_for_a_unit() {
        assert_eq!(
            parse_duration("15").unwrap_err().to_string(),
            "15 has no unit; write for example \"15s\""
        );
        assert!(matches!(parse_size("1.5"), Err(Invalid::NoUnit { .. })));
        assert!(matches!(parse_duration("-3"), Err(Invalid::NoUnit { .. })));
    }

    #[test]
    fn negative_and_misspelt_values_are_refused() {
        for text in [
            "-15m",
            "15m ago",
            "15x",
            "",
            "m",
            "1 fortnight",
            "9999999999999999h",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        for text in ["", "GiB", "8 gigs", "-8GiB", "8GiBs"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        for text in ["256", "-1", "ILL", "SIGNAL", ""] {
            assert!(text.parse::<ExitStatus>().is_err(), "{text}");
        }
    }

    #[test]
    fn exit_statuses_read_both_ways() {
        for (text, status) in [
            ("0", ExitStatus::Exited(0)),
            ("255", ExitStatus::Exited(255)),
            ("SIGILL", ExitStatus::Signaled(4)),
        ] {
            assert_eq!(text.parse::<ExitStatus>().unwrap(), status);
        }
        assert_eq!(ExitStatus::Signaled(4).to_string(), "SIGILL");
        assert_eq!(ExitStatus::Signaled(40).to_string(), "signal 40");
    }

    #[test]
    fn quoted_text_is_cut() {
        let long = "ä".repeat(1000);
        assert_eq!(shown(&long).chars().count(), 61);
        assert_eq!(shown("short"), "short");
    }
}
