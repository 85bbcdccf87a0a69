//! Writing an image: streams are cut into chunks, deduplicated, encoded, packed and committed.

pub(super) mod buffer_pool;
pub(super) mod chunker;
pub(super) mod dedup_index;
pub(super) mod image_writer;
pub(super) mod manifest_builder;
pub(super) mod pack_sink;
pub(super) mod pack_writer;
pub(super) mod pipe_lanes;
pub(super) mod prechunked_stream;
pub(super) mod stream_writer;
pub(super) mod unchanged_chunks;
pub(super) mod work_queue;
pub(super) mod work_times;
pub(super) mod worker;
