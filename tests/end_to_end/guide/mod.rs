//! README and guide say what is so: every command line and every key in them exists, pages that walk through something
//! are walked through, links lead somewhere, and the example in Rust supervises a job.

mod commands;
mod library;
mod links;
mod pages;
mod settings;
mod terminal;
mod walks;
