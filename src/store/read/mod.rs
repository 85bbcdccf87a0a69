//! Reading of images: every chunk is checked before any of its bytes is returned.

pub(crate) mod checked_chunks;
pub(super) mod chunk_fetcher;
pub(super) mod image_reader;
pub(super) mod manifest_cache;
pub(crate) mod pending_image;
pub(crate) mod read_ahead;
pub(super) mod stream_reader;
