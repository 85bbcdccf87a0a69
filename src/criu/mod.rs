//! Interface to CRIU: its command lines, its image stream, its plugin, and its log.
//!
//! CRIU runs by its command line inside the job's sandbox, because its other interfaces do not support `--stream`. This
//! module builds the command lines and implements the stream protocol. It does not depend on the source or destination
//! of images.
//!
//! Sources: CRIU 4.1.1 and 4.2.1 (`img-streamer.c`, `cr-dump.c`, `pipes.c`).

mod capture;
mod command;
mod criu_version;
mod file_sizes;
pub(crate) mod find;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_criu;
mod image_pipe;
mod log;
mod long_read;
mod message;
mod omitted;
mod plugin;
mod question;
mod serve;

pub use capture::{Capture, CaptureError, Captured};
pub use command::{
    DumpOptions, ImageSource, Inherited, RestoreOptions, Tcp, Unaccepted, dump_arguments,
    restore_arguments,
};
pub use criu_version::Version;
pub use file_sizes::{OPEN_FILES, without_sizes};
pub use find::{CheckError, Criu, FindError, Search};
pub use image_pipe::{ImagePipe, Sending, plugin_reads_directly};
pub use log::{Reason, reason_in, reports_passing, reports_shortage};
pub use message::MEMORY_FILES;
pub use omitted::{OmittedState, Refused, lock_record};
pub use plugin::{
    PluginVariable, install_plugin, plugin_calls, plugin_ends, plugin_interposes,
    plugin_leaves_filters, plugin_numbers, plugin_repeats, plugin_restores, plugin_takes,
};
pub use question::{Question, asks_at_dump, asks_when_restored, plugin_follows_no_links};
pub use serve::Serve;

#[cfg(test)]
mod stand_in_tests;
