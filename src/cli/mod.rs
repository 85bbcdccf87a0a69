//! The command line: arguments in, exit code out. Each verb has a file; the library does its work.
//!
//! `arguments` has the grammar, `dispatch` calls the verbs, `global` has what all verbs share.

mod arguments;
mod completions;
mod config;
pub(crate) mod control;
mod cuda;
mod dispatch;
pub mod doctor;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_cli;
mod global;
mod key;
mod man;
mod plan;
mod print;
mod rehearse;
mod report;
mod run;
pub(crate) mod store;
mod template;
mod wrong_line;

pub use arguments::parses;
pub use dispatch::main;
