//! `ckpt-run` in the hands of an ordinary user: no root, no capabilities, nothing installed by an administrator.
//!
//! Many tests elsewhere run as this user too (`#[apply(as_root_and_user)]`). Here is what differs.

mod basics;
mod memory;
mod refusals;
