//! Reading an image: its streams, with every chunk checked before any of its bytes is handed out.

pub(super) mod chunk_fetcher;
pub(super) mod image_reader;
pub(super) mod read_ahead;
pub(super) mod stream_reader;
pub(super) mod vmsplice;
