//! Running a job as a user sees it: streams, environment, signals, exit codes, hooks.

mod hooks;
mod idle;
mod io_uring;
mod orphans;
mod pause;
mod plain;
mod python_module;
mod signals;
mod stop;
mod streams;
mod surroundings;
