//! The HTML page of a report.

use std::collections::BTreeMap;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::bars::{Column, Unit, chart};
use super::story::{Machine, Snapshot, SpanKind, Story};
use super::text::{clean, command, utc};
use super::timeline::{named, timeline};
use crate::history::{counted, percent, time_in_words};
use crate::run::size;

const STYLE: &str = include_str!("style.css");
/// Content security policy: no script and no other host, regardless of the contents of the job's strings.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";
/// CSS classes of the phases with a colour each; the shorter phases share the last one.
const PHASES: [&str; 8] = ["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7"];

/// Renders the story as a page of HTML.
#[must_use]
pub fn page(story: &Story) -> String {
    let line = command(&story.command);
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "ckpt-run: " (line) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    h1 { "A run under ckpt-run" }
                    p.command { code { (line) } }
                    p.muted { (state(story)) }
                    (headline(story))
                    (time(story))
                    (snapshots(story))
                    (events(story))
                    (machine(story))
                }
            }
        }
    };
    markup.into_string()
}

fn state(story: &Story) -> String {
    let begun = story
        .summary
        .begun
        .map(|time| format!("begun {} UTC, ", utc(time)));
    let last = story
        .last
        .map_or_else(String::new, |time| format!("{} UTC", utc(time)));
    let end = match &story.ended {
        Some((how, code)) => format!("ended {last} ({how}, exit code {code})"),
        None => format!("not ended at the time of this report; last event {last}"),
    };
    format!("{}{end}", begun.unwrap_or_default())
}

fn headline(story: &Story) -> Markup {
    let run = &story.summary;
    let failed = |count: u64| (count > 0).then(|| format!("{count} more failed"));
    let survived = run.survived + run.outages;
    let kills =
        (run.outages > 0).then(|| format!("{} of them were kills of ckpt-run", run.outages));
    let share =
        (run.freeze_seconds > 0.0).then(|| format!("{} of the time", percent(run.freeze_share())));
    let tiles = [
        ("ran", time_in_words(run.run_seconds), None),
        (
            "snapshots",
            run.snapshots.to_string(),
            failed(run.failed_snapshots),
        ),
        ("frozen in total", time_in_words(run.freeze_seconds), share),
        (
            "crashes survived",
            format!("{survived} of {}", run.crashes + run.outages),
            kills,
        ),
        (
            "work lost",
            time_in_words(run.lost_seconds),
            Some("repeated after restores".to_owned()),
        ),
        (
            "work saved",
            time_in_words(run.saved_seconds),
            Some("in the image restored last".to_owned()),
        ),
    ];
    html! {
        div.tiles {
            @for (name, value, more) in tiles {
                div.tile {
                    div.muted { (name) }
                    div.value { (value) }
                    @if let Some(more) = more { div.muted.small { (more) } }
                }
            }
        }
    }
}

fn time(story: &Story) -> Markup {
    let kinds = [SpanKind::Computing, SpanKind::Paused, SpanKind::Down];
    let shown = kinds
        .into_iter()
        .filter(|kind| story.spans.iter().any(|span| span.kind == *kind));
    html! {
        section {
            h2 { "Timeline" }
            ul.legend {
                @for (class, name) in shown.map(named) { (key(class, name)) }
            }
            (timeline(story))
        }
    }
}

fn key(class: &str, name: &str) -> Markup {
    html! { li { svg.key width="10" height="10" aria-hidden="true" { rect class=(class) width="10" height="10" {} } " " (name) } }
}

fn snapshots(story: &Story) -> Markup {
    let (shown, all) = (story.snapshots.len(), story.summary.snapshots);
    let newest = (shown as u64) < all;
    html! {
        section {
            h2 { "Snapshots" }
            @if shown == 0 {
                p.muted { "none yet" }
            } @else {
                @if newest { p.muted { "the newest " (shown) " of " (all) } }
                (freezes(&story.snapshots))
                (sizes(&story.snapshots))
                (phases(&story.snapshots))
            }
        }
    }
}

fn column(one: &Snapshot, parts: Vec<(&'static str, f64)>, nested: bool, more: &str) -> Column {
    Column {
        label: one.image.clone(),
        hint: format!(
            "{} ({}), {} UTC: {more}",
            one.image,
            one.trigger,
            utc(one.time)
        ),
        parts,
        nested,
    }
}

fn freezes(list: &[Snapshot]) -> Markup {
    let columns: Vec<Column> = list
        .iter()
        .map(|one| {
            let (freeze, durable) = (one.freeze_seconds, one.durable_seconds);
            let more = format!(
                "frozen {}, durable after {}",
                time_in_words(freeze),
                time_in_words(durable)
            );
            column(
                one,
                vec![("b-durable", durable), ("b-freeze", freeze)],
                true,
                &more,
            )
        })
        .collect();
    html! {
        h3 { "Frozen, and until durable" }
        ul.legend { (key("b-freeze", "the job was frozen")) (key("b-durable", "from the beginning until the image was durable")) }
        (chart("Freeze and time until durable of each snapshot", Unit::Seconds, &columns))
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a pixel is far more than a byte"
)]
fn sizes(list: &[Snapshot]) -> Markup {
    let columns: Vec<Column> = list
        .iter()
        .map(|one| {
            let more = format!(
                "{}, {} new in the store",
                size(one.raw_bytes),
                size(one.stored_bytes)
            );
            let parts = vec![
                ("b-raw", one.raw_bytes as f64),
                ("b-stored", one.stored_bytes as f64),
            ];
            column(one, parts, true, &more)
        })
        .collect();
    html! {
        h3 { "Images" }
        ul.legend { (key("b-stored", "new in the store")) (key("b-raw", "content of the image")) }
        (chart("Size of each image", Unit::Bytes, &columns))
    }
}

fn phases(list: &[Snapshot]) -> Markup {
    let named = colours(list);
    let class = |name: &str| {
        named
            .iter()
            .find(|(known, _)| *known == name)
            .map_or(PHASES[7], |(_, class)| *class)
    };
    let columns: Vec<Column> = list
        .iter()
        .map(|one| {
            let spent: Vec<String> = one
                .phases
                .iter()
                .map(|phase| format!("{} {}", clean(&phase.name), time_in_words(phase.seconds)))
                .collect();
            let parts = one
                .phases
                .iter()
                .map(|phase| (class(&phase.name), phase.seconds));
            column(one, parts.collect(), false, &spent.join(", "))
        })
        .collect();
    let others = list
        .iter()
        .flat_map(|one| &one.phases)
        .any(|phase| class(&phase.name) == PHASES[7]);
    html! {
        h3 { "Phases of the time" }
        ul.legend {
            @for (name, class) in &named { (key(class, &clean(name))) }
            @if others { (key(PHASES[7], "others")) }
        }
        (chart("Phases of each snapshot", Unit::Seconds, &columns))
    }
}

/// Assigns the colours: the longest phases get one each.
fn colours(list: &[Snapshot]) -> Vec<(&str, &'static str)> {
    let mut spent: BTreeMap<&str, f64> = BTreeMap::new();
    for phase in list.iter().flat_map(|one| &one.phases) {
        *spent.entry(&phase.name).or_default() += phase.seconds;
    }
    let mut spent: Vec<(&str, f64)> = spent.into_iter().collect();
    spent.sort_by(|one, other| other.1.total_cmp(&one.1));
    let names = spent.into_iter().map(|(name, _)| name);
    names
        .zip(PHASES.into_iter().take(PHASES.len() - 1))
        .collect()
}

fn events(story: &Story) -> Markup {
    html! {
        section {
            h2 { "Events" }
            @if story.left_out > 0 {
                p.muted { "the newest " (story.rows.len()) "; " (story.left_out) " older ones are in the event log" }
            }
            div.scroll {
                table {
                    thead { tr { th { "UTC" } th { "event" } th { "more" } } }
                    tbody {
                        @for row in &story.rows {
                            tr {
                                td.time { (utc(row.time)) }
                                td { (row.what) }
                                td.detail { (row.detail) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn machine(story: &Story) -> Markup {
    let versions = story.versions.join(", ");
    let mut rows = vec![("ckpt-run", versions)];
    if let Some(Machine {
        host,
        kernel,
        criu,
        driver,
        gpus,
    }) = &story.machine
    {
        rows.extend([
            ("host", clean(host)),
            ("Linux", clean(kernel)),
            ("CRIU", clean(criu)),
        ]);
        rows.extend(
            driver
                .as_ref()
                .map(|driver| ("NVIDIA driver", clean(driver))),
        );
        rows.extend((!gpus.is_empty()).then(|| {
            let models = clean(&gpus.join(", "));
            (
                "GPUs",
                format!("{}: {models}", counted(gpus.len() as u64, "GPU")),
            )
        }));
    }
    html! {
        section {
            h2 { "Machine and versions" }
            dl { @for (name, value) in rows { dt { (name) } dd { (value) } } }
            @if story.machine.is_none() { p.muted { "No image describes the machine." } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::story::tests::{log, opened, snapshot};
    use super::*;
    use crate::history::Event;

    const HOSTILE: &str =
        r#"</title></code><script>alert(1)</script><img src=x onerror="alert(2)">&'"`javascript:"#;

    fn hostile() -> Story {
        let hostile = || HOSTILE.to_owned();
        let machine = Machine {
            host: hostile(),
            kernel: hostile(),
            criu: hostile(),
            driver: Some(hostile()),
            gpus: vec![hostile()],
        };
        let mut bad = snapshot(2);
        if let Event::Snapshot {
            image,
            trigger,
            phases,
            ..
        } = &mut bad
        {
            (*image, *trigger) = (hostile(), hostile());
            phases[0].name = hostile();
        }
        let failed = |kind: &str| Event::SnapshotFailed {
            kind: kind.to_owned(),
            reason: hostile(),
            job_goes_on: true,
        };
        let crashed = Event::Crashed {
            code: 1,
            how: hostile(),
            lost_seconds: f64::MAX,
        };
        let ended = Event::Ended {
            how: hostile(),
            code: 1,
        };
        let events = [
            (0.0, opened(&["python", HOSTILE, "\u{202e}\u{0}"])),
            (1.0, bad),
            (2.0, failed(HOSTILE)),
            (3.0, crashed),
            (4.0, ended),
        ];
        Story::of(log(&events), Some(machine)).unwrap()
    }

    #[test]
    fn no_string_of_the_jobs_becomes_markup() {
        let text = page(&hostile());
        assert!(
            !text.contains("<script") && !text.contains("<img"),
            "{text}"
        );
        assert_eq!(text.matches("</title></code>").count(), 0);
        assert!(text.matches("&lt;script&gt;").count() >= 10, "it is shown");
        assert!(!text.contains('\u{202e}') && !text.contains('\u{0}'));
        for tag in text
            .split('<')
            .skip(1)
            .map(|rest| rest.split('>').next().unwrap())
        {
            assert!(
                !tag.contains("onerror=\"") && !tag.starts_with("img"),
                "{tag}"
            );
        }
    }

    #[test]
    fn the_page_asks_for_nothing_from_anywhere() {
        let text = page(&hostile()).replace(&HOSTILE.replace('<', "&lt;"), "");
        assert!(text.contains("default-src 'none'"));
        for word in ["http://", "https://", "@import", "url(", "<link", "src=\""] {
            assert!(!text.contains(word), "{word}");
        }
    }

    #[test]
    fn extreme_values_in_the_log_stay_finite_numbers() {
        let text = page(&hostile());
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn a_run_without_snapshots_is_a_page_too() {
        let story = Story::of(log(&[(0.0, opened(&["train"]))]), None).unwrap();
        let text = page(&story);
        assert!(
            text.contains("none yet") && text.contains("0 of 0"),
            "{text}"
        );
        assert!(text.contains("No image describes the machine."));
    }

    #[test]
    fn headline_summarizes_the_run() {
        let mut story =
            Story::of(log(&[(0.0, opened(&["train"])), (9.0, snapshot(1))]), None).unwrap();
        story.summary.freeze_seconds = 0.9;
        story.summary.run_seconds = 90.0;
        let text = page(&story);
        for part in [
            "1 min 30 s",
            "0.90 s",
            "1.0 % of the time",
            "ckpt-run: train",
            "1.2.3",
        ] {
            assert!(text.contains(part), "{part}");
        }
    }
}
