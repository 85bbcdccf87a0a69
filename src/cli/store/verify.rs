//! `ckpt-run verify`: reads images again and checks every byte.

use std::process::ExitCode;

use serde::Serialize;

use super::any_store::AnyStore;
use crate::cli::global::{Failure, Global};
use crate::cli::print;
use crate::cli::print::Progress;
use crate::run::{chain, size};
use crate::store::{BadRun, ImageId, ImageReport, Selection, Verdict};

/// Exit code if an image is damaged, or its condition cannot be determined.
const NOT_WHOLE: u8 = 1;

/// The problems of an image, in words. Also the JSON output.
#[derive(Debug, Serialize)]
pub(crate) struct Findings {
    pub(crate) id: ImageId,
    good: bool,
    verdict: &'static str,
    raw_bytes: u64,
    /// The reason why the image was set aside, which does not concern its bytes.
    pub(crate) set_aside: Option<String>,
    /// The reason why its manifest cannot be read.
    manifest: Option<String>,
    /// The problems of its packs.
    packs: Vec<String>,
    streams: Vec<Stream>,
}

#[derive(Debug, Serialize)]
struct Stream {
    name: String,
    runs: Vec<Run>,
}

/// Consecutive chunks, from the first to before the end.
#[derive(Debug, Serialize)]
struct Run {
    first_chunk: usize,
    end_chunk: usize,
    first_byte: u64,
    end_byte: u64,
    pack: String,
    problem: String,
    #[serde(skip)]
    text: String,
}

impl From<&ImageReport> for Findings {
    fn from(report: &ImageReport) -> Self {
        let verdict = report.verdict();
        let streams = report.streams.iter().map(|stream| Stream {
            name: stream.name.clone(),
            runs: stream.runs.iter().map(Run::from).collect(),
        });
        Self {
            id: report.id,
            good: verdict == Verdict::Whole,
            verdict: match verdict {
                Verdict::Whole => "good",
                Verdict::Damaged => "damaged",
                Verdict::Unknown => "unknown",
            },
            raw_bytes: report.raw_bytes,
            set_aside: report.set_aside.clone(),
            manifest: report.manifest.as_ref().map(|error| chain(error)),
            packs: report.packs.iter().map(|error| chain(error)).collect(),
            streams: streams.collect(),
        }
    }
}

impl From<&BadRun> for Run {
    fn from(run: &BadRun) -> Self {
        Self {
            first_chunk: run.chunks.start,
            end_chunk: run.chunks.end,
            first_byte: run.bytes.start,
            end_byte: run.bytes.end,
            pack: run.pack.clone(),
            problem: run.fault.to_string(),
            text: run.to_string(),
        }
    }
}

impl Findings {
    /// Returns every problem, one per line.
    pub(crate) fn problems(&self) -> Vec<String> {
        let streams = self.streams.iter().flat_map(|stream| {
            let text = |run: &Run| format!("{}: {}", stream.name, run.text);
            stream.runs.iter().map(text)
        });
        let manifest = self.manifest.iter().cloned();
        manifest
            .chain(self.packs.iter().cloned())
            .chain(streams)
            .collect()
    }

    fn text(&self) -> String {
        let mut lines = self.problems().into_iter();
        let head = match self.verdict {
            "good" => format!("{} good ({})", self.id, size(self.raw_bytes)),
            verdict => {
                let first = lines.next().unwrap_or_default();
                format!("{} {}: {first}", self.id, verdict.to_uppercase())
            }
        };
        let mark = self.set_aside.iter();
        let mark = mark.map(|reason| format!("set aside: {reason}"));
        let more = lines.chain(mark).map(|line| format!("       {line}\n"));
        format!("{head}\n{}", more.collect::<String>())
    }
}

pub(crate) fn run(global: &Global, names: &[String]) -> Result<ExitCode, Failure> {
    let config = global.load_for_any_store(Vec::new())?.config;
    let store = AnyStore::open(&config)?;
    let named = names
        .iter()
        .map(|name| store.find(name))
        .collect::<Result<Vec<_>, _>>()?;
    let images = match &named[..] {
        [] => Selection::All,
        ids => Selection::These(ids),
    };
    let progress = Progress::new("verify", global, &config);
    let show = |done, total| progress.show(done, total);
    let report = match &store {
        AnyStore::Folder(store) => store.verify_all(images, &show)?,
        AnyStore::Remote(remote) => remote.verify(images, &show)?,
    };
    drop(progress);
    for image in &report.gone {
        print::say(&format!(
            "image {image} was removed while it was being read"
        ));
    }
    let findings: Vec<Findings> = report.images.iter().map(Findings::from).collect();
    if global.json {
        print::print_json(&findings)?;
    } else {
        let lines: Vec<String> = findings.iter().map(Findings::text).collect();
        print::print(&lines.concat())?;
    }
    Ok(if report.is_whole() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(NOT_WHOLE)
    })
}
