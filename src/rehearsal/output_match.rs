//! Comparison of one stream of two runs: the first line that differs, or the length up to which they agree.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::PathBuf;

/// Bytes that are compared at a time.
const BLOCK_BYTES: usize = 64 << 10;
/// Maximum length of a quoted line, in bytes.
const QUOTED_BYTES_MAX: u64 = 80;

/// Output of a run to one stream.
#[derive(Clone, Debug)]
pub(super) struct Output {
    pub path: PathBuf,
    /// Number of bytes that the job had written at the end of the run.
    pub length: u64,
    /// True if the job ended by itself, so that it would not have written more.
    pub is_complete: bool,
}

/// Line that differs between two runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LineDifference {
    /// Its number, from 1.
    pub line: u64,
    /// The line in each run; `None` if the output had ended.
    pub texts: [Option<String>; 2],
}

impl fmt::Display for LineDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted = |text: &Option<String>| {
            text.as_ref()
                .map_or_else(|| "nothing".to_owned(), |text| format!("{text:?}"))
        };
        let [one, other] = self.texts.each_ref().map(quoted);
        write!(f, "line {}: {one} and {other}", self.line)
    }
}

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Match {
    /// Number of equal bytes from the beginning.
    pub bytes: u64,
    /// Number of complete equal lines.
    pub lines: u64,
    pub difference: Option<LineDifference>,
}

/// Compares two outputs up to the end of the shorter one. A shorter output that is complete differs from a longer one.
pub(super) fn compare(one: &Output, other: &Output) -> io::Result<Match> {
    let shorter = one.length.min(other.length);
    let mut found = Match {
        bytes: 0,
        lines: 0,
        difference: None,
    };
    let mut line_begin = 0;
    let mut files = [
        File::open(&one.path)?.take(shorter),
        File::open(&other.path)?.take(shorter),
    ];
    let mut blocks = [vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]];
    let mut differs = false;
    while found.bytes < shorter && !differs {
        let wanted = usize::try_from(shorter - found.bytes)
            .map_or(BLOCK_BYTES, |rest| rest.min(BLOCK_BYTES));
        for (file, block) in files.iter_mut().zip(&mut blocks) {
            file.read_exact(&mut block[..wanted])?;
        }
        let [first, second] = &blocks;
        let pairs = first[..wanted].iter().zip(&second[..wanted]);
        let equal = pairs.take_while(|(one, other)| one == other).count();
        for (at, _) in first[..equal]
            .iter()
            .enumerate()
            .filter(|(_, byte)| **byte == b'\n')
        {
            found.lines += 1;
            line_begin = found.bytes + at as u64 + 1;
        }
        found.bytes += equal as u64;
        differs = equal < wanted;
    }
    let ended = |short: &Output, long: &Output| short.is_complete && short.length < long.length;
    if differs || ended(one, other) || ended(other, one) {
        found.difference = Some(LineDifference {
            line: found.lines + 1,
            texts: [line(one, line_begin)?, line(other, line_begin)?],
        });
    }
    Ok(found)
}

/// Counts the complete lines in the first bytes of an output.
pub(super) fn lines_in(output: &Output, bytes: u64) -> io::Result<u64> {
    let mut lines = 0;
    for byte in BufReader::new(File::open(&output.path)?.take(bytes)).bytes() {
        lines += u64::from(byte? == b'\n');
    }
    Ok(lines)
}

fn line(output: &Output, begin: u64) -> io::Result<Option<String>> {
    if begin >= output.length {
        return Ok(None);
    }
    let mut file = File::open(&output.path)?;
    file.seek(SeekFrom::Start(begin))?;
    let mut bytes = Vec::new();
    file.take((output.length - begin).min(QUOTED_BYTES_MAX))
        .read_to_end(&mut bytes)?;
    let line = bytes
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    Ok(Some(String::from_utf8_lossy(line).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(one: (&str, bool), other: (&str, bool)) -> Match {
        let place = tempfile::tempdir().unwrap();
        let output = |name: &str, (text, is_complete): (&str, bool)| {
            let path = place.path().join(name);
            std::fs::write(&path, text).unwrap();
            Output {
                path,
                length: text.len() as u64,
                is_complete,
            }
        };
        compare(&output("one", one), &output("other", other)).unwrap()
    }

    #[test]
    fn outputs_are_equal_up_to_the_end_of_the_shorter_one() {
        let found = compared(("1\n2\n3", false), ("1\n2\n3\n4\n", true));
        assert_eq!((found.bytes, found.lines, found.difference), (5, 2, None));
        let found = compared(("1\n2\n", true), ("1\n2\n", true));
        assert_eq!((found.bytes, found.lines, found.difference), (4, 2, None));
    }

    #[test]
    fn first_differing_line_is_named() {
        let told = |one, other| compared(one, other).difference.map(|it| it.to_string());
        assert_eq!(
            told(("1\n23\n", false), ("1\n24\n5", false)).unwrap(),
            r#"line 2: "23" and "24""#
        );
        assert_eq!(
            told(("1\n", true), ("1\n2\n", false)).unwrap(),
            r#"line 2: nothing and "2""#
        );
        let long = "x".repeat(100_000);
        let found = compared((&(long.clone() + "a"), false), (&(long + "b"), false));
        assert_eq!((found.bytes, found.lines), (100_000, 0));
    }
}
