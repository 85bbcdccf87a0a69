//! The exit codes of the supervisor. All other codes are the job's own.

/// The job was saved and stopped: running the same command line again continues it.
pub(crate) const SAVED: u8 = 75;
/// The lease of the run was lost: another machine continues the run, or may do so.
pub(crate) const LEASE_LOST: u8 = 76;
/// ckpt-run itself failed, before or around the job.
pub const OURS: u8 = 125;
/// The command is not executable, as a shell reports it.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The command was not found, as a shell reports it.
pub(crate) const NOT_FOUND: u8 = 127;
/// The job was terminated by SIGTERM.
pub(crate) const TERMINATED: u8 = 128 + 15;
