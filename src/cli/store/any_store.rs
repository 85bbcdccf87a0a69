//! The store that a verb works on: a folder, or the images of a run in object storage.

use super::image_names::{Life, Summary, find, no_image, number};
use crate::cli::global::{Failure, object_storage, open, shown};
use crate::config::Config;
use crate::remote_run::RemoteImages;
use crate::run::{RunState, read_key};
use crate::store::{ImageEntry, ImageId, Manifest, Store};

/// Store of a verb.
pub(crate) enum AnyStore {
    Folder(Store),
    Remote(RemoteImages),
}

impl AnyStore {
    /// Opens the store that the settings name, with its key.
    pub(crate) fn open(config: &Config) -> Result<Self, Failure> {
        match object_storage(config) {
            None => Ok(Self::Folder(open(config)?)),
            Some(url) => Self::open_remote(config, url),
        }
    }

    /// Opens the images of a run in object storage.
    pub(crate) fn open_remote(config: &Config, url: &str) -> Result<Self, Failure> {
        let key = read_key(&config.encryption)?;
        Ok(Self::Remote(RemoteImages::open(url, key.as_ref())?))
    }

    /// Returns the images, oldest first.
    pub(crate) fn images(&self) -> Result<Vec<ImageEntry>, Failure> {
        Ok(match self {
            Self::Folder(store) => store.images()?,
            Self::Remote(remote) => remote.images()?,
        })
    }

    /// Returns the manifest of an image.
    pub(crate) fn manifest(&self, id: ImageId) -> Result<Manifest, Failure> {
        Ok(match self {
            Self::Folder(store) => store.manifest(id)?,
            Self::Remote(remote) => remote.manifest(id)?,
        })
    }

    /// Finds the image that `name` means: a number, or `latest`.
    pub(crate) fn find(&self, name: &str) -> Result<ImageId, Failure> {
        match self {
            Self::Folder(store) => find(store, name),
            Self::Remote(remote) if name == "latest" => {
                remote.newest()?.ok_or_else(|| no_image(&self.shown()))
            }
            Self::Remote(_) => number(name),
        }
    }

    /// Returns the descriptions of the images, oldest first.
    pub(crate) fn summaries(&self) -> Result<Vec<Summary>, Failure> {
        Ok(match self {
            Self::Folder(store) => {
                // A state that cannot be read is reported by the run that needs it.
                let run = RunState::load(store.path()).ok().flatten();
                let images = store.images()?;
                let summary = |image| Summary::of(image, run.as_ref());
                images.iter().map(summary).collect()
            }
            Self::Remote(remote) => {
                let summary = |(image, is_abandoned): &(ImageEntry, bool)| Summary {
                    life: Some(if *is_abandoned {
                        Life::GivenUp
                    } else {
                        Life::Present
                    }),
                    ..Summary::of(image, None)
                };
                remote.listed()?.iter().map(summary).collect()
            }
        })
    }

    /// Returns the store as messages show it.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Folder(store) => shown(store.path()),
            Self::Remote(remote) => remote.url().to_owned(),
        }
    }
}
