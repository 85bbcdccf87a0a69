//! The content of an image's streams, by their names.
//!
//! The names are assigned where the streams are written: `criu/…` in `snapshot::dump`, `files/…` in
//! `snapshot::job_facts`, `gpu/…` in `run::resident_facts`.

use serde::Serialize;

/// The kind of content of a stream in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StreamKind {
    /// Host memory of the processes, as CRIU reads it.
    Memory,
    /// Device memory that does not pass through host memory.
    Gpu,
    /// Files whose content is in the image.
    Files,
    /// CRIU's description of processes, descriptors and sockets.
    State,
}

impl StreamKind {
    /// Every kind, in the order in which lists show them.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Gpu, Self::Files, Self::State];

    /// Returns the kind of the stream with this name.
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

    /// Returns the word for lists.
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
    fn stream_kind_follows_from_the_name() {
        for (name, kind) in [
            ("criu/pages-1.img", StreamKind::Memory),
            ("criu/pagemap-300.img", StreamKind::State),
            ("gpu/300/0/0", StreamKind::Gpu),
            ("gpu/fingerprints", StreamKind::Gpu),
            ("files/0", StreamKind::Files),
            ("pages", StreamKind::State),
        ] {
            assert_eq!(StreamKind::of(name), kind, "{name}");
        }
    }
}
