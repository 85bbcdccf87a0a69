//! Remote store in a folder, and its content.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use serde_json::Value;

use crate::harness::Place;

/// Folder that is a remote store, at a `file://` address.
pub(super) struct RemoteFolder {
    /// The folder belongs to the test's user.
    place: Place,
}

/// Returns a place that other users cannot access.
fn closed() -> Place {
    let place = Place::new();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o700)).unwrap();
    place
}

impl RemoteFolder {
    pub(super) fn new() -> Self {
        Self { place: closed() }
    }

    pub(super) fn url(&self) -> String {
        format!("file://{}", self.place.path().display())
    }

    /// Returns another address of the folder, in which packs become inaccessible by [`View::refuse_packs`].
    pub(super) fn view(&self) -> View {
        let place = closed();
        for folder in ["images", "packs", "state"] {
            fs::create_dir(self.file(folder)).unwrap();
            symlink(self.file(folder), place.file(folder)).unwrap();
        }
        View { place }
    }

    pub(super) fn file(&self, object: &str) -> PathBuf {
        self.place.file(object)
    }

    /// Returns the names of the objects in `images` or `packs`, with the folder. Objects that are being written have
    /// other names.
    pub(super) fn objects(&self, folder: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(self.file(folder)).into_iter().flatten();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let objects = names.filter(|name| !name.contains('#'));
        objects.map(|name| format!("{folder}/{name}")).collect()
    }

    /// Returns the log of the run's state, oldest entry first.
    pub(super) fn entries(&self) -> Vec<Value> {
        let read = |name: &String| {
            let text = fs::read(self.file(name)).unwrap();
            serde_json::from_slice(&text).unwrap()
        };
        self.objects("state").iter().map(read).collect()
    }

    /// Returns the run's state: the newest entry of its log.
    pub(super) fn state(&self) -> Value {
        self.entries().pop().expect("the run has a state")
    }

    /// Returns the object of each image in the run's state, oldest first.
    pub(super) fn images(&self) -> Vec<String> {
        let state = self.state();
        let images = state["images"].as_array().unwrap().iter();
        let object = |image: &Value| image["object"].as_str().unwrap().to_owned();
        images.map(object).collect()
    }

    /// Returns the packs that an image needs.
    pub(super) fn packs_of(&self, image: &str) -> BTreeSet<String> {
        let content = fs::read(self.file(image)).unwrap();
        let list = content.split(|byte| *byte == b'\n').next().unwrap();
        serde_json::from_slice(list).unwrap()
    }
}

/// Folder of links to those of a remote store.
pub(super) struct View {
    place: Place,
}

impl View {
    pub(super) fn url(&self) -> String {
        format!("file://{}", self.place.path().display())
    }

    /// Makes all uploads of packs at this address fail. Everything else works.
    pub(super) fn refuse_packs(&self) {
        fs::remove_file(self.place.file("packs")).unwrap();
        fs::write(self.place.file("packs"), "not a folder").unwrap();
    }
}
