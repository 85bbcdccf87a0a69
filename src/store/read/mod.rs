//! Reading of images: every chunk is checked before any of its bytes is returned.

pub(super) mod chunk_fetcher;
pub(super) mod image_reader;
pub(super) mod read_ahead;
pub(super) mod stream_reader;
pub(super) mod vmsplice;
