//! The `ckpt-run` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ckpt_run::sandbox::await_children();
    ckpt_run::sandbox::survive_file_limits();
    ckpt_run::helper_main().unwrap_or_else(ckpt_run::cli::main)
}
