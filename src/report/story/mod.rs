//! Story of the newest run: the contents of the page, extracted from the event log, limited in size, on one time axis.

use std::collections::VecDeque;

use jiff::Timestamp;
use serde::Serialize;

use super::text::{clean, finite};
use super::told::told;
use crate::history::{Account, Entry, Event, Phase, Summary};
use crate::run::ImageFacts;

/// Maximum number of drawn snapshots: one bar each, three pixels wide on a phone.
const SNAPSHOTS_MAX: usize = 120;
/// Maximum number of rows in the table: as many as a reader scrolls through.
const ROWS_MAX: usize = 200;
/// Maximum number of marks and of spans on the timeline: more would be one bar of colour, and megabytes of page.
const MARKS_MAX: usize = 2000;
/// Maximum number of versions of ckpt-run that are named.
const VERSIONS_MAX: usize = 5;

/// A run. Durations are seconds; places on the axis are seconds since the run began, by the wall clock.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Story {
    /// The job's command line.
    pub command: Vec<String>,
    /// Summary of the run.
    pub summary: Summary,
    /// End of the run and its exit code; null while it runs, or if it was killed.
    pub ended: Option<(String, u8)>,
    /// Length of the axis.
    pub seconds: f64,
    /// Time of the last event.
    pub last: Option<Timestamp>,
    /// Versions of ckpt-run, newest last.
    pub versions: Vec<String>,
    /// The machine, if known.
    pub machine: Option<Machine>,
    /// The newest snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// Events without duration; the newest ones.
    pub marks: Vec<Mark>,
    /// Spans of time; the newest ones.
    pub spans: Vec<Span>,
    /// The newest events, newest first.
    pub rows: Vec<Row>,
    /// Events that the rows leave out.
    pub left_out: usize,
}

/// The machine of the run, by its newest image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Host name.
    pub host: String,
    /// Kernel release.
    pub kernel: String,
    /// CRIU's version.
    pub criu: String,
    /// The NVIDIA driver, for a GPU job.
    pub driver: Option<String>,
    /// GPU models.
    pub gpus: Vec<String>,
}

/// A snapshot.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// Its image.
    pub image: String,
    /// Time at which it was durable.
    pub time: Timestamp,
    /// The reason for taking it.
    pub trigger: String,
    /// Duration of the freeze.
    pub freeze_seconds: f64,
    /// Time from the beginning until it was durable.
    pub durable_seconds: f64,
    /// Size of the image's content.
    pub raw_bytes: u64,
    /// Bytes that it added to the store.
    pub stored_bytes: u64,
    /// Phases of the snapshot, with their durations.
    pub phases: Vec<Phase>,
}

/// Kind of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MarkKind {
    /// An image is durable.
    Snapshot,
    /// A snapshot failed.
    SnapshotFailed,
    /// The job crashed or hung, or its supervisor was killed.
    Crash,
    /// An image became the running job.
    Restore,
}

/// A mark: an event without duration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mark {
    /// Its place on the axis.
    pub at: f64,
    /// Its kind.
    pub kind: MarkKind,
    /// Its description.
    pub text: String,
}

/// State of the job in a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SpanKind {
    /// The job computed.
    Computing,
    /// The job was paused.
    Paused,
    /// The job had crashed and was not restored yet.
    Down,
}

/// A span of time with a state of the job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    /// Its begin on the axis.
    pub from: f64,
    /// Its end.
    pub to: f64,
    /// Its kind.
    pub kind: SpanKind,
}

/// An event of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its time.
    pub time: Timestamp,
    /// The event, in a word or two.
    pub what: &'static str,
    /// Details of the event.
    pub detail: String,
}

impl Machine {
    /// Reads the machine from an image's facts.
    #[must_use]
    pub fn of(facts: &ImageFacts) -> Self {
        let cuda = facts.cuda.as_ref();
        let gpus = cuda.map(|cuda| cuda.gpus.iter());
        let gpus = gpus
            .into_iter()
            .flatten()
            .map(|gpu| match gpu.name.as_str() {
                "" => gpu.uuid.clone(),
                name => name.to_owned(),
            });
        Self {
            host: facts.host.clone(),
            kernel: facts.kernel.clone(),
            criu: facts.criu.clone(),
            driver: cuda.map(|cuda| cuda.driver.clone()),
            gpus: gpus.collect(),
        }
    }
}

impl Story {
    /// Builds the story of the newest run among these entries; `None` if there is no event.
    #[must_use]
    pub fn of(entries: impl IntoIterator<Item = Entry>, machine: Option<Machine>) -> Option<Self> {
        let mut teller = StoryBuilder::default();
        entries.into_iter().for_each(|entry| teller.add(entry));
        teller.end(machine)
    }
}

/// Builder of a story, which reads the log event by event.
#[derive(Default)]
struct StoryBuilder {
    account: Account,
    run: Option<u64>,
    begun: Option<Timestamp>,
    story: Story,
    snapshots: VecDeque<Snapshot>,
    marks: VecDeque<Mark>,
    spans: VecDeque<Span>,
    rows: VecDeque<Row>,
    told: usize,
    /// Present state of the job, and its begin.
    present: Option<(f64, SpanKind)>,
    open: bool,
}

impl StoryBuilder {
    fn add(&mut self, entry: Entry) {
        if self.run != Some(entry.run) {
            // A run that is started from the beginning under the same supervisor was opened before it got its number.
            *self = Self {
                account: std::mem::take(&mut self.account),
                run: Some(entry.run),
                story: Story {
                    command: std::mem::take(&mut self.story.command),
                    versions: std::mem::take(&mut self.story.versions),
                    ..Story::default()
                },
                open: self.open,
                ..Self::default()
            };
        }
        self.account.add(&entry);
        let begun = *self.begun.get_or_insert(entry.time);
        let since = entry.time.duration_since(begun).as_secs_f64();
        // A clock that is set back does not move events back.
        self.story.seconds = self.story.seconds.max(finite(since));
        self.story.last = Some(entry.time);
        if let Some((what, detail)) = told(&entry.event) {
            self.told += 1;
            let detail = clean(&detail);
            keep(
                &mut self.rows,
                Row {
                    time: entry.time,
                    what,
                    detail,
                },
                ROWS_MAX,
            );
        }
        self.place(entry);
    }

    /// Places an entry on the axis.
    fn place(&mut self, entry: Entry) {
        match entry.event {
            Event::Opened {
                version, command, ..
            } => self.opened(&clean(&version), command),
            Event::Started { .. } | Event::Unpaused { .. } => self.turn(Some(SpanKind::Computing)),
            Event::Snapshot {
                image,
                trigger,
                freeze_seconds,
                durable_seconds,
                raw_bytes,
                stored_bytes,
                phases,
            } => {
                self.mark(MarkKind::Snapshot, &format!("snapshot {image}"));
                let phases = phases.into_iter().map(|phase| Phase {
                    seconds: finite(phase.seconds),
                    ..phase
                });
                let snapshot = Snapshot {
                    image: clean(&image),
                    time: entry.time,
                    trigger: clean(&trigger),
                    freeze_seconds: finite(freeze_seconds),
                    durable_seconds: finite(durable_seconds),
                    raw_bytes,
                    stored_bytes,
                    phases: phases.collect(),
                };
                keep(&mut self.snapshots, snapshot, SNAPSHOTS_MAX);
            }
            Event::SnapshotFailed { kind, .. } if kind == "ended" => {}
            Event::SnapshotFailed { kind, .. } => {
                self.mark(
                    MarkKind::SnapshotFailed,
                    &format!("snapshot failed: {kind}"),
                );
            }
            Event::Crashed { how, .. } => {
                self.turn(Some(SpanKind::Down));
                self.mark(MarkKind::Crash, &format!("crash: {how}"));
            }
            Event::Hung { reason, .. } => self.mark(MarkKind::Crash, &format!("hung: {reason}")),
            Event::Restored { image, .. } => {
                self.turn(Some(SpanKind::Computing));
                self.mark(MarkKind::Restore, &format!("restored from {image}"));
            }
            Event::Paused { .. } => self.turn(Some(SpanKind::Paused)),
            Event::Ended { how, code } => {
                self.turn(None);
                self.open = false;
                self.story.ended = Some((clean(&how), code));
            }
            Event::SnapshotBegan { .. }
            | Event::Computing { .. }
            | Event::RestoreBegan { .. }
            | Event::RestoreFailed { .. }
            | Event::Interval { .. }
            | Event::Hook { .. }
            | Event::Preempted { .. }
            | Event::Unknown => {}
        }
    }

    fn opened(&mut self, version: &str, command: Vec<String>) {
        if self.open {
            // The previous supervisor logged no end, so it was killed. The time is unknown; the last span ends here.
            self.turn(Some(SpanKind::Down));
            self.mark(MarkKind::Crash, "ckpt-run had been killed");
        }
        self.open = true;
        self.story.ended = None;
        self.story.command = command;
        let versions = &mut self.story.versions;
        versions.retain(|known| known != version);
        versions.push(version.to_owned());
        if versions.len() > VERSIONS_MAX {
            versions.remove(0);
        }
    }

    /// Ends the present span and begins another one.
    fn turn(&mut self, kind: Option<SpanKind>) {
        let now = self.story.seconds;
        if let Some((from, kind)) = self.present.take() {
            keep(
                &mut self.spans,
                Span {
                    from,
                    to: now,
                    kind,
                },
                MARKS_MAX,
            );
        }
        self.present = kind.map(|kind| (now, kind));
    }

    fn mark(&mut self, kind: MarkKind, text: &str) {
        let at = self.story.seconds;
        keep(
            &mut self.marks,
            Mark {
                at,
                kind,
                text: clean(text),
            },
            MARKS_MAX,
        );
    }

    fn end(mut self, machine: Option<Machine>) -> Option<Story> {
        self.run?;
        self.turn(None);
        let rows = self.rows.into_iter().rev().collect::<Vec<_>>();
        Some(Story {
            summary: self.account.summary_then(),
            machine,
            snapshots: self.snapshots.into(),
            marks: self.marks.into(),
            spans: self.spans.into(),
            left_out: self.told - rows.len(),
            rows,
            ..self.story
        })
    }
}

/// Appends an item and keeps only the newest `most` ones.
fn keep<T>(list: &mut VecDeque<T>, item: T, most: usize) {
    if list.len() == most {
        list.pop_front();
    }
    list.push_back(item);
}

#[cfg(test)]
pub(super) mod tests;
