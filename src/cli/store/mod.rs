//! Verbs that read or change a store: list, show, diff, verify, repair, copy, export, pin, forget, prune.

pub(super) mod any_store;
pub(super) mod copy;
pub(super) mod diff;
pub(super) mod export_import;
pub(super) mod forget;
pub(super) mod image_names;
pub(super) mod list;
pub(super) mod pin;
pub(super) mod prune;
pub(super) mod repair;
pub(super) mod show;
mod show_text;
pub(super) mod verify;
