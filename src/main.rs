//! The `ckpt-run` command.

fn main() {}
