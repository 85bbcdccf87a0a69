//! Number of an image, used in file names, commands and logs.
//!
//! This module handles text and numbers only.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Highest number of an image: twelve digits allow three images a second for ten thousand years, and arithmetic without
/// overflow.
const NUMBER_MAX: u64 = 999_999_999_999;

/// Number of an image, starting at 1; not reused while a newer image exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageId(u64);

/// Error for text that is not an image's number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not the number of an image (expected 1 to {NUMBER_MAX}, such as 000012)")]
pub struct ParseImageIdError {
    text: String,
}

impl ImageId {
    /// Number of a store's first image.
    pub(crate) const FIRST: Self = Self(1);

    /// Returns the image with this number if the number is in range.
    #[must_use]
    pub const fn new(number: u64) -> Option<Self> {
        if number >= 1 && number <= NUMBER_MAX {
            Some(Self(number))
        } else {
            None
        }
    }

    /// Returns the plain number.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    /// Returns the following number; `None` after the last.
    pub(crate) const fn next(self) -> Option<Self> {
        Self::new(self.0 + 1)
    }

    /// Parses the form in file names and no other: `000012`, not `12`.
    pub(crate) fn from_file_name(text: &str) -> Option<Self> {
        text.parse().ok().filter(|id: &Self| id.to_string() == text)
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:06}", self.0)
    }
}

impl FromStr for ImageId {
    type Err = ParseImageIdError;

    fn from_str(text: &str) -> Result<Self, ParseImageIdError> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = if digits { text.parse().ok() } else { None };
        number.and_then(Self::new).ok_or_else(|| ParseImageIdError {
            text: text.chars().take(40).collect(),
        })
    }
}

impl TryFrom<String> for ImageId {
    type Error = ParseImageIdError;

    fn try_from(text: String) -> Result<Self, ParseImageIdError> {
        text.parse()
    }
}

impl From<ImageId> for String {
    fn from(id: ImageId) -> Self {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_padded_forms_name_the_same_image() {
        let id: ImageId = "12".parse().unwrap();
        assert_eq!(id, "000012".parse().unwrap());
        assert_eq!(id.to_string(), "000012");
        assert_eq!(serde_json::to_string(&id).unwrap(), "\"000012\"");
        assert_eq!(serde_json::from_str::<ImageId>("\"12\"").unwrap(), id);
    }

    #[test]
    fn other_texts_name_no_image() {
        for text in [
            "",
            "0",
            "+1",
            "-1",
            "1.0",
            "1000000000000",
            "99999999999999999999999",
            "x",
        ] {
            assert!(text.parse::<ImageId>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn file_names_have_one_form_only() {
        assert_eq!(ImageId::from_file_name("000012"), ImageId::new(12));
        assert_eq!(ImageId::from_file_name("1234567"), ImageId::new(1_234_567));
        for text in ["12", "0000012", "+00012", ""] {
            assert_eq!(ImageId::from_file_name(text), None, "{text:?}");
        }
    }
}
