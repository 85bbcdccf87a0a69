//! What the streams of an image hold, by their names.
//!
//! The names are given where the streams are written: `criu/…` and `files/…` in `dump`, `gpu/…` in
//! `resident::facts`.

use serde::Serialize;

/// What a stream of an image holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamKind {
    /// Host memory of the processes, as CRIU reads it.
    Memory,
    /// Device memory that does not go through host memory.
    Gpu,
    /// Files that are kept with their content.
    Files,
    /// What CRIU says of processes, descriptors, sockets.
    State,
}

impl StreamKind {
    /// All of them, in the order of lists.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Gpu, Self::Files, Self::State];

    /// What the stream of this name holds.
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
