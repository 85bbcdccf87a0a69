//! CRIU as an external program.

mod find;
mod version;

pub use find::{AskError, CheckError, Criu, FindError, Search};
pub use version::Version;
