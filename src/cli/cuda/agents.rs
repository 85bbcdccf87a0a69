//! Refusal of processes of a ckpt-run job whose GPU memory the driver alone would lose.

use std::io;
use std::time::Duration;

use crate::agent_client::{AgentError, Channel, Hello, TOKEN_VARIABLE, Token};
use crate::cuda::{Driver, State};
use crate::job;
use crate::run::STORE_VARIABLE;

/// Time limit for an agent to report its memory; it answers without any work.
const HELLO_LIMIT: Duration = Duration::from_secs(1);

/// The reason why processes are not suspended; nothing was done.
#[derive(Debug, thiserror::Error)]
pub(super) enum BoundError {
    #[error(
        "cannot suspend process {pid}: the driver alone would lose GPU memory that it shares with other processes or \
         that a snapshot left on the GPU; `ckpt-run pause --store {store}` suspends the whole job"
    )]
    Bound { pid: i32, store: String },
    #[error("cannot suspend process {pid}: its agent does not report which GPU memory it holds")]
    Agent {
        pid: i32,
        #[source]
        source: AgentError,
    },
    #[error("cannot create a socket for requests to the agents of the processes")]
    Socket(#[from] io::Error),
}

/// Queries the agents of processes that are not suspended yet, and fails if the driver alone cannot restore one of the
/// processes.
pub(super) fn ask(driver: &Driver, pids: &[i32]) -> Result<(), BoundError> {
    let mut channel = Channel::bind()?;
    // The agent of a suspended process waits for the driver.
    let is_suspended = |pid: &i32| matches!(driver.process(*pid).state(), Ok(State::Checkpointed));
    for pid in pids.iter().filter(|pid| !is_suspended(pid)) {
        let environment = job::environment(*pid);
        let hello = hello(&mut channel, *pid, &environment);
        let hello = hello.map_err(|source| BoundError::Agent { pid: *pid, source })?;
        if hello.is_some_and(|hello| hello.imported || hello.lends || hello.released) {
            let store = job::variable(&environment, STORE_VARIABLE);
            return Err(BoundError::Bound {
                pid: *pid,
                store: store.unwrap_or_else(|| "DIR".to_owned()),
            });
        }
    }
    Ok(())
}

/// Returns the answer of a process's agent, if there is one.
fn hello(channel: &mut Channel, pid: i32, environment: &[u8]) -> Result<Option<Hello>, AgentError> {
    let token = job::variable(environment, TOKEN_VARIABLE);
    let token = token.and_then(|token| token.parse::<Token>().ok());
    let who = token.zip(job::number_inside(pid, pid)).zip(job::user(pid));
    let Some(((token, inside), user)) = who else {
        return Ok(None);
    };
    let agent = channel.agent(&token, inside);
    let mut agent = agent.owned_by(user).while_alive(pid);
    agent.hello(HELLO_LIMIT)
}
