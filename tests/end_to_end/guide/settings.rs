//! Check of the pages' settings by `ckpt-run config check`.

use std::fs;

use serde_json::Value;

use super::pages;
use crate::harness::{Place, stderr};

/// Returns the reason why settings are refused, with the key present that a page lets its reader create.
fn refused(place: &Place, settings: &str) -> Option<String> {
    if !place.file("key").exists() {
        assert!(place.verb(&["key", "generate", "key"]).status.success());
    }
    let settings = settings.replace("/root/.config/ckpt-run/key", "key");
    fs::write(place.file("page.toml"), settings).unwrap();
    let checked = place.verb(&["config", "check", "page.toml"]);
    (!checked.status.success()).then(|| stderr(&checked))
}

/// Returns true if a block contains settings: its first line is a section's.
fn begins_as_settings(text: &str) -> bool {
    let line = text.lines().next().unwrap_or_default();
    line.starts_with('[') && line.ends_with(']') && !line.contains('"')
}

#[test]
fn every_block_of_settings_is_taken() {
    let place = Place::new();
    let mut count = 0;
    for page in pages::all() {
        for block in &page.blocks {
            let marked = block.has("toml");
            assert!(
                marked || !begins_as_settings(&block.text),
                "{}: settings that are not marked as toml:\n{}",
                page.path.display(),
                block.text
            );
            if marked {
                count += 1;
                let error = refused(&place, &block.text);
                assert_eq!(error, None, "{}:\n{}", page.path.display(), block.text);
            }
        }
    }
    assert!(count >= 3, "{count}");
    let wrong = refused(&place, "[hang]\nheart_beat = \"alive\"\n");
    assert!(wrong.is_some_and(|error| error.contains("heart_beat")));
}

/// Returns `section.key` and the top-level keys.
fn keys(place: &Place) -> Vec<String> {
    let shown = place.verb(&["config", "show", "--json"]);
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    let mut keys = vec![];
    for (name, value) in shown.as_object().unwrap() {
        match value.as_object() {
            Some(section) => keys.extend(section.keys().map(|key| format!("{name}.{key}"))),
            None => keys.push(name.clone()),
        }
    }
    assert!(keys.len() > 40, "{keys:?}");
    keys
}

#[test]
fn every_setting_in_a_sentence_is_taken() {
    let place = Place::new();
    let keys = keys(&place);
    let section = |name: &str| keys.iter().any(|key| key.starts_with(&format!("{name}.")));
    let plain = |text: &str| {
        text.chars()
            .all(|letter| letter == '_' || letter.is_ascii_lowercase())
    };
    for page in pages::all() {
        for span in &page.spans {
            let key = span.split(" = ").next().unwrap_or(span);
            let Some((name, rest)) = key.split_once('.') else {
                continue;
            };
            if !section(name) || !plain(rest) || ["md", "rs", "json", "ndjson"].contains(&rest) {
                continue;
            }
            let path = page.path.display();
            assert!(keys.iter().any(|one| one == key), "{path}: {span}");
            if span.contains(" = ") {
                assert_eq!(refused(&place, span), None, "{path}: {span}");
            }
        }
    }
}
