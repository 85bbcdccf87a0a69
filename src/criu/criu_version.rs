//! CRIU's version, as reported by `criu --version`.

use std::fmt;

/// CRIU's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number; 0 if CRIU does not report one.
    pub patch: u32,
}

impl Version {
    /// Parses the line `Version: 4.1.1` in the output of `criu --version`.
    pub(super) fn parse(answer: &str) -> Option<Version> {
        let text = answer
            .lines()
            .find_map(|line| line.trim().strip_prefix("Version:"))?;
        let mut numbers = text.trim().split('.').map(|part| {
            let end = part
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(part.len());
            part[..end].parse().ok()
        });
        let major = numbers.next()??;
        let minor = numbers.next()??;
        let patch = numbers.next().flatten().unwrap_or(0);
        Some(Version {
            major,
            minor,
            patch,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.patch {
            0 => write!(f, "{}.{}", self.major, self.minor),
            patch => write!(f, "{}.{}.{patch}", self.major, self.minor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(major: u32, minor: u32, patch: u32) -> Version {
        Version {
            major,
            minor,
            patch,
        }
    }

    #[test]
    fn version_is_read_from_criu_answers() {
        let cases = [
            ("Version: 4.1.1\n", Some(version(4, 1, 1))),
            ("Version: 4.0\nGitID: v4.0\n", Some(version(4, 0, 0))),
            ("warning\nVersion: 4.2-rc1\n", Some(version(4, 2, 0))),
            ("Version: 4\n", None),
            ("Version: four.1\n", None),
            ("Version: 99999999999.1\n", None),
            ("command not found\n", None),
            ("", None),
        ];
        for (answer, expected) in cases {
            assert_eq!(Version::parse(answer), expected, "{answer:?}");
        }
    }

    #[test]
    fn a_version_is_formatted_like_crius() {
        assert_eq!(version(4, 1, 1).to_string(), "4.1.1");
        assert_eq!(version(4, 0, 0).to_string(), "4.0");
    }
}
