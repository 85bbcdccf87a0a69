//! Device memory that stays on the GPU: the agent that the program carries, and what the supervisor says to it.
//!
//! ```text
//! install, environment ─▶ the job preloads the agent (src/agent)
//! Channel ─▶ Agent: hello, probe, release ─▶ a descriptor for each piece of memory …… map ─▶ all is as before
//! ```
//! The agent backs large allocations of a process by memory that others can keep. Released, the memory is held by the
//! descriptors alone, and the driver has little left to save. What is done with the descriptors is not known here.

mod agent;
mod channel;
mod embed;
mod error;
mod receipt;
mod request;

pub use agent::{Agent, Hello, Holding, Origin};
pub use channel::Channel;
pub use embed::{LIBRARY_PREFIX, PRELOAD_VARIABLE, Token, TokenError, environment, install};
pub use error::AgentError;
pub use receipt::{Held, Segment};

use crate::agent::wire;
pub use crate::agent::wire::TOKEN_VARIABLE;

mod datagram;
#[cfg(test)]
mod tests;
