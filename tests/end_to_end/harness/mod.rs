//! Shared parts of the end-to-end tests: a run of the real `ckpt-run` on the real CRIU, in a folder of its own.

mod damage;
pub mod fake_gpu;
mod jobs;
mod outcome;
mod place;
mod privilege;
mod process_tree;
mod pseudo_terminal;
mod run;
mod scripts;

pub use damage::{damage, flip};
pub use jobs::{COUNT, ON_REQUEST, UNTIL_GO, lines};
pub use macro_rules_attribute::apply;
pub use outcome::{LIMIT, code, connected, holds, stderr, stdout, wait_until, wait_until_or};
pub use place::Place;
pub use privilege::{Ordinary, Privilege, TUN, installed, is_open_to_all, network_of_test, skip};
pub(crate) use privilege::{
    as_root, as_root_and_in_own_network, as_root_and_user, as_user, in_own_network, run_as,
    run_twice,
};
pub use process_tree::{
    descendants, inner_pid, is_dead, job_of, name_of, state, wait_for_descendant, wait_until_gone,
};
pub use pseudo_terminal::PseudoTerminal;
pub use run::Run;
pub use scripts::{copy_environment, criu_prefix, criu_script, program, write_script};
