//! Images in object storage.
//!
//! ```text
//! images/…  an object for each image, with its manifest and the names of its packs (`image_object`)
//! packs/…   chunks
//! ```
//! Every object is created once and never changed. `bucket` makes the requests (with the credentials of an
//! `aws_profile`, if there is one), `upload` copies an image of a local
//! store, `download` copies one into a local store, where it can be read at once, `image_verification` reads images and
//! checks them, and `unneeded_objects` finds the objects that no image needs. Images are encrypted if the local store is: the
//! provider sees their sizes. Which images there are is the caller's knowledge.

mod aws_profile;
pub(crate) mod bucket;
mod chunk_check;
pub(crate) mod download;

pub(crate) mod image_object;
pub(crate) mod image_verification;
pub(crate) mod remote_error;
#[cfg(test)]
mod tests;
pub(crate) mod unneeded_objects;
pub(crate) mod upload;
