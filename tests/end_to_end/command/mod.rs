//! Tests of the command line: verbs without a job, completions, manual pages.

mod completions;
mod cuda_verbs;
mod manual;
mod verbs;
