//! Memory that a program creates and maps itself: `cuMemCreate`, `cuMemMap` and related functions, as in the
//! expandable segments of `PyTorch`, JAX and vLLM.
//!
//! ```text
//! cuMemCreate   the driver's memory, exportable  ──▶ the program gets a handle of the agent
//! cuMemMap      the driver's handle in its place ──▶ mapping, with its access, is recorded
//! a snapshot    unmap all mappings, release      …   import, map all mappings, set access
//! ```
//! The driver gives an imported memory a new handle, so the program's handles are the agent's, and every function that
//! takes one is replaced. Addresses are reserved by the program and stay reserved. All other memory is the driver's:
//! memory of the host, compressed memory, tile pools for sparse arrays, and memory with handles for other machines.

mod calls;
mod mappings;

pub use calls::{
    bind_multicast, bind_multicast_of, create, create_multicast, export, get_properties, import,
    map, release, retain, set_access, unmap,
};
pub use mappings::{map_all, unmap_all};
