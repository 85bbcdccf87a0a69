//! JSON form of paths and command-line arguments: text, or a list of bytes if they are not UTF-8. Linux allows every
//! byte but zero in them.
//!
//! Used by serde's attribute `with`: `path_text` for a single value, `path_text::list` for a list.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Arguments of a job's command line. Displayed with spaces between them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CommandLine {
    #[serde(with = "list")]
    words: Vec<OsString>,
}

impl CommandLine {
    /// Returns the arguments.
    #[must_use]
    pub fn words(&self) -> &[OsString] {
        &self.words
    }

    /// Returns the arguments as text, with U+FFFD for bytes that are not UTF-8.
    #[must_use]
    pub fn shown(&self) -> Vec<String> {
        let shown = |word: &OsString| word.to_string_lossy().into_owned();
        self.words.iter().map(shown).collect()
    }
}

impl From<Vec<OsString>> for CommandLine {
    fn from(words: Vec<OsString>) -> Self {
        Self { words }
    }
}

impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown().join(" "))
    }
}

/// JSON form of a path or argument.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Form<'a> {
    Text(Cow<'a, str>),
    Bytes(Cow<'a, [u8]>),
}

impl<'a> Form<'a> {
    fn of(text: &'a OsStr) -> Self {
        match text.to_str() {
            Some(text) => Self::Text(text.into()),
            None => Self::Bytes(text.as_bytes().into()),
        }
    }

    fn into_text<T: From<OsString>>(self) -> T {
        let bytes = match self {
            Self::Text(text) => text.into_owned().into_bytes(),
            Self::Bytes(bytes) => bytes.into_owned(),
        };
        OsString::from_vec(bytes).into()
    }
}

/// Serializes a path or argument.
///
/// # Errors
/// The serializer fails.
pub(crate) fn serialize<S: Serializer>(
    text: &impl AsRef<OsStr>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    Form::of(text.as_ref()).serialize(serializer)
}

/// Deserializes a path or argument.
///
/// # Errors
/// The value is neither text nor a list of bytes.
pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: From<OsString>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Form::deserialize(deserializer)?.into_text())
}

/// JSON form of several paths or arguments.
pub(crate) mod list {
    use super::{Deserialize, Deserializer, Form, OsStr, OsString, Serializer};

    /// Serializes a list.
    ///
    /// # Errors
    /// The serializer fails.
    pub(crate) fn serialize<S: Serializer>(
        list: &[impl AsRef<OsStr>],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(list.iter().map(|text| Form::of(text.as_ref())))
    }

    /// Deserializes a list.
    ///
    /// # Errors
    /// An element is neither text nor a list of bytes.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>, T: From<OsString>>(
        deserializer: D,
    ) -> Result<Vec<T>, D::Error> {
        let list = Vec::<Form<'_>>::deserialize(deserializer)?;
        Ok(list.into_iter().map(Form::into_text).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Line {
        #[serde(with = "super")]
        path: PathBuf,
        #[serde(with = "super::list")]
        words: Vec<OsString>,
    }

    #[test]
    fn text_stays_text_and_other_bytes_are_numbers() {
        let line = Line {
            path: "/a/ü \"".into(),
            words: vec!["-x".into(), OsString::from_vec(b"fran\xe7ais".to_vec())],
        };
        let json = serde_json::to_string(&line).unwrap();
        assert_eq!(
            json,
            r#"{"path":"/a/ü \"","words":["-x",[102,114,97,110,231,97,105,115]]}"#
        );
        for wrong in [r#"{"path":1,"words":[]}"#, r#"{"path":[256],"words":[]}"#] {
            assert!(serde_json::from_str::<Line>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn command_lines_that_are_shown_alike_differ() {
        let line: CommandLine = serde_json::from_str(r#"["sh",[255]]"#).unwrap();
        let shown = CommandLine::from(vec!["sh".into(), "\u{fffd}".into()]);
        assert_eq!(line.to_string(), shown.to_string());
        assert_ne!(line, shown);
        assert_eq!(serde_json::to_string(&line).unwrap(), r#"["sh",[255]]"#);
    }

    proptest! {
        #[test]
        fn any_bytes_round_trip(path: Vec<u8>, words: Vec<Vec<u8>>) {
            let line = Line {
                path: OsString::from_vec(path).into(),
                words: words.into_iter().map(OsString::from_vec).collect(),
            };
            let json = serde_json::to_vec(&line).unwrap();
            prop_assert_eq!(serde_json::from_slice::<Line>(&json).unwrap(), line);
        }
    }
}
