//! The names of images on the command line, and their descriptions in lists.

use serde::Serialize;

use crate::cli::global::{Failure, shown};
use crate::cli::print;
use crate::clock;
use crate::run::{ImageFacts, OURS, RunState};
use crate::store::{ImageEntry, ImageId, Store};

/// An image in a list.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub id: ImageId,
    /// The time of the image in RFC 3339, UTC.
    pub created: String,
    #[serde(skip)]
    pub created_unix_ms: u64,
    pub raw_bytes: u64,
    pub stored_bytes: u64,
    pub freeze_ms: Option<u64>,
    pub trigger: Option<&'static str>,
    /// The reason why the image cannot be restored.
    pub damaged: Option<String>,
    /// True if no rule removes the image.
    pub pinned: bool,
    /// The reason for the pin, if the user gave one.
    pub note: Option<String>,
    /// The run of the image, if the store's current run is known.
    pub life: Option<Life>,
}

/// The run that an image belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Life {
    /// The store's current run, which may continue from the image.
    Present,
    /// The store's current run, which has since been restored from an older image.
    GivenUp,
    /// Another run.
    Another,
}

impl Life {
    fn of(entry: &ImageEntry, run: &RunState) -> Self {
        match run.goes_on_from(entry) {
            true => Self::Present,
            false if run.is_another_than_of(&entry.meta) => Self::Another,
            false => Self::GivenUp,
        }
    }
}

impl Summary {
    pub fn of(entry: &ImageEntry, run: Option<&RunState>) -> Self {
        let facts: Option<ImageFacts> = serde_json::from_slice(&entry.meta).ok();
        Self {
            id: entry.id,
            created: clock::timestamp_of(entry.created_unix_ms).to_string(),
            created_unix_ms: entry.created_unix_ms,
            raw_bytes: entry.raw_bytes,
            stored_bytes: entry.stored_bytes,
            freeze_ms: facts
                .as_ref()
                .map(|facts| milliseconds(facts.freeze_seconds)),
            trigger: facts.as_ref().map(|facts| facts.trigger.as_str()),
            damaged: entry.damaged.clone(),
            pinned: entry.pinned.is_some(),
            note: note(entry),
            life: run
                .filter(|_| facts.is_some())
                .map(|run| Life::of(entry, run)),
        }
    }
}

/// Returns the note that the user gave with the pin, if any.
pub(crate) fn note(entry: &ImageEntry) -> Option<String> {
    entry.pinned.clone().filter(|note| !note.is_empty())
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates; a freeze is not negative"
)]
fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1000.0).round() as u64
}

/// Prints how to continue from an image that was added to a store with another run.
pub(crate) fn tell_other_run(store: &Store, id: ImageId, meta: &[u8]) {
    // A state that cannot be read is reported by the code that needs it.
    if let Ok(Some(state)) = RunState::load(store.path())
        && state.is_another_than_of(meta)
    {
        print::say(&format!(
            "image {id} belongs to another run than the store's current one ({}); to continue from it: ckpt-run --store {} restore {id}",
            state.command,
            shown(store.path())
        ));
    }
}

/// Finds the image that `name` means: a number, or `latest`.
pub(crate) fn find(store: &Store, name: &str) -> Result<ImageId, Failure> {
    if name == "latest" {
        let newest = store
            .images()?
            .into_iter()
            .rfind(|image| image.damaged.is_none());
        let newest = newest.map(|image| image.id);
        return newest.ok_or_else(|| no_image(&shown(store.path())));
    }
    number(name)
}

/// Returns the image with this number.
pub(super) fn number(name: &str) -> Result<ImageId, Failure> {
    name.parse::<ImageId>().map_err(|error| Failure {
        text: format!("{error}, nor `latest`"),
        code: OURS,
    })
}

/// Returns the failure of a search for the newest image.
pub(super) fn no_image(store: &str) -> Failure {
    Failure {
        text: format!("there is no image in {store}"),
        code: OURS,
    }
}
