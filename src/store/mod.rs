//! The image store: a folder that holds the snapshots of one job.
//!
//! ```text
//! format                   "ckpt-run store 2"
//! key-check                check of an encrypted store's key
//! lock                     flocked by the writing process; names that process
//! images/000012.manifest   content of image 12; its rename is the commit
//! images/000012.damaged    reason why image 12 must not be restored
//! images/000012.pinned     note of a pin; no rule removes image 12
//! packs/000012-00.pack     compressed chunks that image 12 added
//! ```
//! Other files in the folder are ignored, except those whose names begin with `.tmp-`, which a sweep removes. The
//! folder has mode 0700 and its files 0600, because images contain every secret in the job's memory.
//!
//! An image is a set of named streams. A stream is cut by its content into chunks of 16 to 256 KiB, at borders of 4 KiB
//! pages. The name of a chunk is the BLAKE3 hash of its bytes. Chunks of zeros are only counted, and chunks of the
//! newest images are not written again. The others are compressed if a sample shows a sufficient saving.
//!
//! ```text
//! begin ─▶ streams fill buffers ─▶ workers: cut, hash, look up, compress, append to packs
//!       ─▶ packs synced ─▶ manifest written, synced, renamed ─▶ folder synced
//! ```
//! A visible image is therefore whole and durable, and a crash at any point leaves the older images intact. `format`
//! documents the formats of [manifests](Manifest) and packs; each file contains its format and the lowest format that a
//! reader must support. A store of a newer format is read if possible, and never written.
//!
//! A store created with a [`Key`] is encrypted: names of chunks are keyed hashes, and chunks (after compression) and
//! both parts of a manifest are sealed (`format/cipher`). The following is not encrypted: file names, which number
//! images and packs; lengths and times of files; headers, which repeat the names; reasons in `.damaged`, which name a
//! stream and an offset; and notes in `.pinned`. A process with write access to the store can remove an image or
//! replace it by an older one, but cannot forge one.
//!
//! `write` creates images, `read` reads them, `maintain` lists, removes, verifies, repairs and copies them, `portable`
//! exports an image to a file and imports it, `remote` copies images to object storage and back, and `fs` is the only code that changes the disk. All calls block and use
//! plain threads; the origin of the streams is irrelevant here.

mod byte_counter;
mod error;
pub(crate) mod format;
pub(crate) mod fs;
pub(crate) mod maintain;
mod portable;
pub(crate) mod read;
pub(crate) mod remote;
#[cfg(any(fuzzing, test))]
pub(crate) mod tests;
pub(crate) mod write;

pub use byte_counter::ByteCounter;
pub use error::{ReadError, WriteError};
pub use format::chunk::{CHUNK_BYTES, Hash};
pub(crate) use format::cipher::Secrets;
pub use format::codec::{Codec, Decoder, Encoder};
pub use format::file_names::ListError;
pub use format::image_id::{ImageId, ParseImageIdError};
pub use format::manifest::{
    Chunk, Content, InvalidManifest, Manifest, Stored, Stream, is_stream_name,
};
pub use format::manifest_file::ManifestError;
pub use format::pack::{Pack, PackError, PackName};
pub use format::store_folder::{MovedStore, OpenError, Store};
pub use format::store_key::{InvalidKey, Key};
pub use fs::durable;
pub(crate) use fs::fence;
pub use fs::lock::{LockError, StoreLock};
pub use fs::store_place::PlaceError;
pub(crate) use fs::store_place::check_new;
pub use maintain::comparison::{Comparison, Shares, StreamComparison, compare};
pub use maintain::disk_usage::{Usage, usage};
pub use maintain::image_copy::CopyError;
pub use maintain::image_list::ImageEntry;
pub(crate) use maintain::image_removal::plan_named;
pub use maintain::image_removal::{Effort, ForgetError, Forgotten, GoesOn};
pub use maintain::pins::PinError;
pub(crate) use maintain::pins::checked_note;
pub use maintain::retention::{Fate, KeptBy, Planned, Policy, RemovedBy};
pub use maintain::store_repair::{Marks, Remedy, RepairPlan, Repaired, RepairedImage};
pub use maintain::sweep::Swept;
pub use maintain::verification::{Selection, Verified};
pub use maintain::verify_report::{BadRun, BadStream, ChunkFault, ImageReport, Report, Verdict};
pub use portable::{
    Companion, CompanionError, ExportError, Exported, FileDamage, Form, ImportError, PortableReader,
};
pub use read::image_reader::ImageReader;
pub use read::stream_reader::StreamReader;
pub use remote::image_object::RemoteImage;
pub use remote::remote_error::RemoteError;
pub use write::image_writer::{ImageWriter, WriteOptions};
pub use write::stream_writer::{StreamOpener, StreamWriter};
pub use write::unchanged_chunks::EarlierStreams;
pub use write::work_times::WorkShares;
