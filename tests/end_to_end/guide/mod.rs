//! Checks of README and guide: all command lines and keys in them exist, step-by-step pages are executed, links have
//! targets, and the Rust example supervises a job.

mod commands;
mod library;
mod links;
mod pages;
mod settings;
mod terminal;
mod walks;
