//! Format on disk: names, headers, chunks, packs and manifests, and their encoding, encryption and checks.

pub(super) mod chunk;
pub(super) mod cipher;
pub(super) mod codec;
pub(super) mod file_names;
pub(super) mod image_id;
pub(super) mod manifest;
pub(super) mod manifest_file;
pub(super) mod pack;
pub(super) mod store_folder;
pub(super) mod store_key;

/// Format written by this version.
pub(crate) const FORMAT: u32 = 2;
