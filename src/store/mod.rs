//! The image store: a folder that holds the snapshots of one job.
//!
//! ```text
//! format                   "ckpt-run store 2"
//! key-check                by what an encrypted store knows its key
//! lock                     flocked by the one process that writes; says which
//! images/000012.manifest   what image 12 is made of; its name is the commit
//! images/000012.damaged    why image 12 must not be restored
//! images/000012.pinned     a note; no rule removes image 12
//! packs/000012-00.pack     compressed chunks that image 12 added
//! ```
//! Anything else in the folder belongs to others and is left alone, but for files whose
//! names begin with `.tmp-`, which a sweep removes. The folder has mode 0700 and its
//! files 0600, because images hold every secret the job had in memory.
//!
//! An image is a set of named streams. A stream is cut into chunks by its content, at
//! borders of 4 KiB pages, 16 to 256 KiB long; a chunk is named by the BLAKE3 hash of its
//! bytes; chunks of zeros are only counted, a chunk that one of the newest images has is
//! not written again, the rest is compressed where a sample says that it pays.
//!
//! ```text
//! begin ─▶ streams fill buffers ─▶ workers: cut, hash, look up, compress, append to packs
//!       ─▶ packs synced ─▶ manifest written, synced, renamed ─▶ folder synced
//! ```
//! So a visible image is whole and durable, and a crash at any point leaves the older images intact. `format` documents
//! the formats of [manifests](Manifest) and packs; each file carries its format and the lowest format that its reader must
//! know. A newer store is read as far as that allows, and never written.
//!
//! A store that is created with a [`Key`] is encrypted: the names of chunks are derived with the key, chunks are sealed
//! after compression, and so are both parts of a manifest (`format/cipher`). These stay in plain text: the names of files,
//! which number images and packs; their lengths and times; headers, which repeat the names; the reasons in `.damaged`,
//! which name a stream and a place in it; and the notes in `.pinned`. A process that can write to the store can remove an
//! image or put an older one back under its name, but cannot make one.
//!
//! `write` makes images, `read` reads them, `maintain` lists, removes, verifies, repairs and copies them, `portable` turns
//! one into a file and back, and `fs` is the only code that changes the disk. The code blocks, on plain threads, and knows
//! nothing of the origin of the streams.

mod byte_counter;
mod error;
pub(crate) mod format;
pub(crate) mod fs;
pub(crate) mod maintain;
mod portable;
pub(crate) mod read;
#[cfg(any(fuzzing, test))]
pub(crate) mod tests;
pub(crate) mod write;

pub use byte_counter::ByteCounter;
pub use error::{ReadError, WriteError};
pub use format::chunk::{CHUNK_BYTES, Hash};
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
pub use fs::lock::{LockError, StoreLock};
pub use fs::store_place::PlaceError;
pub use maintain::comparison::{Comparison, Shares, StreamComparison, compare};
pub use maintain::disk_usage::{Usage, usage};
pub use maintain::image_copy::CopyError;
pub use maintain::image_list::ImageEntry;
pub use maintain::image_removal::{Effort, ForgetError, Forgotten, GoesOn};
pub use maintain::pins::PinError;
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
pub use write::image_writer::{ImageWriter, WriteOptions};
pub use write::stream_writer::{StreamOpener, StreamWriter};
