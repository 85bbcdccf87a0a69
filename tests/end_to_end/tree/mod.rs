//! Kinds of processes and resources that survive: each job uses one kind, is snapshotted and killed in the middle,
//! restored, and must end like an uninterrupted run.

mod appended_files;
mod attributes;
mod connections;
mod devices;
mod events;
mod folder_links;
mod folders;
mod hard_links;
mod mapped_memory;
mod mounts;
mod names;
mod namespaces;
mod open_files;
mod proc_files;
mod processes;
mod random_files;
mod refused_kinds;
mod refused_names;
mod rounds;
mod sockets;
mod survival;
mod system_v;
mod unrestorable;
mod waits;
