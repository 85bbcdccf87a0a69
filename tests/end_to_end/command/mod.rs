//! The command line: verbs without a job of their own, completions, manual pages.

mod completions;
mod cuda_verbs;
mod manual;
mod verbs;
