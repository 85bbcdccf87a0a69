//! Client of the agent, which keeps device memory on the GPU during a snapshot.
//!
//! ```text
//! install, environment ─▶ the job preloads the agent (src/agent)
//! Channel ─▶ Agent: hello, probe, release ─▶ a descriptor for each piece of memory …… map ─▶ all mapped again
//! ```
//! The agent allocates large pieces of a process's device memory in a form that other processes can hold. After a
//! release only the descriptors keep the memory alive, and the driver has little left to save. The caller decides about
//! the use of the descriptors.

mod agent;
mod channel;
mod embed;
mod error;
mod receipt;
mod request;

pub use agent::{Agent, Hello, Holding, Origin};
pub use channel::Channel;
pub use embed::{
    LIBRARY_PREFIX, Library, PRELOAD_VARIABLE, Token, TokenError, environment, install,
    preload_before,
};
pub use error::AgentError;
pub use receipt::{Held, Segment};

use crate::agent::wire;
pub use crate::agent::wire::TOKEN_VARIABLE;

mod datagram;
#[cfg(test)]
mod tests;
