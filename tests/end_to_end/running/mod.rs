//! Running a job as a user sees it: streams, environment, signals, exit codes, hooks.

mod hidden;
mod hooks;
mod idle;
mod orphans;
mod pause;
mod plain;
mod processor;
mod python_module;
mod signals;
mod stop;
mod streams;
mod surroundings;
