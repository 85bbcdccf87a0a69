//! Kinds of an image's streams, by their names.
//!
//! The names are given where the streams are written: `criu/…` and `files/…` in `dump`, `gpu/…` in
//! `resident::facts`.

use serde::Serialize;

/// Kind of a stream of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamKind {
    /// Host memory of the processes, as CRIU reads it.
    Memory,
    /// Device memory that does not go through host memory.
    Gpu,
    /// Files that are kept with their content.
    Files,
    /// CRIU's data about processes, descriptors, sockets.
    State,
}

impl StreamKind {
    /// Every kind, in the order of lists.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Gpu, Self::Files, Self::State];

    /// Returns the kind of the stream of this name.
    #[must_use]
    pub fn of(stream: &str) -> Self {
        let (folder, name) = stream.split_once('/').unwrap_or(("", stream));
        match folder {
            "gpu" => Self::Gpu,
            "files" => Self::Files,
            _ if name.starts_with("pages-") => Self::Memory,
            _ => Self::State,
        }
    }

    /// The word for lists.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Gpu => "gpu",
            Self::Files => "files",
            Self::State => "state",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_s_name_tells_what_it_holds() {
        for (name, kind) in [
            ("criu/pages-1.img", StreamKind::Memory),
            ("criu/pagemap-300.img", StreamKind::State),
            ("gpu/300/0/0", StreamKind::Gpu),
            ("files/0", StreamKind::Files),
            ("pages", StreamKind::State),
        ] {
            assert_eq!(StreamKind::of(name), kind, "{name}");
        }
    }
}
